"""Metrics of detectors on their folds, in the form of benchmark.json.

Also under the labels of several sources side by side: AUROC of each detector under each, and how far they agree.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.benchmark.fold_runs import LabeledStore, Measured
from tracestore.evaluation import metrics
from tracestore.evaluation.evaluate import BootstrapResampler, RunScores, unscaled_scores
from tracestore.evaluation.metrics import prediction_rejection_ratio, risk_coverage_area, within_group_auroc
from tracestore.evaluation.significance import UNITS, Resampling, compare_pairs
from tracestore.store.format.labels import DEFAULT_THRESHOLD, derive, is_in_unit_range
from tracestore.store.read.store import TraceStore


def fold_runs(data: LabeledStore, folds: np.ndarray, scores: np.ndarray) -> list[RunScores]:
    """Return the scores of each fold; a trace without a score gets the mean score of its fold, which says nothing."""
    runs = []
    for fold in np.unique(folds).tolist():
        inside = folds == fold
        runs.append(unscaled_scores(data.store, fold, data.indices[inside], data.y[inside], scores[inside]))
    return runs


def evaluate(measured: Measured, data: LabeledStore, seed: int) -> dict[str, Any]:
    """Return the entry of a detector: its metrics for each scheme of folds, choices, seconds and memory.

    AUROC, AUPRC, PRR and the area under the risk-coverage curve are means over the folds. Brier score and ECE pool the
    folds. AUROC within groups pools pairs of the same fold and group.
    """
    schemes = {}
    for scheme, scores in measured.scores.items():
        runs = fold_runs(data, data.folds[scheme], scores)
        p = np.where(np.isnan(measured.probabilities[scheme]), data.y.mean(), measured.probabilities[scheme])
        estimate = BootstrapResampler(runs, seed).estimate()
        found = {unit: Resampling(runs, unit, seed) for unit in UNITS}
        groups = np.concatenate([[f"{r.fold}/{g}" if g else "" for g in r.group] for r in runs])
        y, pooled = np.concatenate([r.y for r in runs]), np.concatenate([r.logit for r in runs])
        schemes[scheme] = {
            "auroc": float(estimate[0]),
            "auroc_by_fold": [metrics.auroc(r.y, r.logit) for r in runs],
            **{f"interval_by_{unit}": of_unit.interval() for unit, of_unit in found.items()},
            "interval_methods": {unit: of_unit.method for unit, of_unit in found.items()},
            "too_few": {unit: of_unit.reason for unit, of_unit in found.items() if of_unit.reason},
            "within_group_auroc": within_group_auroc(y[groups != ""], pooled[groups != ""], groups[groups != ""]),
            "auprc": float(estimate[1]),
            "prr": float(np.mean([prediction_rejection_ratio(r.y, r.logit) for r in runs])),
            "risk_coverage_area": float(np.mean([risk_coverage_area(r.y, r.logit) for r in runs])),
            "brier": metrics.brier(data.y, p),
            "ece": metrics.ece(metrics.reliability(data.y, p)),
            "num_without_score": int(np.isnan(scores).sum()),
            "chosen": measured.chosen[scheme],
        }
    costs = ("fit_s", "score_s", "cpu_s", "peak_bytes")
    return {"schemes": schemes, "provenance": measured.provenance, **{name: getattr(measured, name) for name in costs}}


def compare_schemes(measured: Sequence[Measured], data: LabeledStore, seed: int) -> list[dict[str, Any]]:
    """Return the comparisons of all pairs for each scheme of folds, by question and by group; see `compare_pairs`."""
    found = []
    for scheme, folds in data.folds.items():
        runs = {m.name: fold_runs(data, folds, m.scores[scheme]) for m in measured}
        for unit in UNITS:
            pairs = compare_pairs({name: Resampling(of, unit, seed) for name, of in runs.items()})
            found += [{"scheme": scheme, "unit": unit, **pair} for pair in pairs]
    return found


def transfer_entry(measured: Measured, trained_on: str, tested: LabeledStore, seed: int) -> dict[str, Any]:
    """Return a cell of the transfer matrix: AUROC on another store, with its intervals."""
    runs = fold_runs(tested, np.zeros(len(tested.y), np.int64), measured.transfer[tested.name])
    found = {unit: Resampling(runs, unit, seed) for unit in UNITS}
    return {
        "detector": measured.name,
        "trained_on": trained_on,
        "tested_on": tested.name,
        "auroc": found["question"].estimate,
        **{f"interval_by_{unit}": of_unit.interval() for unit, of_unit in found.items()},
    }


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
