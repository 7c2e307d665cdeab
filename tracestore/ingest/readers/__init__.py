"""Readers of containers: each yields the tree of a file, without names, roles or axes."""
