"""Comparison of detectors on frozen folds, with controls, intervals and tests."""
