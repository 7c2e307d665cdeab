"""The layout language: one line that says where a field of the traces lies in files."""
