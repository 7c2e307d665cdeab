"""Mean and standard deviation of the training split, for the standardization of the inputs."""

import numpy as np
import torch

from tracestore.data.batches.batch_format import View
from tracestore.detectors.models import DetectorModel, Standardizer
from tracestore.errors import TrainingError
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore
from tracestore.train.distributed import DistributedContext


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
