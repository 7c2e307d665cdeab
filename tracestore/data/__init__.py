"""Batches for PyTorch and PyTorch Geometric."""
