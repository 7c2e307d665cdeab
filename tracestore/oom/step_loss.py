"""The loss of a training step, read without waiting for the GPU."""

import torch


class StepLoss:
    """The loss of a step. A GPU may still compute it when the step has been submitted.

    The values of micro-batches are added with `add`; `end` marks that the step has no more of them.
    """

    def __init__(self) -> None:
        self._parts: list[float | torch.Tensor] = []
        self._end: torch.cuda.Event | None = None

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, a scalar without a gradient. That of a GPU is copied to the CPU behind what the GPU computes."""
        if loss.device.type != "cuda":
            self._parts.append(float(loss))
            return
        copy = torch.empty((), dtype=loss.dtype, pin_memory=True)
        copy.copy_(loss, non_blocking=True)
        self._parts.append(copy)

    def end(self) -> None:
        """Mark the point of time when a GPU has computed all parts."""
        if any(isinstance(part, torch.Tensor) for part in self._parts):
            self._end = torch.cuda.Event()
            self._end.record()

    @property
    def is_computed(self) -> bool:
        """Return whether all parts have been computed."""
        return self._end is None or self._end.query()

    def result(self) -> float:
        """Return the sum of the parts, and wait until the GPU has computed them."""
        if self._end is not None:
            self._end.synchronize()
        return sum(map(float, self._parts), 0.0)
