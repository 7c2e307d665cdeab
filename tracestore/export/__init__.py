"""Export of stores to pickles and .pt files, and dicts of traces batch by batch."""
