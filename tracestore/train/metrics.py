"""What a detector is worth, from labels (1: hallucination) and scores."""

from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, precision_recall_fscore_support, roc_auc_score, roc_curve

BOOTSTRAP_SAMPLES = 1000


def auroc(y: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve; NaN where there is one class only."""
    return float(roc_auc_score(y, score)) if 0 < y.sum() < len(y) else float("nan")


def auroc_interval(y: np.ndarray, score: np.ndarray, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap over traces (Efron and Tibshirani 1993, ch. 13)."""
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(BOOTSTRAP_SAMPLES):
        chosen = rng.integers(0, len(y), len(y))
        values.append(auroc(y[chosen], score[chosen]))
    low, high = np.nanpercentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def youden_threshold(y: np.ndarray, score: np.ndarray) -> float:
    """The threshold with the largest sensitivity + specificity - 1 (Youden 1950)."""
    false_positive, true_positive, thresholds = roc_curve(y, score)
    best = int(np.argmax(true_positive - false_positive))
    finite = thresholds[best]
    return float(finite if np.isfinite(finite) else np.max(score))


def at_threshold(y: np.ndarray, score: np.ndarray, threshold: float) -> dict[str, float]:
    """accuracy, precision, recall and F1 of score >= threshold."""
    predicted = score >= threshold
    precision, recall, f1, _ = precision_recall_fscore_support(y, predicted, average="binary", zero_division=0)
    return {
        "accuracy": float(accuracy_score(y, predicted)),
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
    }


def evaluate_test(y: np.ndarray, score: np.ndarray, threshold: float, seed: int) -> dict[str, Any]:
    """The figures of the test part, as results.json holds them."""
    return {
        "auroc": auroc(y, score),
        "auroc_interval": list(auroc_interval(y, score, seed)),
        **at_threshold(y, score, threshold),
        "num_traces": len(y),
    }
