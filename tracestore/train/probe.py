"""The honest baseline: logistic regression on the last token of one layer."""

from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tracestore.data.loader import TraceLoader
from tracestore.store.reader import TraceStore
from tracestore.train.evaluate import evaluate_part
from tracestore.train.metrics import auroc, fit_temperature, youden_threshold
from tracestore.train.split import Split

INVERSE_REGULARISATION = 0.01


def _features(store: TraceStore, indices: np.ndarray) -> np.ndarray:
    """(n, L, D) float32 last tokens."""
    loader = TraceLoader(store, "sequence", batch_size=256, shuffle="none", indices=indices, num_threads=1)
    return np.concatenate([batch.sequences.float().numpy() for batch in loader])


def run_probe(store: TraceStore, split: Split, targets: np.ndarray, seed: int) -> dict[str, Any]:
    """Fits one probe a layer on the training part, chooses the layer on validation, and
    tests it once. The same keys as a model's entry in results.json, and `layer`."""
    x = {part: _features(store, indices) for part, indices in split.indices.items()}
    y = {part: (targets[indices] >= 0.5).astype(int) for part, indices in split.indices.items()}
    best: tuple[float, int, np.ndarray, np.ndarray] | None = None
    by_layer = []
    for layer in range(store.num_layers):
        model = make_pipeline(
            StandardScaler(), LogisticRegression(C=INVERSE_REGULARISATION, max_iter=1000, random_state=seed)
        )
        model.fit(x["train"][:, layer], y["train"])
        val = model.decision_function(x["val"][:, layer])
        by_layer.append(auroc(y["val"], val))
        if best is None or by_layer[-1] > best[0]:
            best = (by_layer[-1], layer, val, model.decision_function(x["test"][:, layer]))
    assert best is not None
    _, layer, val, test = best
    threshold, temperature = youden_threshold(y["val"], val), fit_temperature(y["val"], val)
    return {
        **evaluate_part(store, split.indices["test"], y["test"], test, threshold, temperature, seed),
        "best_val_auroc": best[0],
        "layer": layer,
        "val_auroc_by_layer": by_layer,
    }
