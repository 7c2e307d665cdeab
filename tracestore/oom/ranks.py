"""The collective operations that the guard needs from processes that train together."""

from collections.abc import Iterable

from torch import nn


class RankGroup:
    """Processes that train one model together. This class is a single process; subclasses connect several.

    A subclass allocates before its collective starts and does nothing that can fail after it, so
    that a call that raised can be repeated.
    """

    world_size = 1

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of an integer over the ranks."""
        return value

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the ranks, in place. A missing gradient counts as zeros."""
