"""Stores in the terms of other libraries, each imported by itself: lightning, pyg, huggingface."""
