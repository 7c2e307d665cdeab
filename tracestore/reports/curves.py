"""Curves of detectors on their test traces: ROC, precision-recall, risk-coverage, distributions, AUROC by length.

The curves of several runs are averaged on a grid, because logits of separately trained models have no
common scale. Sizes: n traces of a run.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tracestore.evaluation.evaluate import RunScores
from tracestore.evaluation.metrics import auroc, counts_above, probability

Curve = tuple[np.ndarray, np.ndarray]
GRID = np.linspace(0, 1, 201)


def mean_curve(runs: Sequence[RunScores], curve: Callable[[np.ndarray, np.ndarray], Curve]) -> Curve:
    """Return x (201,) and the mean of the curves of all runs, interpolated at x."""
    values = [np.interp(GRID, *curve(run.y, run.logit)) for run in runs]
    return GRID, np.mean(values, axis=0)


def roc(y: np.ndarray, score: np.ndarray) -> Curve:
    """Return false and true positive rates, ascending; score (n,) is higher for class 1."""
    positive, negative, _ = counts_above(y, score)
    return negative / negative[-1], positive / positive[-1]


def precision_recall(y: np.ndarray, score: np.ndarray) -> Curve:
    """Return recall, ascending, and precision. The precision of zero predictions is that of the first one."""
    positive, negative, _ = counts_above(y, score)
    precision = positive[1:] / (positive + negative)[1:]
    return positive / positive[-1], np.r_[precision[0], precision]


def risk_coverage(y: np.ndarray, score: np.ndarray) -> Curve:
    """Return coverage and the share of hallucinations among the traces of the lowest scores."""
    positive, negative, _ = counts_above(-y + 1, -score)
    answered = (positive + negative)[1:]
    risk = negative[1:] / answered
    return np.r_[0, answered / len(y)], np.r_[risk[0], risk]


def histograms(runs: Sequence[RunScores]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return edges of probabilities, and counts of the tests of correct and of hallucinated answers."""
    p = np.concatenate([probability(run.logit) for run in runs])
    y = np.concatenate([run.y for run in runs])
    edges = np.linspace(0, 1, 21)
    classes = {"correct": 0, "hallucinated": 1}
    return edges, {name: np.histogram(p[y == label], edges)[0] for name, label in classes.items()}


def length_bins(num_tokens: np.ndarray) -> list[tuple[int, int]]:
    """Return four bins (first, last) of lengths with about the same number of traces each."""
    edges = np.unique(np.quantile(num_tokens, np.linspace(0, 1, 5)).round().astype(int))
    if len(edges) == 1:
        return [(int(edges[0]), int(edges[0]))]
    firsts = [int(edges[0]), *(int(e) + 1 for e in edges[1:-1])]
    return list(zip(firsts, map(int, edges[1:]), strict=True))


def auroc_by_length(
    models: Mapping[str, Sequence[RunScores]], num_tokens: np.ndarray, bins: Sequence[tuple[int, int]]
) -> dict[str, list[float]]:
    """Return the AUROC of each model in each bin, a mean over the runs in which the bin has both classes, or NaN.

    `num_tokens` are those of all traces of the store.
    """
    found: dict[str, list[float]] = {}
    for name, runs in models.items():
        values = []
        for first, last in bins:
            of_runs = []
            for run in runs:
                inside = (num_tokens[run.trace] >= first) & (num_tokens[run.trace] <= last)
                of_runs.append(auroc(run.y[inside], run.logit[inside]))
            known = [v for v in of_runs if not np.isnan(v)]
            values.append(float(np.mean(known)) if known else float("nan"))
        found[name] = values
    return found
