"""Scores, labels and groups: one value for each trace, replaceable without a change to the traces.

A columns group covers a range of traces. Commits add groups and merge those of
like size; replacing values rewrites them as one.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from tracestore.store.format import schema
from tracestore.store.format.manifest import ColumnsRef, Manifest
from tracestore.store.format.ragged import concatenate_ragged, decode_string, encode_strings, is_offsets
from tracestore.store.format.zip_group import ZipGroup
from tracestore.store.io.files import StoreFiles, reading_committed
from tracestore.words import plural


class TraceValues(NamedTuple):
    """Named scores, label and group of one trace: NaN and "" for none, None if they are not given."""

    scores: Mapping[str, float] = {}
    label: float | None = None
    group: str | None = None


@dataclass
class Columns:
    """Values of N traces.

    Attributes
    ----------
    scores : dict of np.ndarray
        Values (N,) float64 of each named score that a trace has, NaN where missing.
    labels : np.ndarray
        (N,) float64, NaN where missing.
    groups, groups_offsets : np.ndarray
        UTF-8 bytes and their offsets (N + 1,); "" where missing.
    """

    scores: dict[str, np.ndarray] = field(default_factory=dict)
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, "<f8"))
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, "u1"))
    groups_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, "<i8"))

    def __len__(self) -> int:
        return len(self.labels)

    def score(self, name: str | None) -> np.ndarray:
        """Return the values (N,) of a named score, NaN where missing."""
        found = self.scores.get(name or "")
        return np.broadcast_to(math.nan, len(self)) if found is None else found

    def scores_of(self, index: int) -> dict[str, float]:
        """Return the named scores of one trace."""
        return {name: float(v[index]) for name, v in self.scores.items() if not math.isnan(v[index])}

    def group(self, index: int) -> str:
        """Return the group of one trace."""
        return decode_string(self.groups, self.groups_offsets, index)

    def describe_groups(self) -> Iterator[str]:
        """Yield a line about the groups; none if no trace has one."""
        found = [group for k in range(len(self)) if (group := self.group(k))] if len(self.groups) else []
        if found:
            yield f"{plural(len(set(found)), 'group')} of {plural(len(found), 'trace')}: a split keeps each group together"

    def num_scored(self, name: str | None) -> int:
        """Return the number of traces with a named score."""
        return int((~np.isnan(self.score(name))).sum())

    @property
    def num_labeled(self) -> int:
        """Number of traces with a label."""
        return int((~np.isnan(self.labels)).sum())

    def with_values(self, updates: Mapping[int, TraceValues]) -> "Columns":
        """Return a copy with the values of some traces replaced; those that are not given are kept."""
        copies, labels = {name: values.copy() for name, values in self.scores.items()}, self.labels.copy()
        groups = [self.group(k) for k in range(len(self))]
        for k, (scores, label, group) in updates.items():
            for name, score in scores.items():
                copies.setdefault(name, np.full(len(self), math.nan))[k] = score
            labels[k] = labels[k] if label is None else label
            groups[k] = groups[k] if group is None else group
        known = {name: values for name, values in copies.items() if not np.isnan(values).all()}
        return Columns(known, labels, *encode_strings(groups))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a columns group by name."""
        scores = {f"{schema.SCORE_PREFIX}{name}": self.scores[name] for name in sorted(self.scores)}
        return scores | {name: getattr(self, name) for name in schema.COLUMN_DTYPES}


def join_columns(parts: list[Columns]) -> Columns:
    """Concatenate columns; the arrays are read-only."""
    if len(parts) == 1:
        return parts[0]
    groups, offsets = concatenate_ragged([(p.groups, p.groups_offsets) for p in parts])
    names = {name for part in parts for name in part.scores}
    scores = {name: np.concatenate([part.score(name) for part in parts]) for name in names}
    labels = np.concatenate([p.labels for p in parts] or [np.zeros(0, "<f8")])
    for values in (*scores.values(), labels, groups, offsets):
        values.flags.writeable = False  # as those of one part: a caller would change later labels
    return Columns(scores, labels, groups, offsets)


class MappedColumns:
    """A columns group whose file is mapped, and whose values have not been read.

    `score_names` are the named scores of the store; the group has those that one of its traces has.

    Raises
    ------
    CorruptStoreError
        If the file is missing or does not have the form of this format.
    """

    def __init__(self, files: StoreFiles, ref: ColumnsRef, score_names: Iterable[str]) -> None:
        self._checked = partial(reading_committed, ref.path, prefix=files.prefix)
        self._scores = {f"{schema.SCORE_PREFIX}{name}": name for name in score_names}
        with self._checked():
            dtypes = schema.COLUMN_DTYPES | dict.fromkeys(self._scores, schema.SCORE_DTYPE)
            mapped = files.map(ref)
            self._group = ZipGroup(mapped, dtypes, frozenset(self._scores))
            for name in self._group.names - {"groups"}:
                if self._group.num_items(name) != ref.num_traces + (name == "groups_offsets"):
                    raise ValueError(f"{name}: not of {ref.num_traces} traces")

    def read(self) -> Columns:
        """Return a copy of the values."""
        with self._checked():
            scores = {name: self._group.read(array) for array, name in self._scores.items() if array in self._group}
            columns = Columns(scores, **{name: self._group.read(name) for name in schema.COLUMN_DTYPES})
            if not is_offsets(columns.groups_offsets, len(columns.groups)):
                raise ValueError("groups_offsets: not the offsets of the groups")
            columns.groups.tobytes().decode("utf-8", "surrogatepass")
            return columns


def read_columns(files: StoreFiles, manifest: Manifest, refs: Iterable[ColumnsRef] | None = None) -> Columns:
    """Return a copy of the values in all or some columns groups of a generation; see MappedColumns for the errors."""
    names = manifest.attributes.scores
    return join_columns([MappedColumns(files, ref, names).read() for ref in refs or manifest.columns])
