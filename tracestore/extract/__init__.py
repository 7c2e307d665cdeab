"""A language model answers questions; what it leaves inside becomes traces.

`capture` records a model in one's own loop; `tracestore extract` is such a loop.
"""

import os
from typing import TYPE_CHECKING, Any

from tracestore.extras import needs

if TYPE_CHECKING:
    from tracestore.extract.hooks import Capture, capture

__all__ = ["Capture", "capture"]

# Loading a GGUF file draws a progress bar of its own, also into logs. tqdm reads
# this when it is first imported, which torch does.
os.environ.setdefault("TQDM_DISABLE", "1")


def __getattr__(name: str) -> Any:
    # On first use: reading questions needs no torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("extract"):
        from tracestore.extract import hooks

    return getattr(hooks, name)
