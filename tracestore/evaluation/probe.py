"""The honest baseline: logistic regression on the last token of one layer."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tracestore.data.loader import TraceLoader
from tracestore.detectors.logistic import fit_logistic
from tracestore.errors import TrainingError
from tracestore.evaluation.evaluate import evaluate_part
from tracestore.evaluation.metrics import auroc, fit_temperature, youden_threshold
from tracestore.evaluation.split import Split
from tracestore.store.read.store import TraceStore

INVERSE_REGULARISATION = 0.01


# Of the features that are held at once: those of some layers.
_FEATURE_BYTES = 1 << 30


def _features(store: TraceStore, indices: np.ndarray, layers: range) -> np.ndarray:
    """(n, len(layers), D) float32 last tokens."""
    # All of them here: with several ranks it is the first one alone that asks.
    loader = TraceLoader(
        store, "sequence", batch_size=256, shuffle="none", indices=indices, num_threads=1, rank=0, world_size=1
    )
    out = np.empty((len(indices), len(layers), store.hidden_dim), np.float32)
    begin = 0
    for batch in loader:
        chosen = batch.sequences[:, layers.start : layers.stop]
        torch.from_numpy(out[begin : begin + len(chosen)]).copy_(chosen)
        begin += len(chosen)
    return out


def _by_layer(store: TraceStore, split: Split) -> Iterator[dict[str, np.ndarray]]:
    """(n, D) float32 of each part, layer after layer."""
    count = sum(map(len, split.indices.values()))
    step = max(1, _FEATURE_BYTES // (4 * store.hidden_dim * count))
    for first in range(0, store.num_layers, step):
        layers = range(first, min(first + step, store.num_layers))
        x = {part: _features(store, indices, layers) for part, indices in split.indices.items()}
        for k in range(len(layers)):
            yield {part: of_part[:, k] for part, of_part in x.items()}
        del x  # before those of the next layers


def run_probe(store: TraceStore, split: Split, targets: np.ndarray, seed: int) -> dict[str, Any]:
    """Fits one probe a layer on the training part, chooses the layer on validation, and
    tests it once. The same keys as a model's entry in results.json, `layer`, and the validation
    AUROC of every layer; NaN for layers with values that are not finite, of which none is
    chosen. TrainingError where there is no other."""
    y = {part: (targets[indices] >= 0.5).astype(int) for part, indices in split.indices.items()}
    best: tuple[float, int, np.ndarray, np.ndarray] | None = None
    by_layer = []
    for layer, x in enumerate(_by_layer(store, split)):
        if not all(np.isfinite(of_part).all() for of_part in x.values()):
            by_layer.append(math.nan)
            continue
        model = fit_logistic(x["train"], y["train"], INVERSE_REGULARISATION)
        val = model.logits(x["val"])
        by_layer.append(auroc(y["val"], val))
        if best is None or by_layer[-1] > best[0]:
            best = (by_layer[-1], layer, val, model.logits(x["test"]))
    if best is None:
        raise TrainingError("the probe found no layer without NaN or infinite values; --no-probe leaves it out")
    _, layer, val, test = best
    threshold, temperature = youden_threshold(y["val"], val), fit_temperature(y["val"], val)
    return {
        **evaluate_part(store, split.indices["test"], y["test"], test, threshold, temperature, seed),
        "best_val_auroc": best[0],
        "layer": layer,
        "val_auroc_by_layer": by_layer,
    }
