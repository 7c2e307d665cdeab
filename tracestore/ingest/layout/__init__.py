"""The layout language: one line for the place of each field in files."""
