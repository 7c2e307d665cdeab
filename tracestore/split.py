"""Assignment of questions to the train, validation and test split: a pure function of ids, labels and seed."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from tracestore.errors import TrainingError, UsageError

FRACTIONS = {"train": 0.70, "val": 0.15, "test": 0.15}
SPLITS = tuple(FRACTIONS)


def digest(seed: object, key: str) -> bytes:
    """Return a digest that orders keys in a way that depends on the seed only."""
    return hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def checked_fractions(fractions: Mapping[str, float]) -> dict[str, float]:
    """Return a fraction for each of SPLITS, 0 for one that is not given.

    UsageError unless train is above 0, none is negative, and they add up to 1.
    """
    found = {name: float(fractions.get(name, 0)) for name in SPLITS}
    if not (found["train"] > 0 and min(found.values()) >= 0 and abs(sum(found.values()) - 1) < 1e-6):
        given = ", ".join(f"{name}={fraction:g}" for name, fraction in fractions.items())
        raise UsageError(f"found {given}; expected fractions that add up to 1, such as train=0.8, val=0.1, test=0.1")
    return found


def split_keys(
    keys: Sequence[str], labels: Sequence[float], seed: int, fractions: Mapping[str, float] = FRACTIONS
) -> dict[str, str]:
    """Assign each distinct key to a split.

    Keys are ranked within each class by a digest of (seed, key). By default the first 70 % train,
    the next 15 % validate, the rest tests. The class of a key is that of the majority of its
    traces. The order of the arguments does not matter.

    Parameters
    ----------
    keys : sequence of str
        For each trace its question, or its group of questions.
    labels : sequence of float
        For each trace.
    seed : int
    fractions : mapping
        Fraction of each of SPLITS; they add up to 1.

    Returns
    -------
    dict
        Name of the split for each key.
    """
    votes: dict[str, list[float]] = {}
    for key, label in zip(keys, labels, strict=True):
        votes.setdefault(key, []).append(label)
    classes: dict[bool, list[str]] = {False: [], True: []}
    for key, labels_of_key in votes.items():
        mean = labels_of_key[0] if len(labels_of_key) == 1 else float(np.mean(labels_of_key))
        classes[mean >= 0.5].append(key)
    split_of = {}
    wanted = [name for name in SPLITS if fractions[name] > 0]
    for members in classes.values():
        members.sort(key=lambda key: digest(seed, key))
        n = len(members)
        # A small class gives one key to each split before the fractions apply.
        is_divided = n >= len(wanted)
        num_test, num_val = (
            max(1, round(fractions[name] * n)) if is_divided and name in wanted else 0 for name in ("test", "val")
        )
        if is_divided:
            num_test = min(num_test, n - 1 - (num_val > 0))
            num_val = min(num_val, n - 1 - num_test)
        bounds = {"train": n - num_val - num_test, "val": n - num_test, "test": n}
        for position, key in enumerate(members):
            split_of[key] = next(name for name in SPLITS if position < bounds[name])
    return split_of


def question_keys(questions: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return the key of each trace: traces with the same key belong into the same split.

    The key is the question, or its group where it has one. A question whose samples name
    several groups joins these groups under the first name in sorted order.
    """
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


def assign_splits(
    questions: Sequence[str],
    groups: Sequence[str],
    labels: Sequence[float],
    seed: int,
    fractions: Mapping[str, float] = FRACTIONS,
) -> np.ndarray:
    """Return the name of the split of each trace, an array (n,) of str.

    Parameters
    ----------
    questions, groups : sequence of str
        Question and group of each trace; "" without a group. Traces of a question or a group get the same split.
    labels : sequence of float
        Label of each trace, 0 or 1.
    seed : int
    fractions : mapping
        As of `split_keys`.
    """
    keys = question_keys(questions, groups)
    split_of = split_keys(keys, labels, seed, fractions)
    return np.array([split_of[key] for key in keys], dtype="U5")


def labeled_positions(targets: np.ndarray, path: str) -> np.ndarray:
    """Return the positions of the traces with a label, which is NaN where missing.

    TrainingError, which names the store `path`, if there is none.
    """
    labeled = np.flatnonzero(~np.isnan(targets))
    if len(labeled) == 0:
        raise TrainingError(
            f"{path}: none of {len(targets)} traces has a score or a label, and a missing score is never a label; "
            f"add them: tracestore score STORE --scores scores.csv"
        )
    return labeled
