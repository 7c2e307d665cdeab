"""Stores as data sets of the Hugging Face Hub: push, pull, and the data set card."""
