"""Logits of all traces of one split, computed by all ranks."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tracestore.errors import InsufficientMemoryError
from tracestore.oom.errors import is_out_of_memory
from tracestore.oom.guard import OOMGuard
from tracestore.train.batches import BatchFeed
from tracestore.train.distributed import DistributedContext
from tracestore.train.model_runner import ModelRunner
from tracestore.train.signals import StopReason, StopSignals


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
        results: list[tuple[list[float], float]] = []
        batches = feed.next_batches(1)
        try:
            if batches and batches[0].size:
                results = guard.evaluate(batches[0].size, partial(runner.score, batches[0]))
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
        scored.append((position, batch.y.tolist(), [logit for logits, _ in results for logit in logits]))
        total += sum(loss for _, loss in results)
        del batch, batches
    gathered = ranks.all_gather((scored, total))
    ordered = sorted(entry for entries, _ in gathered for entry in entries if entry[1])
    y = (np.array([label for _, labels, _ in ordered for label in labels]) >= 0.5).astype(int)
    logits = np.array([logit for _, _, logits in ordered for logit in logits])
    return SplitScores(y, logits, sum(loss for _, loss in gathered) / len(y))
