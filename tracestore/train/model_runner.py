"""Run a detector's model on its device: steps, their losses, the scores of a split, and the statistics of its inputs."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from tracestore.data.batches.batch_format import View
from tracestore.detectors.graph.gine import GINE, is_fused
from tracestore.detectors.layers.dropout import masks_on_device
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.layers.precision import autocast_for
from tracestore.detectors.models import DetectorModel, DetectorOutput, Standardizer, detector_loss
from tracestore.errors import InsufficientMemoryError, TrainingError
from tracestore.oom.guard import OOMGuard
from tracestore.oom.oom_errors import is_out_of_memory
from tracestore.oom.optimizers import Adam
from tracestore.oom.step_loss import StepLoss
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore
from tracestore.train.batches import AccumulatedBatch, BatchFeed, DeviceBatch
from tracestore.train.config import TrainConfig
from tracestore.train.distributed import DistributedContext
from tracestore.train.signals import StopReason, StopSignals
from tracestore.train.step_graphs import ReplayedLoss, StepGraphs, StepInputs

_WEIGHT_DECAY = 1e-5


class ModelRunner:
    """A detector's model with its precision, noise and activation checkpointing.

    Parameters
    ----------
    model : DetectorModel
    model_config : ModelConfig
    config : TrainConfig
    """

    def __init__(self, model: DetectorModel, model_config: ModelConfig, config: TrainConfig) -> None:
        self.model_config, self.config = model_config, config
        self.graphs: StepGraphs | None = None
        self.device = torch.device(config.device)
        self.model: DetectorModel = model.to(self.device)
        if config.activation_checkpointing:
            _checkpoint_activations(self.model)
        self._autocast = autocast_for(self.model, config.precision, self.device)

    def forward(self, given: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 logits ``(B,)`` and the mean loss of some traces."""
        with self._autocast:
            output = self.model(given.inputs, given.masks)
        output = DetectorOutput(
            output.reader_logits.float(), {name: term.float() for name, term in output.auxiliary.items()}
        )
        return output.logits, detector_loss(output, given.y, self.model_config.kl_weight)

    def make_optimizer(self, lr: float) -> Adam:
        """Return an optimizer of the model."""
        return Adam(self.model.parameters(), lr=lr, weight_decay=_WEIGHT_DECAY, fused=True)

    def record_steps(self, optimizer: torch.optim.Optimizer) -> StepGraphs | None:
        """Let `step_loss` replay CUDA graphs, and return them; None where steps cannot be recorded."""
        device, config = self.device, self.config
        if device.type != "cuda" or config.precision == "fp16" or config.activation_checkpointing:
            return None
        needs_kernels = any(isinstance(module, GINE) for module in self.model.modules())
        if not masks_on_device(device) or (needs_kernels and not is_fused(device)):
            return None
        self.graphs = StepGraphs(lambda given: self.forward(given)[1], optimizer)
        return self.graphs

    def step_loss(self, step: AccumulatedBatch, begin: int, end: int) -> torch.Tensor | ReplayedLoss:
        """Return the mean loss of traces begin to end of a step."""
        parts = list(step.slices(begin, end))
        if len(parts) == 1:
            batch, first, last = parts[0]
            given = batch.traces(first, last)
            # Gradients of accumulated batches are added; those of a recording are overwritten by the next one.
            is_alone = len(step.batches) == 1 and last - first == batch.size
            if self.graphs is not None and is_alone and batch.can_repeat:
                replayed = self.graphs.loss(given)
                if replayed is not None:
                    return replayed
            return self.forward(given)[1]
        losses = [
            self.forward(batch.traces(first, last))[1] * ((last - first) / (end - begin))
            for batch, first, last in parts
        ]
        return torch.stack(losses).sum()

    def score(self, batch: DeviceBatch, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the mean loss of traces begin to end of a batch, which a GPU may still compute."""
        return self.forward(batch.traces(begin, end))


def _checkpoint_activations(model: DetectorModel) -> None:
    """Recompute activations of the model's choice in backward. Dropout draws the same masks again."""
    module = model.get_submodule(model.recomputed)
    forward = module.forward

    def recomputed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False) if torch.is_grad_enabled() else forward(*inputs)

    module.forward = recomputed


@dataclass(frozen=True)
class SplitScores:
    """Scores of the traces of a split, in its order.

    Attributes
    ----------
    y : numpy.ndarray
        Labels ``(n,)``, 0 or 1.
    logits : numpy.ndarray
        ``(n,)``, float64.
    loss : float
        The mean loss.
    """

    y: np.ndarray
    logits: np.ndarray
    loss: float


