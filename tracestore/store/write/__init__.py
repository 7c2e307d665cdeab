"""Writing a store: packing traces, segments, commits."""
