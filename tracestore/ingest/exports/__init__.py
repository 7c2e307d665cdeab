"""Folders that `tracestore export` has written, read back exactly."""

EXPORT_FILE = "tracestore_export.json"
STORE_FILE = "store.json"  # what all traces share
