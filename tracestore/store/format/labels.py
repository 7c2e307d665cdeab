"""Named scores, and the derivation of labels from them: 1 for a hallucinated answer, 0 for a correct one."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tracestore.errors import UsageError
from tracestore.words import plural

# Score directions: what a high score means.
CORRECT, HALLUCINATION = "correct", "hallucination"
DIRECTIONS = (CORRECT, HALLUCINATION)
# Column names of scores in the files that tracestore writes.
SCORE_COLUMNS = {CORRECT: "score", HALLUCINATION: "hallucination_score"}
DEFAULT_THRESHOLD = 0.5
THRESHOLD_HELP = (
    f"label 1 (hallucination) where score < T, or >= T if a high one means a hallucination (default: "
    f"{DEFAULT_THRESHOLD:g}, for scores in [0, 1]; others need it)"
)
# The name of scores that a program appends without one.
DEFAULT_SCORE_NAME = "score"
# Names of scores: they are parts of the names of arrays.
_SCORE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_SCORE_NAMES = 64
_MAX_TEXT = 1024
# First columns of the predictions.csv that training writes; its label is 1 for a hallucination.
PREDICTION_COLUMNS = ("question_id", "sample", "trace_index", "split", "fold", "seed", "label")
# Columns of the file that predict writes, and the beginning of the columns of folds in that of benchmark.
PREDICTED_COLUMNS, FOLD_PREFIX = ("question_id", "sample", "hallucination_score", "predicted"), "fold:"
# Last column of both where several stores were read as one: traces of two stores may have the same key.
STORE_COLUMN = "store"


@dataclass(frozen=True)
class ScoreField:
    """Describe a named score.

    Parameters
    ----------
    direction : {"correct", "hallucination"}
        What a high value means.
    source : str, optional
        Where the values come from, such as a file and its column, or a judge.
    version : str, optional
        Version of the source.
    """

    direction: str = CORRECT
    source: str | None = None
    version: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the field as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "ScoreField":
        """Return the field in a JSON object; raise ValueError if it is not valid in this format."""
        if not isinstance(data, dict) or data.keys() != {"direction", "source", "version"}:
            raise ValueError("the keys are not those of this format")
        if data["direction"] not in DIRECTIONS:
            raise ValueError(f"direction: found {data['direction']!r:.40}")
        for name in ("source", "version"):
            text = data[name]
            if text is not None and (not isinstance(text, str) or len(text) > _MAX_TEXT):
                raise ValueError(f"{name}: found {text!r:.40}, expected a text of at most {_MAX_TEXT} characters")
        return cls(**data)


def is_score_name(name: object) -> bool:
    """Return whether scores may have this name: letters, digits, "_", "-" and ".", at most 64."""
    return isinstance(name, str) and _SCORE_NAME.fullmatch(name) is not None


def is_prediction(header: Sequence[str]) -> bool:
    """Return whether a table with these columns is one of predictions, which train, predict and benchmark write."""
    starts = (PREDICTION_COLUMNS, PREDICTED_COLUMNS)
    return any(tuple(header[: len(s)]) == s for s in starts) or any(name.startswith(FOLD_PREFIX) for name in header)


def score_fields(data: object) -> dict[str, ScoreField]:
    """Return the named scores in a JSON object; raise ValueError if they are not valid in this format."""
    if not isinstance(data, dict) or len(data) > MAX_SCORE_NAMES or not all(map(is_score_name, data)):
        raise ValueError(f"scores: found {data!r:.60}")
    return {name: ScoreField.from_json(value) for name, value in data.items()}


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


def disagreements(scores: np.ndarray, labels: np.ndarray, threshold: float | None, direction: str) -> np.ndarray:
    """Return which traces (N,) have a stored label that differs from the one of their score; the stored one counts.

    Without a threshold it is DEFAULT_THRESHOLD for scores in [0, 1]; others give no label that could differ.
    """
    if threshold is None and _outside_unit_range(scores[~np.isnan(scores)]):
        return np.zeros(len(scores), bool)
    threshold = DEFAULT_THRESHOLD if threshold is None else threshold
    derived = derive(scores, np.full(len(scores), np.nan), threshold, direction)
    found: np.ndarray = ~np.isnan(labels) & ~np.isnan(derived) & ((labels >= 0.5) != (derived == 1))
    return found


def used_scores(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the scores from which a label is derived: those of traces without a stored label."""
    used: np.ndarray = scores[np.isnan(labels) & ~np.isnan(scores)]
    return used


