"""Bytes of input files: mapped, inflated, limited."""
