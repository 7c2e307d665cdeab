"""Train, validation and test splits: by question, stratified by class, a pure function of the data.

Also the traces with NaN or infinite values, which --drop-nonfinite leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracestore.errors import TrainingError, escape_unprintable
from tracestore.split import SPLITS, assign_splits, digest, labeled_positions, question_keys
from tracestore.store.read.store import TraceStore
from tracestore.words import plural

# Outside the test split of a fold, one in this many questions is used for validation.
_VALIDATION_BINS = 6
_ADVICE = "add traces or change --score-threshold"


@dataclass(frozen=True)
class Split:
    """A division of the labeled traces into train, validation and test split.

    Parameters
    ----------
    indices : dict of np.ndarray
        Store indices, int64, of each name in `SPLITS`.
    question_ids : dict of list of str
        Question ids of each name in `SPLITS`.
    """

    indices: dict[str, np.ndarray]
    question_ids: dict[str, list[str]]


def assign_balanced(counts: dict[str, tuple[int, int]], num_bins: int, seed: object) -> dict[str, int]:
    """Assign keys to bins such that the bins have similar class counts.

    Larger keys are assigned first, equal ones in the order of a digest of (seed, key). Each
    goes to the bin where it increases the sum over classes of squared shares the least. The
    order of `counts` does not matter.

    Parameters
    ----------
    counts : dict
        Number of (correct, hallucinated) traces of each key.
    num_bins : int
    seed : object
        Any value with a stable string.

    Returns
    -------
    dict
        Bin of each key, from 0.
    """
    totals = [max(1, sum(count[c] for count in counts.values())) for c in (0, 1)]
    bins = [[0, 0] for _ in range(num_bins)]
    assigned = {}
    for key in sorted(counts, key=lambda key: (-sum(counts[key]), digest(seed, key))):
        count = counts[key]

        def increase(b: int) -> float:
            return sum(count[c] * (2 * bins[b][c] + count[c]) / totals[c] ** 2 for c in (0, 1))

        best = min(range(num_bins), key=increase)
        assigned[key] = best
        bins[best] = [bins[best][c] + count[c] for c in (0, 1)]
    return assigned


def fold_keys(keys: Sequence[str], labels: Sequence[float], num_folds: int, seed: int) -> list[dict[str, str]]:
    """Return for each fold the split of each distinct key.

    Every key is tested in exactly one fold; one in six of the others validates. Both are
    stratified by class. A pure function of keys, labels and seed; see `split_keys`.
    """
    counts = class_counts_of(keys, labels)
    fold_of = assign_balanced(counts, num_folds, seed)
    folds = []
    for fold in range(num_folds):
        rest = {key: count for key, count in counts.items() if fold_of[key] != fold}
        bins = assign_balanced(rest, _VALIDATION_BINS, f"{seed}/{fold}")
        folds.append({key: "test" if key not in rest else "train" if bins[key] else "val" for key in counts})
    return folds


def inner_bins(
    store: TraceStore, indices: np.ndarray, labels: np.ndarray, num_bins: int, seed: int, keep_together: str
) -> np.ndarray:
    """Return a bin for each of some traces, for a choice inside of the training split.

    The bins have similar class counts, and a question is in one bin.

    Parameters
    ----------
    store : TraceStore
    indices : np.ndarray
        ``(n,)`` int64, store indices.
    labels : np.ndarray
        ``(n,)``, 0 or 1.
    num_bins : int
    seed : int
    keep_together : {"question", "group"}
        "group": the questions of a group are in one bin too.

    Returns
    -------
    np.ndarray
        ``(n,)`` int64, from 0.
    """
    keys = trace_keys(store, indices, keep_together)
    bin_of = assign_balanced(class_counts_of(keys, labels), num_bins, f"{seed}/inner")
    return np.array([bin_of[key] for key in keys], np.int64)


def trace_keys(store: TraceStore, indices: np.ndarray, keep_together: str) -> list[str]:
    """Return the question of each trace, or with "group" the key that `question_keys` gives it."""
    questions = store.question_ids.take(indices)
    if keep_together == "question":
        return questions
    return question_keys(questions, [store.group(int(k)) for k in indices])


def class_counts_of(keys: Sequence[str], labels: Sequence[float] | np.ndarray) -> dict[str, tuple[int, int]]:
    """Return the numbers of correct and hallucinated traces of each key."""
    classes: dict[str, list[int]] = {}
    for key, label in zip(keys, labels, strict=True):
        classes.setdefault(key, [0, 0])[int(label >= 0.5)] += 1
    return {key: (n[0], n[1]) for key, n in classes.items()}


def make_split(store: TraceStore, targets: np.ndarray, seed: int) -> Split:
    """Split the labeled traces of a store. Questions of a group stay together.

    Raises
    ------
    TrainingError
        No trace is labeled, or a split lacks a class.
    """
    labeled, questions, groups = _labeled(store, targets)
    names = assign_splits(questions, groups, targets[labeled].tolist(), seed)
    count = len({*groups} - {""})
    advice = f"the {plural(count, 'group')} may be too few for three parts: --folds 3" if count else _ADVICE
    return _build_split(labeled, questions, names, targets, advice=advice)


def make_folds(store: TraceStore, targets: np.ndarray, num_folds: int, seed: int) -> list[Split]:
    """Return the splits for cross-validation: each labeled trace is tested in exactly one fold.

    Raises
    ------
    TrainingError
        No trace is labeled, or a split of a fold lacks a class.
    """
    labeled, questions, groups = _labeled(store, targets)
    keys = question_keys(questions, groups)
    folds = fold_keys(keys, targets[labeled].tolist(), num_folds, seed)
    return [
        _build_split(labeled, questions, [split_of[key] for key in keys], targets, f"fold {k}: ")
        for k, split_of in enumerate(folds)
    ]


def _labeled(store: TraceStore, targets: np.ndarray) -> tuple[np.ndarray, list[str], list[str]]:
    """Return indices, question ids and groups of the labeled traces."""
    labeled = labeled_positions(targets, str(store.path))
    questions = store.question_ids.take(labeled)
    return labeled, questions, [store.group(int(k)) for k in labeled]


def split_from_ids(store: TraceStore, targets: np.ndarray, question_ids: dict[str, list[str]]) -> Split:
    """Rebuild the split of an earlier run from its question ids.

    Raises
    ------
    TrainingError
        A question is not in the store or has no label, a group is in two parts, or a split lacks a class.
    """
    split_of = {question: name for name, ids in question_ids.items() for question in ids}
    labeled, questions, groups = _labeled(store, targets)
    missing = set(split_of) - set(questions)
    if missing:
        unknown = missing - set(store.question_ids)
        reason = f"not in {store.path}" if unknown else f"without a label or score in {store.path} now"
        named = unknown or missing
        shown = f"{plural(len(named), 'question')} of the earlier run, such as {min(named)!r:.60}"
        raise TrainingError(f"{shown}: {reason}")
    names = [split_of.get(question, "") for question in questions]
    # The earlier run did not use the others, so they join no groups.
    keys = question_keys(questions, [group if name else "" for group, name in zip(groups, names, strict=True)])
    part_of: dict[str, str] = {}
    divided = {key for key, name in zip(keys, names, strict=True) if part_of.setdefault(key, name) != name}
    if divided:
        raise TrainingError(
            f"the groups of {store.path} have changed since the split was made: several of its parts have group "
            f"{min(divided)!r:.60}{f' and {len(divided) - 1:,} more' * (len(divided) > 1)}; --overwrite instead of --resume "
            "makes another split"
        )
    return _build_split(labeled, questions, names, targets)


def _build_split(
    labeled: np.ndarray,
    questions: list[str],
    names: Sequence[str] | np.ndarray,
    targets: np.ndarray,
    prefix: str = "",
    advice: str = _ADVICE,
) -> Split:
    """Return the split in which trace ``labeled[k]`` belongs to ``names[k]``.

    Raise TrainingError, with the counts, unless every split has both classes.
    """
    name_of, question_of = np.array(names), np.array(questions, dtype=object)
    split = Split(
        {name: labeled[name_of == name].astype(np.int64) for name in SPLITS},
        {name: list(dict.fromkeys(question_of[name_of == name])) for name in SPLITS},
    )
    counts = class_counts(split, targets)
    if any(0 in pair for pair in counts.values()):
        listing = ", ".join(f"{name}: {p} hallucinated and {n} correct" for name, (p, n) in counts.items())
        raise TrainingError(f"{prefix}every split needs traces of both classes, found {listing}; {advice}")
    return split


def class_counts(split: Split, targets: np.ndarray) -> dict[str, tuple[int, int]]:
    """Return the numbers of hallucinated and correct traces of each split."""
    counts = {}
    for name, indices in split.indices.items():
        positive = int((targets[indices] >= 0.5).sum())
        counts[name] = (positive, len(indices) - positive)
    return counts


_MAX_IDS = 5


def check_finite(store: TraceStore, indices: np.ndarray) -> None:
    """Raise TrainingError where a trace of a split holds NaN or infinite values, also where no detector reads them."""
    wrong = indices[store.has_nonfinite[indices]]
    if len(wrong):
        raise TrainingError(
            f"the trace of question {store.question_ids[int(wrong[0])]!r} holds NaN or infinite values "
            f"({plural(len(wrong), 'such trace')}); --drop-nonfinite leaves them out"
        )


def drop_nonfinite(store: TraceStore, targets: np.ndarray) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Return the labels ``(N,)`` without those of traces with NaN or infinite values, and the traces that had one.

    Each is a dict of question_id and sample.
    """
    dropped = store[np.flatnonzero(store.has_nonfinite & ~np.isnan(targets))]
    entries = [{"question_id": trace.question_id, "sample": trace.sample} for trace in dropped]
    return np.where(store.has_nonfinite, np.nan, targets), entries


def describe_dropped(dropped: list[dict[str, Any]]) -> str:
    """Return one line with the number of traces that `drop_nonfinite` left out, and the first ids."""
    ids = [escape_unprintable(entry["question_id"], 60) for entry in dropped[:_MAX_IDS]]
    more = [f"{len(dropped) - _MAX_IDS:,} more"] if len(dropped) > _MAX_IDS else []
    listing = f": {', '.join(ids + more)}" if dropped else ""
    return f"--drop-nonfinite: {plural(len(dropped), 'trace')} with NaN or infinite values left out{listing}"
