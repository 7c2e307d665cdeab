"""Kinds of containers whose traces are in parts: steps, rows, groups and nested records."""
