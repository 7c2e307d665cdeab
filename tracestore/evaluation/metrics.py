"""What a detector is worth, from labels (1: hallucination) and logits.

Sizes: n traces, R resamples. Everything here is a pure function of arrays.
"""

from collections.abc import Callable

import numpy as np

BOOTSTRAP_SAMPLES = 2000
LEVEL = 0.95
CALIBRATION_BINS = 15
# Fewer questions of a class have too few resamples for an interval or a test: of 5 there are 126.
MIN_QUESTIONS_OF_A_CLASS = 5
# Of the weights that are looked at together: 32 MiB as float64.
_CHUNK_VALUES = 4 << 20


def auroc(y: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve; NaN where there is one class only."""
    return float(_rank_figures(y, score)[0]) if 0 < y.sum() < len(y) else float("nan")


def auprc(y: np.ndarray, score: np.ndarray) -> float:
    """Average precision: sum over thresholds of (R_k - R_k-1) P_k; NaN where there is one class only."""
    return float(_rank_figures(y, score)[1]) if 0 < y.sum() < len(y) else float("nan")


def _rank_figures(y: np.ndarray, score: np.ndarray) -> np.ndarray:
    figures: np.ndarray = RankMetrics(y, score).of(np.ones((1, len(y))))[0]
    return figures


class RankMetrics:
    """AUROC and average precision of one set of scores under many weights of its traces,
    without sorting again."""

    def __init__(self, y: np.ndarray, score: np.ndarray) -> None:
        self._order = np.argsort(score, kind="stable")
        ordered = score[self._order]
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self._y = y[self._order].astype(np.float64)

    def of(self, weights: np.ndarray) -> np.ndarray:
        """weights (R, n): how often each trace counts -> (R, 2): AUROC as the share of pairs in
        order, ties counted half (Mann and Whitney 1947), and average precision."""
        w = weights[:, self._order]
        # Of each class at each distinct score, ascending: (R, K).
        positive = np.add.reduceat(w * self._y, self._starts, axis=1)
        negative = np.add.reduceat(w, self._starts, axis=1) - positive
        below = np.cumsum(negative, axis=1)
        num_negative = below[:, -1:]
        found = np.cumsum(positive[:, ::-1], axis=1)[:, ::-1]
        wrong = num_negative - below + negative
        auroc = (positive * (below - negative / 2)).sum(1) / (found[:, 0] * num_negative[:, 0])
        auprc = (positive * (found / np.maximum(found + wrong, 1))).sum(1) / found[:, 0]
        return np.stack([auroc, auprc], axis=1)


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray],
    clusters: np.ndarray,
    strata: np.ndarray,
    seed: int,
    samples: int = BOOTSTRAP_SAMPLES,
) -> np.ndarray:
    """Stratified cluster bootstrap (Davison and Hinkley 1997, 2.4 and 3.8): clusters are drawn
    with replacement within each stratum, all traces of a drawn one come along.

    clusters (n,) from 0; strata (n,), equal within a cluster; statistic takes weights (r, n)
    and gives (r, ...). -> (samples, ...). The same clusters, strata and seed give the same
    draws, so that statistics of two models on the same traces are paired."""
    rng = np.random.default_rng(seed)
    num_clusters = int(clusters.max()) + 1
    stratum_of = np.zeros(num_clusters, strata.dtype)
    stratum_of[clusters] = strata
    members = [np.flatnonzero(stratum_of == s) for s in np.unique(strata)]
    rows = max(1, _CHUNK_VALUES // len(clusters))
    values = []
    for start in range(0, samples, rows):
        r = min(rows, samples - start)
        counts = np.empty((r, num_clusters))
        for inside in members:
            m = len(inside)
            drawn = rng.integers(0, m, (r, m)) + np.arange(r)[:, None] * m
            counts[:, inside] = np.bincount(drawn.ravel(), minlength=r * m).reshape(r, m)
        values.append(statistic(counts[:, clusters]))
    return np.concatenate(values)


def class_strata(y: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """(n,): which classes a trace's cluster has: 1 right, 2 hallucinated, 3 both. Resampling
    within these keeps both classes in every resample."""
    negative = np.bincount(clusters, weights=y == 0) > 0
    positive = np.bincount(clusters, weights=y == 1) > 0
    strata: np.ndarray = (negative + 2 * positive)[clusters]
    return strata


def too_few(y: np.ndarray, clusters: np.ndarray) -> str | None:
    """Return why traces are too few for an interval or a test, or None where they are not.

    y (n,) 0 or 1; clusters (n,) the question of each trace."""
    right, hallucinated = (len(np.unique(clusters[y == label])) for label in (0, 1))
    if min(right, hallucinated) >= MIN_QUESTIONS_OF_A_CLASS:
        return None
    return (
        f"{hallucinated} hallucinated and {right} right questions were tested, fewer than "
        f"{MIN_QUESTIONS_OF_A_CLASS} of a class: no interval and no test"
    )


def percentile_interval(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of a bootstrap (Efron and Tibshirani 1993, ch. 13)."""
    low, high = np.percentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def youden_threshold(y: np.ndarray, score: np.ndarray) -> float:
    """The threshold with the largest sensitivity + specificity - 1 (Youden 1950)."""
    true, false, thresholds = counts_above(y, score)
    best = int(np.argmax(true / true[-1] - false / false[-1]))
    finite = thresholds[best]
    return float(finite if np.isfinite(finite) else np.max(score))


def counts_above(y: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how many traces of each class score at least as high as each distinct score.

    Returns
    -------
    positive, negative : (K + 1,) int64, rising from 0
    thresholds : (K + 1,) falling, the first infinite
    """
    order = np.argsort(-score, kind="stable")
    ordered, positive = score[order], np.cumsum(y[order] == 1)
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])
    negative = last + 1 - positive[last]
    return np.r_[0, positive[last]], np.r_[0, negative], np.r_[np.inf, ordered[last]]


def at_threshold(y: np.ndarray, score: np.ndarray, threshold: float) -> dict[str, float]:
    """accuracy, precision, recall and F1 of score >= threshold."""
    return threshold_metrics(y, score >= threshold)


def threshold_metrics(y: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """accuracy, precision, recall and F1 of decisions (n,) bool."""
    hits = int((predicted & (y == 1)).sum())
    found, wanted = int(predicted.sum()), int((y == 1).sum())
    return {
        "accuracy": float(np.mean(predicted == (y == 1))),
        "precision": hits / max(1, found),
        "recall": hits / max(1, wanted),
        "f1": 2 * hits / max(1, found + wanted),
    }


def probability(logit: np.ndarray, temperature: float | np.ndarray = 1.0) -> np.ndarray:
    """sigmoid(logit / temperature)."""
    probabilities: np.ndarray = np.exp(-np.logaddexp(0, -logit / temperature))
    return probabilities


def brier(y: np.ndarray, p: np.ndarray) -> float:
    """Mean of (p - y)^2 (Brier 1950)."""
    return float(np.square(p - y).mean())


def reliability(y: np.ndarray, p: np.ndarray, num_bins: int = CALIBRATION_BINS) -> list[dict[str, float]]:
    """For each bin of equal width over [0, 1] that has traces: low, high, count, the mean
    probability and the share of hallucinations."""
    of = np.minimum((p * num_bins).astype(int), num_bins - 1)
    return [
        {
            "low": k / num_bins,
            "high": (k + 1) / num_bins,
            "count": int((of == k).sum()),
            "mean_probability": float(p[of == k].mean()),
            "fraction": float(y[of == k].mean()),
        }
        for k in np.unique(of).tolist()
    ]


def ece(bins: list[dict[str, float]]) -> float:
    """Expected calibration error: sum over bins of n_b / n |fraction_b - mean probability_b|
    (Guo et al. 2017, eq. 3, for the probability of the class "hallucination")."""
    total = sum(b["count"] for b in bins)
    return sum(b["count"] * abs(b["fraction"] - b["mean_probability"]) for b in bins) / total


def fit_temperature(y: np.ndarray, logit: np.ndarray) -> float:
    """The T in [0.05, 20] for which sigmoid(logit / T) has the smallest cross-entropy (Guo et
    al. 2017, section 4.2)."""
    # Convex in 1 / T: the derivative with respect to it changes its sign once.
    low, high = np.log(0.05), np.log(20)
    for _ in range(50):
        middle = (low + high) / 2
        if np.mean((probability(logit, np.exp(middle)) - y) * logit) > 0:
            low = middle
        else:
            high = middle
    return float(np.exp((low + high) / 2))
