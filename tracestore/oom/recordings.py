"""The interface between a guard and steps that are recorded and replayed."""

from typing import Any, Protocol, Self

import torch


class Loss(Protocol):
    """A scalar tensor, or what takes its place where the gradients are computed together with it."""

    def __mul__(self, factor: float, /) -> Self: ...

    def detach(self) -> torch.Tensor:
        """Return the value."""

    def backward(self) -> Any:
        """Add to the gradients of the parameters."""


class Graphs(Protocol):
    """Recordings of steps, which a loss function may replay."""

    def step(self) -> bool:
        """Step the optimizer. Return False, and do nothing, if the gradients are not those of a recording."""

    def release(self) -> None:
        """Free all memory, for good."""
