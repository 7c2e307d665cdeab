"""Metrics of selective answering, and the AUROC within groups. Functions of arrays, with n traces."""

import numpy as np

from tracestore.evaluation.metrics import RankMetrics


def risk_coverage_area(y: np.ndarray, score: np.ndarray) -> float:
    """Return the area under the risk-coverage curve.

    It is the mean over k of the share of hallucinations among the k traces with the lowest scores. Equal scores are
    in random order: the expected value is returned. 0 is only reached without hallucinations.

    Parameters
    ----------
    y : np.ndarray
        ``(n,)``, 0 or 1.
    score : np.ndarray
        ``(n,)``, higher for class 1.

    References
    ----------
    Geifman and El-Yaniv 2017, "Selective Classification for Deep Neural Networks".
    """
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    # A trace counts with the share of hallucinations among all traces of its score.
    expected = (np.bincount(inverse, weights=y) / counts)[np.sort(inverse)]
    return float((np.cumsum(expected) / np.arange(1, len(y) + 1)).mean())


def prediction_rejection_ratio(y: np.ndarray, score: np.ndarray) -> float:
    """Return (r - a) / (r - o), with the risk-coverage areas a of the scores, r of random and o of perfect scores.

    1 is perfect, 0 random; NaN where only one class is present.

    Parameters
    ----------
    y : np.ndarray
        ``(n,)``, 0 or 1.
    score : np.ndarray
        ``(n,)``, higher for class 1.

    References
    ----------
    Malinin and Gales 2021, "Uncertainty Estimation in Autoregressive Structured Prediction".
    """
    if not 0 < y.sum() < len(y):
        return float("nan")
    random, perfect = float(np.mean(y)), risk_coverage_area(y, y.astype(float))
    return (random - risk_coverage_area(y, score)) / (random - perfect)


def within_group_auroc(y: np.ndarray, score: np.ndarray, group: np.ndarray) -> float:
    """Return the share of pairs in order among all pairs of a hallucination and a correct answer of the same group.

    Ties count half. A detector that has learned nothing but the groups is at 0.5.

    Parameters
    ----------
    y : np.ndarray
        ``(n,)``, 0 or 1.
    score : np.ndarray
        ``(n,)``, higher for class 1.
    group : np.ndarray
        ``(n,)``; scores are compared only where it is equal.

    Returns
    -------
    float
        NaN if no group has both classes.
    """
    in_order = pairs = 0.0
    for name in np.unique(group):
        inside = group == name
        positive = int(y[inside].sum())
        count = positive * (int(inside.sum()) - positive)
        if count:
            in_order += count * float(RankMetrics(y[inside], score[inside]).weighted(np.ones((1, inside.sum())))[0, 0])
            pairs += count
    return in_order / pairs if pairs else float("nan")