@torch.no_grad()
def score_split(
    runner: ModelRunner, guard: OOMGuard, feed: BatchFeed, ranks: DistributedContext, stop: StopSignals
) -> SplitScores | StopReason:
    """Score every trace of the feed exactly once, without padding. All ranks return the same value.

    Returns
    -------
    SplitScores or StopReason
        The reason if a signal came or a trace does not fit into memory, on any rank.
    """
    runner.model.eval()
    scored: list[tuple[int, list[float], list[float]]] = []  # position in the split, labels, logits
    total = 0.0
    for _ in range(len(feed)):
        reason = stop.reason
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        batches = feed.next_batches(1)
        try:
            if batches and batches[0].size:
                results = guard.evaluate(batches[0].size, partial(runner.score, batches[0]))
                feed.gather_ahead(1)
        except Exception as error:
            # Only errors that end this rank at once may skip the collective, where the others wait.
            if not isinstance(error, InsufficientMemoryError) and not is_out_of_memory(error):
                raise
            reason = StopReason.OUT_OF_MEMORY
        reason = StopReason(ranks.all_reduce_max(reason if batches else StopReason.OUT_OF_MEMORY))
        if reason or not batches:
            return reason
        (batch,) = batches
        position = batch.number * feed.config.batch_size + batch.offset
        scored.append((position, batch.y.tolist(), [logit for logits, _ in results for logit in logits.tolist()]))
        total += sum(float(loss) * len(logits) for logits, loss in results)
        del batch, batches
    gathered = ranks.all_gather((scored, total))
    ordered = sorted(entry for entries, _ in gathered for entry in entries if entry[1])
    y = (np.array([label for _, labels, _ in ordered for label in labels]) >= 0.5).astype(int)
    logits = np.array([logit for _, _, logits in ordered for logit in logits])
    return SplitScores(y, logits, sum(loss for _, loss in gathered) / len(y))


class UnreadLoss(NamedTuple):
    """The loss of a step that a GPU may still compute, and what a message needs to know of its traces."""

    loss: StepLoss
    size: int
    traces: list[tuple[torch.Tensor, list[str]]]

    @classmethod
    def of(cls, step: AccumulatedBatch, loss: StepLoss) -> "UnreadLoss":
        """Return the loss of a step without its batches."""
        return cls(loss, step.global_size, [(b.trace_index, b.question_id) for b in step.batches])

    def read(self, store: TraceStore, ranks: DistributedContext, *, is_scaled: bool) -> float:
        """Return the mean loss over the traces of all ranks; end all ranks if it is not finite."""
        loss = float(ranks.all_reduce_sum(torch.tensor([self.loss.result()], dtype=torch.float64)))
        if math.isfinite(loss):
            return loss
        own = [pair for index, ids in self.traces for pair in zip(index.tolist(), ids, strict=True)]
        found = ranks.all_gather([q for i, q in own if store[i].has_nonfinite])
        ids = [q for questions in found for q in questions]
        if ids:
            reason = f"the trace of question {ids[0]!r} holds NaN or infinite values; --drop-nonfinite leaves it out"
        else:
            reason = f"questions of the step: {', '.join(q for _, q in own[:4])}, ...; lower --lr"
            if is_scaled:
                reason += ", or, as float16 ends at 65,504, use --precision bf16"
        ranks.abort_all(TrainingError(f"the loss is {loss}: {reason}"))


def fit_standardizer(
    model: DetectorModel, store: TraceStore, indices: np.ndarray, view: View, ranks: DistributedContext
) -> None:
    """Set mean and standard deviation of the model's standardizer, per column of each layer that the model reads.

    Parameters
    ----------
    model : DetectorModel
        Left unchanged if its standardizer is not active.
    store : TraceStore
    indices : numpy.ndarray
        Store indices of the training split. Each rank reads a part of them.
    view : {"sequence", "graph"}
        "sequence": statistics of the last tokens; "graph": of all tokens.
    ranks : DistributedContext

    Raises
    ------
    TrainingError
        If a trace holds NaN or infinite values in a layer that the model reads.
    """
    standardizer = next(m for m in model.modules() if isinstance(m, Standardizer))
    if not standardizer.is_active:
        return
    # The rows are sum, sum of squares and count.
    layers, nonfinite = list(model.layers_read), list[str]()
    sums = np.zeros((3, len(layers), store.hidden_dim))
    for index in indices[ranks.rank :: ranks.world_size]:
        trace = store[int(index)]
        rows = trace.last_token_bits[:, None] if view == "sequence" else trace.hidden_states_bits
        if trace.has_nonfinite and not np.isfinite(schema.as_float32(rows[layers], store.hidden_dtype)).all():
            nonfinite.append(trace.question_id)
            continue
        # Layer by layer, so that the wide values stay in the cache.
        for total, layer in zip(sums.swapaxes(0, 1), layers, strict=True):
            values = schema.as_float32(rows[layer], store.hidden_dtype).astype(np.float64)
            total[0] += values.sum(0)
            total[1] += np.einsum("sd,sd->d", values, values)
        sums[2] += rows.shape[1]
    wrong = [question for questions in ranks.all_gather(nonfinite) for question in questions]
    if wrong:
        ranks.abort_all(
            TrainingError(
                f"the trace of question {wrong[0]!r} holds NaN or infinite values ({len(wrong)} such training traces): "
                "--drop-nonfinite leaves them out"
            )
        )
    total, squares, count = ranks.all_reduce_sum(torch.from_numpy(sums))
    mean = total / count
    variance = squares / count - mean.square()
    # A column that is constant in training is only centered: other traces may have another value. The rounding of its
    # variance grows with the rows, to 3e-11 of the squared mean with a million.
    std = torch.where(variance > 1e-10 * mean.square(), variance.sqrt().clamp_min(1e-6), 1)
    standardizer.mean[layers], standardizer.std[layers] = mean.to(standardizer.mean), std.to(standardizer.std)
