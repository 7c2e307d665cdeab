"""Trained detectors applied to stores."""
