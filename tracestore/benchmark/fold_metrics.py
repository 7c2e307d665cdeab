"""Metrics of detectors on their folds, in the form of benchmark.json."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.benchmark.fold_runs import LabeledStore, Measured
from tracestore.evaluation import metrics
from tracestore.evaluation.clusters import UNITS, Resampling, compare_pairs
from tracestore.evaluation.evaluate import BootstrapResampler, RunScores
from tracestore.evaluation.selective import prediction_rejection_ratio, risk_coverage_area, within_group_auroc


def fold_runs(data: LabeledStore, folds: np.ndarray, scores: np.ndarray) -> list[RunScores]:
    """Return the scores of each fold; a trace without a score gets the mean score of its fold, which says nothing."""
    questions = np.array(data.store.question_ids.take(data.indices), dtype=object)
    groups = np.array([data.store.group(int(k)) for k in data.indices], dtype=object)
    runs = []
    for fold in np.unique(folds).tolist():
        inside = folds == fold
        values, known = scores[inside], ~np.isnan(scores[inside])
        filled = np.where(known, values, values[known].mean() if known.any() else 0.0)
        keys = (data.indices[inside], questions[inside], groups[inside], data.y[inside])
        runs.append(RunScores(fold, *keys, filled, 0.0, 1.0))
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
