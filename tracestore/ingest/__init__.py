"""Reading untrusted pickles and .pt files as data; see docs/ingest.md.

No name in a file is ever imported or called: every allowed name stands for a
builder of ours that records plain data, checks it, and only then makes an array.
"""