def threshold_or_default(threshold: float | None, scores: np.ndarray, labels: np.ndarray, where: str) -> float:
    """Return the score threshold: the given one, else DEFAULT_THRESHOLD, which is one for scores in [0, 1] only.

    UsageError for NaN and what is no number, and, beginning with `where`, if labels would be derived from scores outside [0, 1] without one.
    """
    if threshold is None and (found := _outside_unit_range(used_scores(scores, labels))):
        raise UsageError(f"{where}: {found}")
    try:
        if threshold is None or not math.isnan(threshold):
            return DEFAULT_THRESHOLD if threshold is None else threshold
    except (TypeError, ValueError):
        pass
    raise UsageError(f"found score_threshold {threshold!r:.60}, expected a number")


def is_in_unit_range(scores: np.ndarray) -> bool:
    """Return whether scores, NaN where missing, lie within [0, 1], where the default threshold applies."""
    return not bool(((scores < 0) | (scores > 1)).any())


def _outside_unit_range(used: np.ndarray) -> str | None:
    if is_in_unit_range(used):
        return None
    return (
        f"{plural(len(used), 'score')} from {used.min():g} to {used.max():g}, outside [0, 1], where the default "
        f"threshold {DEFAULT_THRESHOLD:g} applies; train --score-threshold chooses another (in Python score_threshold)"
    )


def describe(scores: np.ndarray, labels: np.ndarray, threshold: float | None, direction: str) -> str:
    """Return one line that tells how many scores and stored labels lead to the label "hallucination".

    Parameters
    ----------
    scores, labels : np.ndarray
        Float64 arrays of shape ``(N,)``; NaN marks a missing value.
    threshold : float, optional
        Default: DEFAULT_THRESHOLD, if the scores are in [0, 1].
    direction : {"correct", "hallucination"}
        What a high score means.
    """
    used, stored, parts = used_scores(scores, labels), labels[~np.isnan(labels)], []
    if threshold is None and (found := _outside_unit_range(used)):
        parts.append(found)
    elif len(used) or not len(stored):
        threshold = DEFAULT_THRESHOLD if threshold is None else threshold
        count = int((used < threshold).sum() if direction == CORRECT else (used >= threshold).sum())
        where = "below" if direction == CORRECT else "at or above"
        parts.append(f"{count:,} of {len(used):,} {where} {threshold:g}: labeled hallucination")
        if len(used) > 1 and count in (0, len(used)):
            parts.append("all of one class, which --score-threshold and --score-direction decide")
        elif not np.isin(used, (0, 1)).all():
            parts.append("train --score-threshold chooses another threshold")
    if len(stored):
        parts.append(f"{int((stored >= 0.5).sum()):,} of {plural(len(stored), 'stored label')}: hallucination")
    return "; ".join(parts)


def unlabeled_note(scores: Mapping[str, np.ndarray], labels: np.ndarray, name: str | None) -> str | None:
    """Return a line about the traces that have no label because another score than the used one is theirs.

    Parameters
    ----------
    scores : mapping of np.ndarray
        Values ``(N,)`` of each named score, NaN where missing.
    labels : np.ndarray
        Stored labels ``(N,)``, NaN where missing.
    name : str, optional
        The score that labels are derived from.

    Returns
    -------
    str or None
        None if there is no such trace.
    """
    missing = np.isnan(labels) & np.isnan(scores.get(name or "", np.full(len(labels), np.nan)))
    counts = {other: int((missing & ~np.isnan(values)).sum()) for other, values in sorted(scores.items())}
    found = [f"--score {other} gives {count:,} of them one" for other, count in counts.items() if count]
    if not found:
        return None
    return f"{plural(int(missing.sum()), 'trace')} without a label or the score {name}: {', '.join(found)}"
