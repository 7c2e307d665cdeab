"""The collective operations that the guard needs from processes that train together."""

from collections.abc import Iterable
from typing import Protocol

from torch import nn


class RankGroup(Protocol):
    """Processes that train one model together.

    An implementation allocates before its collective starts and does nothing that can fail
    after it, so that a call that raised can be repeated.
    """

    world_size: int

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of an integer over the ranks."""

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the ranks, in place. A missing gradient counts as zeros."""


class SingleRank:
    """A `RankGroup` of one process."""

    world_size = 1

    def all_reduce_max(self, value: int) -> int:
        """Return the value."""
        return value

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the gradients unchanged."""
