"""A detector's model on its device: traces in, logits and losses out."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tracestore.detectors.config import ModelConfig
from tracestore.detectors.models import Detector, GvaeLstm, LstmSolo, Output, detector_loss
from tracestore.detectors.precision import autocast_for
from tracestore.detectors.registry import make_model
from tracestore.train.batches import AccumulatedBatch, DeviceBatch
from tracestore.train.config import TrainConfig


class ModelRunner:
    """The model, and how it is computed: precision, noise, kept activations."""

    def __init__(self, name: str, model_config: ModelConfig, config: TrainConfig) -> None:
        self.model_config = model_config
        self.device = torch.device(config.device)
        self.model: Detector = make_model(name, model_config)
        self.model.to(self.device)
        if config.activation_checkpointing:
            _checkpoint_activations(self.model)
        self._autocast = autocast_for(self.model, config.precision, self.device)

    def batch(self, batch: DeviceBatch, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 logits (end - begin,) and mean loss of the traces begin .. end of a batch."""
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
        """The mean loss of the traces begin .. end of a step."""
        shares = [
            self.batch(batch, first, last)[1] * ((last - first) / (end - begin))
            for batch, first, last in step.pieces(begin, end)
        ]
        return shares[0] if len(shares) == 1 else torch.stack(shares).sum()

    def scores(self, batch: DeviceBatch, begin: int, end: int) -> tuple[list[float], float]:
        """Logits, and the sum of the losses."""
        logits, loss = self.batch(batch, begin, end)
        return logits.tolist(), float(loss) * (end - begin)


def _checkpoint_activations(model: Detector) -> None:
    """Computes again in backward what forward need not keep: the graph encoder of the
    graph models, the LSTM of the other. Dropout draws the same masks."""
    module = model.reader.lstm if isinstance(model, LstmSolo) else model.encoder
    forward = module.forward

    def again(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False) if torch.is_grad_enabled() else forward(*inputs)

    module.forward = again  # type: ignore[assignment]
