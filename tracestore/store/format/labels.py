"""Derivation of labels from scores: 1 for a hallucinated answer, 0 for a correct one."""

import numpy as np

# Score directions: what a high score means.
CORRECT, HALLUCINATION = "correct", "hallucination"
DIRECTIONS = (CORRECT, HALLUCINATION)
# Column names of scores in the files that tracestore writes.
SCORE_COLUMNS = {CORRECT: "score", HALLUCINATION: "hallucination_score"}
DEFAULT_THRESHOLD = 0.5
# First columns of the predictions.csv that training writes; its label is 1 for a hallucination.
PREDICTION_COLUMNS = ("question_id", "sample", "trace_index", "split", "fold", "seed", "label")


def derive(scores: np.ndarray, labels: np.ndarray, threshold: float, direction: str) -> np.ndarray:
    """Return the label of each trace.

    Parameters
    ----------
    scores, labels : np.ndarray
        Float64 arrays of shape ``(N,)``; NaN marks a missing value.
    threshold : float
        Score threshold. With direction "correct" an answer is hallucinated if its score is below
        the threshold, with "hallucination" if its score is at or above it.
    direction : {"correct", "hallucination"}
        What a high score means.

    Returns
    -------
    np.ndarray
        Float64 array of shape ``(N,)``: the stored label if there is one, otherwise 1 or 0 derived
        from the score, otherwise NaN.
    """
    is_hallucinated = scores < threshold if direction == CORRECT else scores >= threshold
    derived = np.where(np.isnan(scores), np.nan, is_hallucinated.astype("<f8"))
    return np.where(np.isnan(labels), derived, labels)


def describe(scores: np.ndarray, threshold: float, direction: str) -> str:
    """Return a one-line summary of how many scores lead to the label "hallucination"."""
    known = scores[~np.isnan(scores)]
    count = int((known < threshold).sum() if direction == CORRECT else (known >= threshold).sum())
    where = "below" if direction == CORRECT else "at or above"
    return f"{count:,} of {len(known):,} {where} {threshold:g}: labeled hallucination"
