"""Stores as objects of other libraries. Import the module that you need: lightning, pyg or huggingface."""
