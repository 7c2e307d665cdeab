"""Tests of the Triton kernels, and the operations of a step on a GPU."""
