"""Training loops that recover from out-of-memory errors."""

from typing import TYPE_CHECKING

from tracestore.extras import import_on_use

if TYPE_CHECKING:
    from tracestore.oom.guard import OOMGuard

__all__ = ["OOMGuard"]

# Torch takes seconds to import.
__getattr__ = import_on_use(__name__, {"tracestore.oom.guard": __all__}, "train")
