"""Triton kernels of the detectors."""
