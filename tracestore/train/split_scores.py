"""Logits of a whole part of the split, computed by all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tracestore.errors import InsufficientMemoryError
from tracestore.oom.errors import is_out_of_memory
from tracestore.oom.guard import OOMGuard
from tracestore.train.batches import BatchFeed, next_batch
from tracestore.train.distributed import DistributedContext
from tracestore.train.model_runner import ModelRunner


class EvaluationStopped(Exception):
    """The ranks agreed to end: `code` is a signal's number, or that of InsufficientMemoryError."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class SplitScores:
    """y (n,) 0 or 1 and logits (n,) float64 in the part's order; loss, the mean over the part."""

    y: np.ndarray
    logits: np.ndarray
    loss: float


@torch.no_grad()
def score_split(
    forward: ModelRunner, guard: OOMGuard, feed: BatchFeed, ranks: DistributedContext, stop: Callable[[], int]
) -> SplitScores:
    """Exact and without padding; the same on every rank. `stop` gives the signal that came, or 0."""
    forward.model.eval()
    batches = feed.batches()
    scored: list[tuple[int, list[float], list[float]]] = []  # place in the part, labels, logits
    total = 0.0
    for number in range(len(feed)):
        code = stop()
        pieces: list[tuple[list[float], float]] = []
        batch = next_batch(batches)
        if batch is None:
            feed.shrink()
            feed.seek(feed.loader.epoch, number)
            batches = feed.batches()
            batch = next_batch(batches)
        try:
            if batch is not None and batch.size:
                pieces = guard.evaluate(batch.size, partial(forward.scores, batch))
        except Exception as error:
            # The others wait for this rank's word.
            if not isinstance(error, InsufficientMemoryError) and not is_out_of_memory(error):
                raise
            code = InsufficientMemoryError.exit_code
        code = ranks.all_reduce_max(InsufficientMemoryError.exit_code if batch is None else code)
        if code or batch is None:
            raise EvaluationStopped(code)
        place = batch.number * feed.config.batch_size + batch.first
        scored.append((place, batch.y.tolist(), [logit for logits, _ in pieces for logit in logits]))
        total += sum(loss for _, loss in pieces)
        del batch
    gathered = ranks.gather((scored, total))
    in_order = sorted(entry for entries, _ in gathered for entry in entries if entry[1])
    y = (np.array([label for _, labels, _ in in_order for label in labels]) >= 0.5).astype(int)
    logits = np.array([logit for _, _, logits in in_order for logit in logits])
    return SplitScores(y, logits, sum(of_rank for _, of_rank in gathered) / len(y))
