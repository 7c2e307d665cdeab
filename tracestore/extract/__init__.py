"""Traces of a language model while it answers questions.

`capture` records a model inside your own loop. `tracestore extract` is such a loop.
"""

from typing import TYPE_CHECKING

from tracestore.extract.select import Select
from tracestore.extras import import_on_use

if TYPE_CHECKING:
    from tracestore.extract.hooks import Capture, capture

__all__ = ["Capture", "Select", "capture"]

# Reading questions needs no torch.
__getattr__ = import_on_use(__name__, {"tracestore.extract.hooks": ("Capture", "capture")}, "extract")
