"""A training run as a whole: detectors, folds and seeds, results and comparisons."""
