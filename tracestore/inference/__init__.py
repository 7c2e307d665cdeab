"""Apply trained detectors to stores."""
