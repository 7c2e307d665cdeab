"""Readers of containers: each yields the tree of a file, without names, roles or axes."""

from tracestore.ingest.readers.opening import open_tree

__all__ = ["open_tree"]
