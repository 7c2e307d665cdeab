"""Train, validation and test parts: by question, stratified, a pure function."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracestore.errors import TrainingError
from tracestore.store.reader import TraceStore

FRACTIONS = {"train": 0.70, "val": 0.15, "test": 0.15}
PARTS = tuple(FRACTIONS)


@dataclass(frozen=True)
class Split:
    """Store indices of each part, and the question ids they belong to."""

    indices: dict[str, np.ndarray]
    question_ids: dict[str, list[str]]


def split_keys(keys: Sequence[str], labels: Sequence[float], seed: int) -> dict[str, str]:
    """Assigns each distinct key (a question, or a group of questions) to a part.

    Keys are ranked, within each class, by a digest of (seed, key); the first 70 % train,
    the next 15 % validate, the rest test. A key's class is that of most of its traces.
    The order of the arguments does not matter."""
    votes: dict[str, list[float]] = {}
    for key, label in zip(keys, labels, strict=True):
        votes.setdefault(key, []).append(label)
    classes: dict[bool, list[str]] = {False: [], True: []}
    for key, labels_of_key in votes.items():
        classes[float(np.mean(labels_of_key)) >= 0.5].append(key)
    part_of = {}
    for members in classes.values():

        def rank(key: str) -> bytes:
            return hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()

        members.sort(key=rank)
        n = len(members)
        # Small classes give one key to each part before the fractions count.
        num_test = max(1, round(FRACTIONS["test"] * n)) if n >= 3 else 0
        num_val = max(1, round(FRACTIONS["val"] * n)) if n >= 3 else 0
        bounds = {"train": n - num_val - num_test, "val": n - num_test, "test": n}
        for position, key in enumerate(members):
            part_of[key] = next(part for part in PARTS if position < bounds[part])
    return part_of


def make_split(store: TraceStore, targets: np.ndarray, seed: int) -> Split:
    """Splits the traces that have a label. Questions with a group are kept together by it.
    TrainingError where there is nothing to learn from."""
    labelled = np.flatnonzero(~np.isnan(targets))
    if len(labelled) == 0:
        raise TrainingError(
            f"{store.path}: none of {len(store)} traces has a score or a label, and a missing score is never a label; "
            f"add them: tracestore score {store.path} --scores scores.csv"
        )
    ids = {int(k): store.question_ids[int(k)] for k in labelled}
    keys = [store.group(k) or question for k, question in ids.items()]
    part_of = split_keys(keys, [float(targets[k]) for k in ids], seed)
    indices: dict[str, list[int]] = {part: [] for part in PARTS}
    questions: dict[str, dict[str, None]] = {part: {} for part in PARTS}
    for key, (index, question) in zip(keys, ids.items(), strict=True):
        indices[part_of[key]].append(index)
        questions[part_of[key]][question] = None
    split = Split({p: np.array(v, np.int64) for p, v in indices.items()}, {p: list(v) for p, v in questions.items()})
    check_split(split, targets)
    return split


def split_from_ids(store: TraceStore, targets: np.ndarray, question_ids: dict[str, list[str]]) -> Split:
    """The split of an earlier run again. TrainingError where a question is not in the store."""
    wanted = {question: part for part, ids in question_ids.items() for question in ids}
    indices: dict[str, list[int]] = {part: [] for part in PARTS}
    seen = set()
    for index in np.flatnonzero(~np.isnan(targets)):
        question = store.question_ids[int(index)]
        if question in wanted:
            indices[wanted[question]].append(int(index))
            seen.add(question)
    missing = set(wanted) - seen
    if missing:
        raise TrainingError(
            f"{len(missing)} questions of split.json are not in {store.path}, first {sorted(missing)[0]!r}"
        )
    split = Split({p: np.array(v, np.int64) for p, v in indices.items()}, question_ids)
    check_split(split, targets)
    return split


def check_split(split: Split, targets: np.ndarray) -> None:
    """TrainingError, with counts, unless every part has both classes."""
    counts = {}
    for part, indices in split.indices.items():
        positive = int((targets[indices] >= 0.5).sum())
        counts[part] = (positive, len(indices) - positive)
    if any(0 in pair for pair in counts.values()):
        listing = ", ".join(f"{part}: {p} hallucinated and {n} right" for part, (p, n) in counts.items())
        raise TrainingError(
            f"every part needs traces of both classes, found {listing}; add traces or change --score-threshold"
        )
