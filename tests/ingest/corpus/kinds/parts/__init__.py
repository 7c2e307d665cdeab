"""Traces in several files, records, keys or objects."""
