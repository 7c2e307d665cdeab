"""Folds that are written once, and checked whenever they are read."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, TrainingError, UsageError
from tracestore.evaluation.store_split import assign_balanced, class_counts_of, trace_keys
from tracestore.split import labeled_positions
from tracestore.store.io.fsio import give_name, read_json, write_atomic
from tracestore.store.read.store import TraceStore

VERSION = 1
SCHEMES = ("question", "group")
_DIGEST = "sha256"


@dataclass(frozen=True)
class FrozenFolds:
    """The fold of every labeled question of a store, by question and by group.

    Attributes
    ----------
    num_folds, seed : int
    labels : str
        Digest of questions, samples, groups and labels.
    fold_of : dict
        The fold of each question id for "question", and for "group" if there are enough groups that every fold has
        both classes.
    """

    num_folds: int
    seed: int
    labels: str
    fold_of: dict[str, dict[str, int]]

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    def folds(self, store: TraceStore, indices: np.ndarray, scheme: str) -> np.ndarray:
        """Return the fold ``(n,)`` int64 of traces of the store."""
        return np.array([self.fold_of[scheme][question] for question in store.question_ids.take(indices)], np.int64)

    def write(self, path: Path) -> None:
        """Write the folds with their digest, unless the file exists: another run may have written it meanwhile."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        content = json.dumps(self._content() | {_DIGEST: self.digest}, indent=1, sort_keys=True) + "\n"
        write_atomic(temporary, content.encode())
        try:
            give_name(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def label_digest(store: TraceStore, targets: np.ndarray) -> str:
    """Return a digest of the questions, samples, groups and labels of the labeled traces, in any order."""
    labeled = labeled_positions(targets, str(store.path))
    questions = store.question_ids.take(labeled)
    rows = sorted(
        (question, store[k].sample, store.group(k), int(targets[k] >= 0.5))
        for question, k in zip(questions, labeled.tolist(), strict=True)
    )
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def make_frozen_folds(store: TraceStore, targets: np.ndarray, num_folds: int, seed: int) -> FrozenFolds:
    """Assign the labeled questions to folds with similar class counts, by question and by group.

    Raises
    ------
    TrainingError
        If no trace is labeled, or a fold by question lacks a class.
    """
    labeled = labeled_positions(targets, str(store.path))
    labels, questions = (targets[labeled] >= 0.5).astype(int), store.question_ids.take(labeled)
    fold_of = {}
    for scheme in SCHEMES:
        keys = trace_keys(store, labeled, scheme)
        if scheme == "group" and keys == questions:
            continue  # no groups
        of_key = assign_balanced(class_counts_of(keys, labels), num_folds, seed)
        found = np.array([of_key[key] for key in keys])
        counts = [(int(labels[found == k].sum()), int((found == k).sum())) for k in range(num_folds)]
        if not all(0 < positive < total for positive, total in counts):
            if scheme == "group":
                continue  # too few groups
            listing = ", ".join(f"{p} hallucinated of {n}" for p, n in counts)
            raise TrainingError(f"every fold needs both classes, found {listing}; use fewer --folds")
        fold_of[scheme] = dict(zip(questions, found.tolist(), strict=True))
    return FrozenFolds(num_folds, seed, label_digest(store, targets), fold_of)


def frozen_folds(path: Path, store: TraceStore, targets: np.ndarray, num_folds: int, seed: int) -> FrozenFolds:
    """Read the folds of a file, or make and write them if there is no file.

    Raises
    ------
    InvalidInputError
        The content of the file does not have its digest, or is no folds.
    UsageError
        The folds are those of other labels, or of another number or seed.
    """
    if not path.exists():
        make_frozen_folds(store, targets, num_folds, seed).write(path)
    folds = read_folds(path)
    if folds.labels != label_digest(store, targets):
        raise UsageError(
            f"{path}: the folds of other questions, groups or labels than those of {store.path}; use another --output"
        )
    if (folds.num_folds, folds.seed) != (num_folds, seed):
        raise UsageError(
            f"{path}: {folds.num_folds} folds with seed {folds.seed}, not {num_folds} with {seed}; pass --folds "
            f"{folds.num_folds} --seed {folds.seed} or another folder"
        )
    return folds


def read_folds(path: Path) -> FrozenFolds:
    """Read and check a file of folds. InvalidInputError if its content does not have its digest, or is no folds."""
    try:
        saved = read_json(path)
        if saved["version"] != VERSION or "question" not in saved["fold_of"]:
            raise ValueError
        folds = FrozenFolds(
            int(saved["num_folds"]),
            int(saved["seed"]),
            str(saved["labels"]),
            {s: {str(q): int(k) for q, k in saved["fold_of"][s].items()} for s in SCHEMES if s in saved["fold_of"]},
        )
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidInputError("not a file of folds; remove it, or pass another folder", source=str(path)) from None
    if saved.get(_DIGEST) != folds.digest:
        reason = f"{_DIGEST}: the content was changed, its digest is {folds.digest}; restore the file, or remove it"
        raise InvalidInputError(reason, source=str(path))
    return folds
