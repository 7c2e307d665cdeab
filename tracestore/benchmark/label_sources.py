"""Labels of several sources side by side: AUROC of each detector under each, and how far the sources agree."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.benchmark.fold_metrics import fold_runs
from tracestore.benchmark.fold_runs import LabeledStore, Measured
from tracestore.evaluation.clusters import Resampling
from tracestore.store.format.labels import DEFAULT_THRESHOLD, derive, is_in_unit_range
from tracestore.store.read.store import TraceStore

STORED = "stored labels"


def label_sources(data: LabeledStore, score_threshold: float | None) -> dict[str, np.ndarray]:
    """Return the labels of each source of a store for its labeled traces.

    Parameters
    ----------
    data : LabeledStore
    score_threshold : float, optional
        Threshold of the score that the detectors are fitted to; the others have the default one.

    Returns
    -------
    dict of np.ndarray
        ``(n,)`` float64 for the stored labels and each named score; 1 for a hallucination, NaN for a trace without it.
        Sources without any of the traces are left out, and those of `scores_without_threshold`.
    """
    store, left_out = data.store, scores_without_threshold(data.store, score_threshold)
    found = {STORED: store.labels[data.indices]}
    for name, score in store.score_fields.items():
        if name in left_out:
            continue
        values = store.named_scores(name)[data.indices]
        threshold = score_threshold if name == store.score_name else None
        threshold = DEFAULT_THRESHOLD if threshold is None else threshold
        found[name] = derive(values, np.full(len(values), np.nan), threshold, score.direction)
    return {name: labels for name, labels in found.items() if not np.isnan(labels).all()}


def scores_without_threshold(store: TraceStore, score_threshold: float | None) -> list[str]:
    """Return the named scores that have values outside [0, 1], except the chosen one if a threshold is given for it."""
    others = (name for name in store.score_fields if score_threshold is None or name != store.score_name)
    return [name for name in others if not is_in_unit_range(store.named_scores(name))]


def compare_sources(
    data: LabeledStore, measured: Sequence[Measured], score_threshold: float | None, seed: int
) -> dict[str, Any] | None:
    """Return the comparison of label sources in the form of benchmark.json, None for a store with one source.

    The detectors are those that were fitted to the labels of the benchmark; only the labels of the tested traces are
    exchanged. AUROC is the mean over folds, None for a source that lacks a class in a fold.
    """
    sources = label_sources(data, score_threshold)
    if len(sources) < 2:
        return None
    stored = ~np.isnan(data.store.labels[data.indices])
    fitted_to = [STORED] * bool(stored.any()) + [str(data.store.score_name)] * bool(not stored.all())
    return {
        "fitted_to": " and ".join(fitted_to),
        "sources": {
            name: {"num_traces": int((~np.isnan(y)).sum()), "num_hallucinated": int(np.nansum(y))}
            for name, y in sources.items()
        },
        "agreement": [agreement(a, b, sources[a], sources[b]) for a, b in itertools.combinations(sources, 2)],
        "schemes": {
            scheme: {m.name: {name: _auroc(data, m, scheme, y, seed) for name, y in sources.items()} for m in measured}
            for scheme in data.folds
        },
    }


def agreement(first: str, second: str, a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Return how far the labels of two sources agree, on the traces that both label.

    Parameters
    ----------
    first, second : str
        Names of the sources.
    a, b : np.ndarray
        ``(n,)`` float64: 0, 1 or NaN.

    Returns
    -------
    dict
        first, second, num_traces, agreement (the share p of equal labels) and kappa = (p - e) / (1 - e), where e is the
        share that is expected of independent labels. None where it is not defined.

    References
    ----------
    Cohen 1960, "A Coefficient of Agreement for Nominal Scales".
    """
    both = ~np.isnan(a) & ~np.isnan(b)
    count, a, b = int(both.sum()), a[both], b[both]
    equal = float((a == b).mean()) if count else None
    kappa = None
    if equal is not None:
        by_chance = float(a.mean() * b.mean() + (1 - a.mean()) * (1 - b.mean()))
        kappa = (equal - by_chance) / (1 - by_chance) if by_chance < 1 else None
    return {"first": first, "second": second, "num_traces": count, "agreement": equal, "kappa": kappa}


def _auroc(data: LabeledStore, measured: Measured, scheme: str, y: np.ndarray, seed: int) -> dict[str, Any]:
    """Return AUROC of out-of-fold scores under the labels of a source, with its interval by question."""
    known = ~np.isnan(y)
    labeled = dataclasses.replace(data, indices=data.indices[known], y=y[known].astype(np.int64))
    runs = fold_runs(labeled, data.folds[scheme][known], measured.scores[scheme][known])
    if len(runs) < len(np.unique(data.folds[scheme])) or not all(0 < run.y.sum() < len(run.y) for run in runs):
        return {"auroc": None, "interval_by_question": None}
    found = Resampling(runs, "question", seed)
    return {"auroc": found.estimate, "interval_by_question": found.interval()}
