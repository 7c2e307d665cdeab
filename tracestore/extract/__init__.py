"""Traces of a language model while it answers questions.

`capture` records a model inside your own loop. `tracestore extract` is such a loop.
"""

from typing import TYPE_CHECKING, Any

from tracestore.extract.select import Select
from tracestore.extras import needs

if TYPE_CHECKING:
    from tracestore.extract.hooks import Capture, capture

__all__ = ["Capture", "Select", "capture"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because reading questions needs no torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("extract"):
        from tracestore.extract import hooks

    return getattr(hooks, name)
