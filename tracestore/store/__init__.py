"""The trace store: immutable Zarr v3 segments under a manifest; see docs/format.md.

The read path imports neither zarr nor torch.
"""
