"""The baseline: logistic regression on the last token of one layer."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tracestore.data.loader import TraceLoader
from tracestore.detectors.logistic import fit_linear
from tracestore.evaluation.evaluate import evaluate_split
from tracestore.evaluation.metrics import auroc, fit_temperature, youden_threshold
from tracestore.evaluation.store_split import Split
from tracestore.store.format.labels import DEFAULT_THRESHOLD
from tracestore.store.read.store import TraceStore

INVERSE_REGULARIZATION = 0.01
# In the memory of float32, logits that are exact to 1e-4.
_PRECISION: dict[str, Any] = {"tol": 1e-6, "is_wide": False, "solver": "newton-cg"}
# Upper limit for the features that are held at a time: those of a few layers.
_FEATURE_BYTES = 1 << 30


def _features(store: TraceStore, indices: np.ndarray, layers: range) -> np.ndarray:
    """Return the last tokens (n, len(layers), D) float32."""
    # rank and world_size are given, because only rank 0 computes the probe and reads all traces.
    # Labels come from the caller, so any score threshold will do.
    loader = TraceLoader(
        store,
        "sequence",
        layers=layers,
        batch_size=256,
        shuffle="none",
        indices=indices,
        num_threads=1,
        rank=0,
        world_size=1,
        score_threshold=DEFAULT_THRESHOLD,
    )
    out = np.empty((len(indices), len(layers), store.hidden_dim), np.float32)
    begin = 0
    for batch in loader:
        torch.from_numpy(out[begin : begin + len(batch)]).copy_(batch.sequences)
        begin += len(batch)
    return out


def _by_layer(store: TraceStore, split: Split) -> Iterator[dict[str, np.ndarray]]:
    """Yield the features (n, D) float32 of each split, layer after layer."""
    count = sum(map(len, split.indices.values()))
    step = max(1, _FEATURE_BYTES // (4 * store.hidden_dim * count))
    for first in range(0, store.num_layers, step):
        layers = range(first, min(first + step, store.num_layers))
        x = {name: _features(store, indices, layers) for name, indices in split.indices.items()}
        for k in range(len(layers)):
            yield {name: features[:, k] for name, features in x.items()}
        del x  # Freed before the features of the next layers are read.


def run_probe(store: TraceStore, split: Split, targets: np.ndarray, seed: int) -> dict[str, Any]:
    """Fit one probe per layer on the training split, select the layer on validation, and test it once.

    Parameters
    ----------
    store : TraceStore
    split : Split
    targets : np.ndarray
        ``(len(store),)``, labels of all traces.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    dict
        The keys of `evaluate_split`, best_val_auroc, layer and val_auroc_by_layer.
    """
    y = {name: (targets[indices] >= 0.5).astype(int) for name, indices in split.indices.items()}
    best: tuple[float, int, np.ndarray, np.ndarray] | None = None
    by_layer = []
    for layer, x in enumerate(_by_layer(store, split)):
        model = fit_linear(x["train"], y["train"], INVERSE_REGULARIZATION, **_PRECISION)
        val = model.logits(x["val"])
        by_layer.append(auroc(y["val"], val))
        if best is None or by_layer[-1] > best[0]:
            best = (by_layer[-1], layer, val, model.logits(x["test"]))
    assert best is not None, "a store has layers"
    _, layer, val, test = best
    threshold, temperature = youden_threshold(y["val"], val), fit_temperature(y["val"], val)
    return {
        **evaluate_split(store, split.indices["test"], y["test"], test, threshold, temperature, seed),
        "best_val_auroc": best[0],
        "layer": layer,
        "val_auroc_by_layer": by_layer,
    }
