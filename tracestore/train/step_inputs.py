"""The inputs of a training step, on the device of the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.layers.dropout import TraceMasks


@dataclass
class StepInputs:
    """The inputs of some traces of a batch.

    Parameters
    ----------
    inputs : torch.Tensor or GraphInputs
        Sequences ``(B, L, D)``, or graphs.
    y : torch.Tensor
        Labels ``(B,)``.
    masks : TraceMasks, optional
        Dropout masks, and the noise of a variational autoencoder, in training.
    """

    inputs: Any
    y: torch.Tensor
    masks: TraceMasks | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        inputs = self.inputs.tensors() if isinstance(self.inputs, GraphInputs) else [self.inputs]
        return [*inputs, self.y, *([] if self.masks is None else [self.masks.state])]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "StepInputs":
        """Return a copy with a function applied to each tensor, in the order of `tensors`."""
        inputs = self.inputs._map(function) if isinstance(self.inputs, GraphInputs) else function(self.inputs)
        y, masks = function(self.y), self.masks
        if masks is not None:
            masks = TraceMasks(masks.key, masks.first, masks.count)
            masks.state = function(self.masks.state)  # type: ignore[union-attr]
        return StepInputs(inputs, y, masks)
