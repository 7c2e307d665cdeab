"""Stores as pickles and .pt files, and folders of pickles batch by batch."""
