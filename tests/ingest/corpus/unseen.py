"""Kinds that differ strongly from those of the main corpus, for a measurement without knowledge of the readers."""
