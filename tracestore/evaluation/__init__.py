"""Splits, metrics, significance tests, and the files and plots that report them."""
