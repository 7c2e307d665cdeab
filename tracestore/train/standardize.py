"""Mean and standard deviation of the training traces, for --standardize."""

import numpy as np
import torch

from tracestore.detectors.models import Detector, Standardizer
from tracestore.errors import TrainingError
from tracestore.store.read.store import TraceStore
from tracestore.train.distributed import DistributedContext


def fit_standardizer(
    model: Detector, store: TraceStore, indices: np.ndarray, view: str, ranks: DistributedContext
) -> None:
    """Sets the model's standardiser, where it is active, per layer and column over the
    traces `indices`: their last tokens (view "sequence") or all tokens. Each rank reads a part.
    TrainingError where one of these is not finite in a layer that the model reads."""
    standardiser = next(m for m in model.modules() if isinstance(m, Standardizer))
    if not standardiser.is_active:
        return
    # Sum, sum of squares, and in the third row the count.
    sums = torch.zeros(3, store.num_layers, store.hidden_dim, dtype=torch.float64)
    layers, nonfinite = model.layers_read, list[str]()
    for index in indices[ranks.rank :: ranks.world_size]:
        trace = store[int(index)]
        rows = trace.last_token[:, None] if view == "sequence" else trace.hidden_states
        values = _as_float(rows, store.hidden_dtype)
        if trace.has_nonfinite and not values[list(layers)].isfinite().all():
            nonfinite.append(trace.question_id)
        sums[0] += values.sum(1)
        sums[1] += values.square().sum(1)
        sums[2] += values.shape[1]
    wrong = [question for of_rank in ranks.gather(nonfinite) for question in of_rank]
    if wrong:
        ranks.abort_all(
            TrainingError(
                f"the trace of question {wrong[0]!r} holds NaN or infinite values ({len(wrong)} such training traces): "
                "without its file, or without --standardize"
            )
        )
    total, squares, count = ranks.sum(sums)
    mean = total / count
    standardiser.mean.copy_(mean)
    standardiser.std.copy_((squares / count - mean.square()).clamp_min(0).sqrt().clamp_min(1e-6))


def _as_float(rows: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy((rows.astype("<u4") << 16).view("<f4")).double()
    return torch.from_numpy(rows.astype("<f8"))
