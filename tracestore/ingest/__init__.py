"""Read untrusted pickles and .pt files as data; see docs/ingest.md.

No name in a file is ever imported or called. Every accepted name has a stand-in that records
plain data, checks it, and only then makes an array.
"""
