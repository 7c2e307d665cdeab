"""Mean and standard deviation of the training split, for the standardization of the inputs."""

import numpy as np
import torch

from tracestore.data.batch_format import View
from tracestore.detectors.models import Detector, Standardizer
from tracestore.errors import TrainingError
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore
from tracestore.train.distributed import DistributedContext


def fit_standardizer(
    model: Detector, store: TraceStore, indices: np.ndarray, view: View, ranks: DistributedContext
) -> None:
    """Set mean and standard deviation of the model's standardizer, per column of each layer that the model reads.

    Parameters
    ----------
    model : Detector
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
    sums = torch.zeros(3, len(layers), store.hidden_dim, dtype=torch.float64)
    for index in indices[ranks.rank :: ranks.world_size]:
        trace = store[int(index)]
        rows = trace.last_token_bits[:, None] if view == "sequence" else trace.hidden_states_bits
        values = torch.from_numpy(schema.as_float32(rows[layers], store.hidden_dtype)).double()
        if trace.has_nonfinite and not values.isfinite().all():
            nonfinite.append(trace.question_id)
        sums[0] += values.sum(1)
        sums[1] += values.square().sum(1)
        sums[2] += values.shape[1]
    wrong = [question for questions in ranks.all_gather(nonfinite) for question in questions]
    if wrong:
        ranks.abort_all(
            TrainingError(
                f"the trace of question {wrong[0]!r} holds NaN or infinite values ({len(wrong)} such training traces): "
                "leave it out with --drop-nonfinite, or train with --no-standardize"
            )
        )
    total, squares, count = ranks.all_reduce_sum(sums)
    mean = total / count
    standardizer.mean[layers] = mean.to(standardizer.mean)
    standardizer.std[layers] = (
        (squares / count - mean.square()).clamp_min(0).sqrt().clamp_min(1e-6).to(standardizer.std)
    )
