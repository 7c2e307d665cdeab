"""Thin Cython bindings of csrc/: no policy, no file names, no numpy objects kept."""
