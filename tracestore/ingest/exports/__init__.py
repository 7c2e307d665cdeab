"""Folders that `tracestore export` has written, read back exactly."""
