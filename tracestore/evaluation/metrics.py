"""Metrics of a detector, computed from labels (1: hallucination) and logits, also of selective answering.

Sizes: n traces, R resamples. All functions are pure functions of arrays.
"""

from collections.abc import Callable

import numpy as np

BOOTSTRAP_SAMPLES = 2000
LEVEL = 0.95
CALIBRATION_BINS = 15
# With fewer questions per class there are too few distinct resamples: 5 questions have 126.
MIN_QUESTIONS_PER_CLASS = 5
# Bootstrap weights per chunk: 32 MiB as float64.
_CHUNK_VALUES = 4 << 20


def auroc(y: np.ndarray, score: np.ndarray) -> float:
    """Return the area under the ROC curve, NaN where only one class is present or a score is NaN.

    Parameters
    ----------
    y : np.ndarray
        ``(n,)``, 0 or 1.
    score : np.ndarray
        ``(n,)``, higher for class 1.
    """
    if len(y) != len(score):
        raise ValueError(f"found {len(y)} labels and {len(score)} scores")
    if not 0 < y.sum() < len(y) or np.isnan(score).any():  # NaN would be sorted behind the highest score
        return float("nan")
    return float(RankMetrics(y, score).weighted(np.ones((1, len(y))))[0, 0])


class RankMetrics:
    """AUROC and average precision of one set of scores under many weights, sorted only once.

    Parameters
    ----------
    y : np.ndarray
        ``(n,)``, 0 or 1.
    score : np.ndarray
        ``(n,)``.

    References
    ----------
    Mann and Whitney 1947, "On a Test of Whether one of Two Random Variables is Stochastically
    Larger than the Other": AUROC is the share of pairs in order, ties counted half.
    """

    def __init__(self, y: np.ndarray, score: np.ndarray) -> None:
        self._order = np.argsort(score, kind="stable")
        ordered = score[self._order]
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self._y = y[self._order].astype(np.float64)

    def weighted(self, weights: np.ndarray) -> np.ndarray:
        """Return AUROC and average precision ``(R, 2)`` for weights ``(R, n)``: multiplicities of traces."""
        w = weights[:, self._order]
        # Weight of each class at each distinct score, ascending: (R, K).
        positive = np.add.reduceat(w * self._y, self._starts, axis=1)
        negative = np.add.reduceat(w, self._starts, axis=1) - positive
        negative_up_to = np.cumsum(negative, axis=1)
        num_negative = negative_up_to[:, -1:]
        true_positive = np.cumsum(positive[:, ::-1], axis=1)[:, ::-1]
        false_positive = num_negative - negative_up_to + negative
        area = (positive * (negative_up_to - negative / 2)).sum(1) / (true_positive[:, 0] * num_negative[:, 0])
        precision = true_positive / np.maximum(true_positive + false_positive, 1)
        average_precision = (positive * precision).sum(1) / true_positive[:, 0]
        return np.stack([area, average_precision], axis=1)


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray], clusters: np.ndarray, strata: np.ndarray, seed: int
) -> np.ndarray:
    """Resample clusters with replacement within each stratum, with all traces of each cluster.

    Parameters
    ----------
    statistic : callable
        Maps weights ``(r, n)`` to values ``(r, ...)``.
    clusters : np.ndarray
        ``(n,)``, numbers from 0.
    strata : np.ndarray
        ``(n,)``, equal within a cluster.
    seed : int
        The same clusters, strata and seed give the same resamples, so that the statistics of
        two models on the same traces are paired.

    Returns
    -------
    np.ndarray
        ``(BOOTSTRAP_SAMPLES, ...)``.

    References
    ----------
    Davison and Hinkley 1997, "Bootstrap Methods and their Application", sections 2.4 and 3.8.
    """
    rng = np.random.default_rng(seed)
    num_clusters = int(clusters.max()) + 1
    stratum_of = np.zeros(num_clusters, strata.dtype)
    stratum_of[clusters] = strata
    members = [np.flatnonzero(stratum_of == s) for s in np.unique(strata)]
    rows = max(1, _CHUNK_VALUES // len(clusters))
    values = []
    for start in range(0, BOOTSTRAP_SAMPLES, rows):
        r = min(rows, BOOTSTRAP_SAMPLES - start)
        counts = np.empty((r, num_clusters))
        for inside in members:
            m = len(inside)
            drawn = rng.integers(0, m, (r, m)) + np.arange(r)[:, None] * m
            counts[:, inside] = np.bincount(drawn.ravel(), minlength=r * m).reshape(r, m)
        values.append(statistic(counts[:, clusters]))
    return np.concatenate(values)


def class_strata(y: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Return the classes that the cluster of each trace contains: 1 correct, 2 hallucinated, 3 both.

    Resampling within these strata keeps both classes in every resample.
    """
    negative = np.bincount(clusters, weights=y == 0) > 0
    positive = np.bincount(clusters, weights=y == 1) > 0
    strata: np.ndarray = (negative + 2 * positive)[clusters]
    return strata


def too_few(y: np.ndarray, clusters: np.ndarray) -> str | None:
    """Return why the traces are too few for an interval or a test, or None where they suffice.

    Parameters
    ----------
    y : np.ndarray
        ``(n,)``, 0 or 1.
    clusters : np.ndarray
        ``(n,)``, number of the question of each trace.
    """
    correct, hallucinated = (len(np.unique(clusters[y == label])) for label in (0, 1))
    if min(correct, hallucinated) >= MIN_QUESTIONS_PER_CLASS:
        return None
    return (
        f"{hallucinated} hallucinated and {correct} correct questions were tested, fewer than "
        f"{MIN_QUESTIONS_PER_CLASS} of a class: no interval and no test"
    )


def percentile_interval(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Return the percentile interval of bootstrapped values.

    References
    ----------
    Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    """
    low, high = np.percentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def youden_threshold(y: np.ndarray, score: np.ndarray) -> float:
    """Return the score with the largest sensitivity + specificity - 1 as a threshold.

    References
    ----------
    Youden 1950, "Index for Rating Diagnostic Tests".
    """
    positive, negative, thresholds = counts_above(y, score)
    # The lowest score, which selects all traces, is as good as the first threshold, which selects none.
    return float(thresholds[1:][np.argmax((positive / positive[-1] - negative / negative[-1])[1:])])


def counts_above(y: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how many traces of each class score at least as high as each distinct score.

    Returns
    -------
    positive, negative : np.ndarray
        ``(K + 1,)`` int64, ascending from 0.
    thresholds : np.ndarray
        ``(K + 1,)``, descending, the first infinite.
    """
    order = np.argsort(-score, kind="stable")
    ordered, positive = score[order], np.cumsum(y[order] == 1)
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])
    negative = last + 1 - positive[last]
    return np.r_[0, positive[last]], np.r_[0, negative], np.r_[np.inf, ordered[last]]


def threshold_metrics(y: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return accuracy, precision, recall and F1 of the decisions `predicted` ``(n,)`` bool."""
    true_positive = int((predicted & (y == 1)).sum())
    num_predicted, num_positive = int(predicted.sum()), int((y == 1).sum())
    return {
        "accuracy": float(np.mean(predicted == (y == 1))),
        "precision": true_positive / max(1, num_predicted),
        "recall": true_positive / max(1, num_positive),
        "f1": 2 * true_positive / max(1, num_predicted + num_positive),
    }


def probability(logit: np.ndarray, temperature: float | np.ndarray = 1.0) -> np.ndarray:
    """Return sigmoid(logit / temperature), NaN for NaN."""
    with np.errstate(invalid="ignore"):
        probabilities: np.ndarray = np.exp(-np.logaddexp(0, -logit / temperature))
    return probabilities


def brier(y: np.ndarray, p: np.ndarray) -> float:
    """Return the mean of (p - y)^2.

    References
    ----------
    Brier 1950, "Verification of Forecasts Expressed in Terms of Probability".
    """
    return float(np.square(p - y).mean())


def reliability(y: np.ndarray, p: np.ndarray, num_bins: int = CALIBRATION_BINS) -> list[dict[str, float]]:
    """Return the non-empty bins of equal width over [0, 1].

    Returns
    -------
    list of dict
        For each bin: low, high, count, mean_probability and fraction (of hallucinations).
    """
    bin_of = np.minimum((p * num_bins).astype(int), num_bins - 1)
    return [
        {
            "low": k / num_bins,
            "high": (k + 1) / num_bins,
            "count": int((bin_of == k).sum()),
            "mean_probability": float(p[bin_of == k].mean()),
            "fraction": float(y[bin_of == k].mean()),
        }
        for k in np.unique(bin_of).tolist()
    ]


def ece(bins: list[dict[str, float]]) -> float:
    """Return the expected calibration error, sum over bins of n_b / n |fraction_b - mean_probability_b|.

    References
    ----------
    Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3, here for the
    probability of the class "hallucination".
    """
    total = sum(b["count"] for b in bins)
    return sum(b["count"] * abs(b["fraction"] - b["mean_probability"]) for b in bins) / total


def fit_temperature(y: np.ndarray, logit: np.ndarray) -> float:
    """Return the T in [0.05, 20] for which sigmoid(logit / T) has the smallest cross-entropy.

    References
    ----------
    Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2.
    """
    # The loss is convex in 1 / T, so its derivative with respect to 1 / T changes sign once: bisection.
    low, high = np.log(0.05), np.log(20)
    for _ in range(50):
        middle = (low + high) / 2
        if np.mean((probability(logit, np.exp(middle)) - y) * logit) > 0:
            low = middle
        else:
            high = middle
    return float(np.exp((low + high) / 2))


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
