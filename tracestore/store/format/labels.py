"""From scores to labels: 1 for a hallucinated answer, 0 for a right one."""

import numpy as np

# What a high score says of the answer.
CORRECT, HALLUCINATION = "correct", "hallucination"
DIRECTIONS = (CORRECT, HALLUCINATION)
# How tracestore names a column of scores, for files that it writes.
SCORE_COLUMNS = {CORRECT: "score", HALLUCINATION: "hallucination_score"}
DEFAULT_THRESHOLD = 0.5
# The first columns of predictions.csv of a training, whose label is 1 for a hallucination.
PREDICTION_COLUMNS = ("question_id", "sample", "trace_index", "split", "fold", "seed", "label")


def derive(scores: np.ndarray, labels: np.ndarray, threshold: float, direction: str) -> np.ndarray:
    """Return the label of each trace.

    Parameters
    ----------
    scores, labels
        (N,) float64, NaN where missing.
    threshold
        Of the score: below it an answer is hallucinated where a high score says that it is correct,
        from it on where a high score says that it is hallucinated.
    direction
        One of DIRECTIONS.

    Returns
    -------
    np.ndarray
        (N,) float64: the stored label where there is one, else 1 or 0 by the score, else NaN.
    """
    is_hallucinated = scores < threshold if direction == CORRECT else scores >= threshold
    derived = np.where(np.isnan(scores), np.nan, is_hallucinated.astype("<f8"))
    return np.where(np.isnan(labels), derived, labels)


def describe(scores: np.ndarray, threshold: float, direction: str) -> str:
    """Return how many scores become which label, as a line for people."""
    known = scores[~np.isnan(scores)]
    count = int((known < threshold).sum() if direction == CORRECT else (known >= threshold).sum())
    where = "below" if direction == CORRECT else "at or above"
    return f"{count:,} of {len(known):,} {where} {threshold:g}: labelled hallucination"
