"""Layouts of arrays in containers: several traces in one array, and one trace in several rows or files."""
