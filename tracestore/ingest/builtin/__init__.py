"""Layouts of known tools: a TOML file a tool in `tools`, and which of them owns a file."""
