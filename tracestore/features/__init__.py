"""Features of all traces of a store, computed in one pass for all layers and cached outside of the store."""
