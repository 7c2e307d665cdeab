"""Training loops that recover from out-of-memory errors."""

from typing import TYPE_CHECKING, Any

from tracestore.extras import needs

if TYPE_CHECKING:
    from tracestore.oom.guard import OOMGuard

__all__ = ["OOMGuard"]


def __getattr__(name: str) -> Any:
    """Import OOMGuard on first use: torch takes seconds to import."""
    if name == "OOMGuard":
        with needs("train"):
            from tracestore.oom.guard import OOMGuard

        return OOMGuard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
