"""Splits, metrics and significance tests."""
