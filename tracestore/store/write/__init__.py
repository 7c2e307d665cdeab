"""Writing of stores: packing traces, writing segments, committing generations."""
