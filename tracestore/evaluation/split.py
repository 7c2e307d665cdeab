"""Train, validation and test parts: by question, stratified, a pure function."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracestore.errors import TrainingError
from tracestore.store.read.store import TraceStore

FRACTIONS = {"train": 0.70, "val": 0.15, "test": 0.15}
PARTS = tuple(FRACTIONS)
# Of the questions outside a fold's test part, one in this many validates.
VALIDATION_SHARE = 6


@dataclass(frozen=True)
class Split:
    """Store indices of each part, and the question ids they belong to."""

    indices: dict[str, np.ndarray]
    question_ids: dict[str, list[str]]


def _digest(seed: object, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


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
        members.sort(key=lambda key: _digest(seed, key))
        n = len(members)
        # Small classes give one key to each part before the fractions count.
        num_test = max(1, round(FRACTIONS["test"] * n)) if n >= 3 else 0
        num_val = max(1, round(FRACTIONS["val"] * n)) if n >= 3 else 0
        bounds = {"train": n - num_val - num_test, "val": n - num_test, "test": n}
        for position, key in enumerate(members):
            part_of[key] = next(part for part in PARTS if position < bounds[part])
    return part_of


def deal(sizes: dict[str, tuple[int, int]], num_hands: int, seed: object) -> dict[str, int]:
    """Deals keys with (right, hallucinated) traces into hands of as equal classes as can be.

    Larger keys first, equal ones by a digest of (seed, key); each goes where it adds least to
    the sum over classes of squared shares. The order of `sizes` does not matter."""
    totals = [max(1, sum(size[c] for size in sizes.values())) for c in (0, 1)]
    hands = [[0, 0] for _ in range(num_hands)]
    dealt = {}
    for key in sorted(sizes, key=lambda key: (-sum(sizes[key]), _digest(seed, key))):
        size = sizes[key]

        def added(hand: int) -> float:
            return sum(size[c] * (2 * hands[hand][c] + size[c]) / totals[c] ** 2 for c in (0, 1))

        best = min(range(num_hands), key=added)
        dealt[key] = best
        hands[best] = [hands[best][c] + size[c] for c in (0, 1)]
    return dealt


def fold_keys(keys: Sequence[str], labels: Sequence[float], num_folds: int, seed: int) -> list[dict[str, str]]:
    """For each fold the part of each distinct key. Every key is in the test part of exactly
    one fold; of the others one in VALIDATION_SHARE validates. Both are stratified by the
    classes of a key's traces; a pure function of keys, labels and seed."""
    counts: dict[str, list[int]] = {}
    for key, label in zip(keys, labels, strict=True):
        counts.setdefault(key, [0, 0])[int(label >= 0.5)] += 1
    sizes = {key: (n[0], n[1]) for key, n in counts.items()}
    fold_of = deal(sizes, num_folds, seed)
    folds = []
    for fold in range(num_folds):
        rest = {key: size for key, size in sizes.items() if fold_of[key] != fold}
        hands = deal(rest, VALIDATION_SHARE, f"{seed}/{fold}")
        folds.append({key: "test" if key not in rest else "train" if hands[key] else "val" for key in sizes})
    return folds


def question_keys(questions: Sequence[str], groups: Sequence[str]) -> list[str]:
    """What is kept in one part, for each trace: its question, or its group where it has one;
    a question whose samples name several groups joins them (the first name in order stands
    for all)."""
    leader: dict[str, str] = {}

    def find(group: str) -> str:
        root = group
        while root in leader:
            root = leader[root]
        if root != group:
            leader[group] = root
        return root

    group_of: dict[str, str] = {}
    for question, group in zip(questions, groups, strict=True):
        if not group:
            continue
        first, second = sorted((find(group_of.setdefault(question, group)), find(group)))
        if first != second:
            leader[second] = first
    return [find(group_of[question]) if question in group_of else question for question in questions]


def make_split(store: TraceStore, targets: np.ndarray, seed: int) -> Split:
    """Splits the traces that have a label. Questions with a group are kept together by it.
    TrainingError where there is nothing to learn from."""
    labelled, questions, keys = _labelled(store, targets)
    return _split_of(labelled, questions, keys, split_keys(keys, targets[labelled].tolist(), seed), targets)


def make_folds(store: TraceStore, targets: np.ndarray, num_folds: int, seed: int) -> list[Split]:
    """Splits for cross-validation: each labelled trace is in exactly one fold's test part."""
    labelled, questions, keys = _labelled(store, targets)
    folds = fold_keys(keys, targets[labelled].tolist(), num_folds, seed)
    return [_split_of(labelled, questions, keys, part_of, targets, f"fold {k}: ") for k, part_of in enumerate(folds)]


def _labelled(store: TraceStore, targets: np.ndarray) -> tuple[np.ndarray, list[str], list[str]]:
    """Indices, question ids and keys of the traces that have a label."""
    labelled = np.flatnonzero(~np.isnan(targets))
    if len(labelled) == 0:
        raise TrainingError(
            f"{store.path}: none of {len(store)} traces has a score or a label, and a missing score is never a label; "
            f"add them: tracestore score {store.path} --scores scores.csv"
        )
    questions = store.question_ids.at(labelled)
    return labelled, questions, question_keys(questions, [store.group(int(k)) for k in labelled])


def _split_of(
    labelled: np.ndarray,
    questions: list[str],
    keys: list[str],
    part_of: dict[str, str],
    targets: np.ndarray,
    where: str = "",
) -> Split:
    parts = np.array([PARTS.index(part_of[key]) for key in keys])
    indices = {part: labelled[parts == k].astype(np.int64) for k, part in enumerate(PARTS)}
    ids = {
        part: list(dict.fromkeys(question for question, p in zip(questions, parts, strict=True) if p == k))
        for k, part in enumerate(PARTS)
    }
    split = Split(indices, ids)
    check_split(split, targets, where)
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


def class_counts(split: Split, targets: np.ndarray) -> dict[str, tuple[int, int]]:
    """Hallucinated and right traces of each part."""
    counts = {}
    for part, indices in split.indices.items():
        positive = int((targets[indices] >= 0.5).sum())
        counts[part] = (positive, len(indices) - positive)
    return counts


def check_split(split: Split, targets: np.ndarray, where: str = "") -> None:
    """TrainingError, with counts, unless every part has both classes."""
    counts = class_counts(split, targets)
    if any(0 in pair for pair in counts.values()):
        listing = ", ".join(f"{part}: {p} hallucinated and {n} right" for part, (p, n) in counts.items())
        raise TrainingError(
            f"{where}every part needs traces of both classes, found {listing}; add traces or change --score-threshold"
        )
