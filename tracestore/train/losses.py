"""The loss of a training step, read after the next step has been submitted."""

import math
from typing import NamedTuple

import torch

from tracestore.errors import TrainingError
from tracestore.oom.step_loss import StepLoss
from tracestore.store.read.store import TraceStore
from tracestore.train.batches import AccumulatedBatch
from tracestore.train.distributed import DistributedContext


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
