"""Input folders as researchers leave them, with the traces that a conversion of each has to give.

`python -m tests.ingest.corpus OUT` writes the folders, `python -m tests.ingest.corpus.measure` converts them.
"""
