"""Is one detector better than another? Tests on the same traces."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tracestore.evaluation.evaluate import BootstrapResampler, RunScores
from tracestore.evaluation.metrics import percentile_interval


def _midranks(scores: np.ndarray) -> np.ndarray:
    """(k, n) -> (k, n): the rank of each score in its row from 1 on, of equal ones their mean."""
    ranks = np.empty(scores.shape)
    for row, out in zip(scores, ranks, strict=True):
        _, place, counts = np.unique(row, return_inverse=True, return_counts=True)
        out[:] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def delong(y: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AUROC (k,) of k sets of scores (k, n) on the same traces, and their covariance (k, k).

    DeLong, DeLong and Clarke-Pearson 1988, eq. 5 and 6; by midranks, O(n log n), as Sun and
    Xu 2014. Traces are taken as independent."""
    positive, negative = scores[:, y == 1], scores[:, y == 0]
    m, n = positive.shape[1], negative.shape[1]
    among_all = _midranks(np.concatenate([positive, negative], axis=1))
    # Structural components: of each positive the share of negatives below it, and so on.
    v10 = (among_all[:, :m] - _midranks(positive)) / n
    v01 = 1 - (among_all[:, m:] - _midranks(negative)) / m
    covariance = np.atleast_2d(np.cov(v10)) / m + np.atleast_2d(np.cov(v01)) / n
    return v10.mean(axis=1), covariance


def delong_p(y: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Two-sided p value of equal AUROC; NaN where a class has fewer than two traces."""
    if min((y == 1).sum(), (y == 0).sum()) < 2:
        return float("nan")
    aurocs, covariance = delong(y, np.stack([a, b]))
    difference = float(aurocs[0] - aurocs[1])
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    # Rounding leaves a variance of about 1e-17 where the two put all traces in one order.
    if variance < 1e-14:
        return 1.0 if abs(difference) < 1e-12 else 0.0
    return math.erfc(abs(difference) / math.sqrt(2 * variance))


def bootstrap_p(differences: np.ndarray) -> float:
    """Two-sided p value of a difference of 0 from bootstrapped differences: twice the smaller
    tail, the observed sample counted in (Davison and Hinkley 1997, 4.4.1)."""
    tail = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (tail + 1) / (len(differences) + 1))


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted for their number (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    factors = len(p) - np.arange(len(p))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.asarray(p)[order] * factors))
    return adjusted.tolist()


def _tested(runs: Sequence[RunScores]) -> dict[int, list[tuple[int, str, int]]]:
    """Trace, question and label of each fold's test part."""
    return {
        run.fold: sorted(zip(run.trace.tolist(), run.question.tolist(), run.y.tolist(), strict=True)) for run in runs
    }


def compare(models: Mapping[str, Sequence[RunScores]], seed: int) -> list[dict[str, Any]]:
    """Every pair of models: the difference in AUROC (first - second), its interval and p value
    from a bootstrap by question, DeLong's p value where it holds (one run, one trace a
    question), and Holm's adjustment over the pairs of DeLong's where it holds, else of the
    bootstrap's ("method"). Where too few questions were tested, none of these, and "too_few" says so.
    ValueError where they were not tested on the same folds and labels."""
    of = {name: BootstrapResampler(runs, seed) for name, runs in models.items()}
    estimates = {name: float(a.estimate()[0]) for name, a in of.items()}
    reasons = {name: a.too_few for name, a in of.items()}
    draws = {name: a.draws()[:, 0] for name, a in of.items() if reasons[name] is None}
    pairs: list[dict[str, Any]] = []
    for a, b in combinations(models, 2):
        if _tested(models[a]) != _tested(models[b]):
            raise ValueError(f"{a} and {b} were tested on different traces, labels or folds")
        pair: dict[str, Any] = {"first": a, "second": b, "difference": estimates[a] - estimates[b]}
        if reasons[a] is not None:
            pair |= dict.fromkeys(("interval", "method", "p", "p_holm")) | {"too_few": reasons[a]}
            pairs.append(pair)
            continue
        one_run = len(models[a]) == len(models[b]) == 1
        independent = one_run and of[a].num_questions == len(of[a].trace)
        differences = draws[a] - draws[b]
        p = {"bootstrap_p": bootstrap_p(differences)}
        if independent:
            first, second = models[a][0], models[b][0]
            p["delong_p"] = delong_p(first.y, first.logit, second.logit)
        method = "delong" if independent and not np.isnan(p["delong_p"]) else "bootstrap"
        interval = list(percentile_interval(differences))
        pairs.append(pair | {"interval": interval, "method": method, "p": p[f"{method}_p"], **p})
    tested = [pair for pair in pairs if pair["p"] is not None]
    for pair, adjusted in zip(tested, holm([pair["p"] for pair in tested]), strict=True):
        pair["p_holm"] = adjusted
    return pairs
