"""Training runs: detectors, folds and seeds, their results and comparisons."""
