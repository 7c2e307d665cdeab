"""A language model answers questions; what it leaves inside becomes traces."""

import os

# Loading a GGUF file draws a progress bar of its own, also into logs. tqdm reads
# this when it is first imported, which torch does.
os.environ.setdefault("TQDM_DISABLE", "1")
