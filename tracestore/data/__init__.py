"""Datasets, loaders and batches for PyTorch and PyTorch Geometric."""
