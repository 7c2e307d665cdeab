"""Run a detector's model on its device."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tracestore.detectors.config import ModelConfig
from tracestore.detectors.models import Detector, GvaeLstm, LstmSolo, Output, detector_loss
from tracestore.detectors.precision import autocast_for
from tracestore.train.batches import AccumulatedBatch, DeviceBatch
from tracestore.train.config import TrainConfig


class ModelRunner:
    """A detector's model with its precision, noise and activation checkpointing.

    Parameters
    ----------
    model : Detector
    model_config : ModelConfig
    config : TrainConfig
    """

    def __init__(self, model: Detector, model_config: ModelConfig, config: TrainConfig) -> None:
        self.model_config = model_config
        self.device = torch.device(config.device)
        self.model: Detector = model.to(self.device)
        if config.activation_checkpointing:
            _checkpoint_activations(self.model)
        self._autocast = autocast_for(self.model, config.precision, self.device)

    def forward(self, batch: DeviceBatch, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 logits ``(end - begin,)`` and the mean loss of traces begin to end of a batch."""
        inputs, y = batch.traces(begin, end)
        c = self.model_config
        with self._autocast:
            if not self.model.training:
                output = self.model(inputs)
            elif isinstance(self.model, GvaeLstm):
                noise = batch.noise(begin, end, c.num_layers_read, c.latent_dim)
                output = self.model(inputs, batch.masks(begin, end), noise)
            else:
                output = self.model(inputs, batch.masks(begin, end))
        output = Output(output.logits.float(), {name: term.float() for name, term in output.auxiliary.items()})
        return output.logits, detector_loss(output, y, c.kl_weight)

    def step_loss(self, step: AccumulatedBatch, begin: int, end: int) -> torch.Tensor:
        """Return the mean loss of traces begin to end of a step."""
        losses = [
            self.forward(batch, first, last)[1] * ((last - first) / (end - begin))
            for batch, first, last in step.slices(begin, end)
        ]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def score(self, batch: DeviceBatch, begin: int, end: int) -> tuple[list[float], float]:
        """Return the logits and the summed loss of traces begin to end of a batch."""
        logits, loss = self.forward(batch, begin, end)
        return logits.tolist(), float(loss) * (end - begin)


def _checkpoint_activations(model: Detector) -> None:
    """Recompute activations in backward: those of the graph encoder, or of the LSTM of lstm_solo.

    Dropout draws the same masks again.
    """
    module = model.reader.lstm if isinstance(model, LstmSolo) else model.encoder
    forward = module.forward

    def recomputed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False) if torch.is_grad_enabled() else forward(*inputs)

    module.forward = recomputed  # type: ignore[assignment]
