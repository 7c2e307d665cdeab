"""Scores, labels and groups: one value for each trace, replaceable without a change to the traces.

A columns group covers a range of traces. Commits add groups and merge those of
like size; replacing values rewrites them as one.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from tracestore.errors import CorruptStoreError
from tracestore.store.format import schema
from tracestore.store.format.manifest import ColumnsRef
from tracestore.store.format.ragged import concatenate_ragged, decode_string, encode_strings
from tracestore.store.io.files import StoreFiles
from tracestore.store.read.array_reader import ArrayReader, ArraySpec
from tracestore.store.read.chunk_cache import ChunkCache


@dataclass
class Columns:
    """Values of N traces.

    Attributes
    ----------
    scores, labels : np.ndarray
        (N,) float64, NaN where missing.
    groups, groups_offsets : np.ndarray
        UTF-8 bytes and their offsets (N + 1,); "" where missing.
    """

    scores: np.ndarray = field(default_factory=lambda: np.zeros(0, "<f8"))
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, "<f8"))
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, "u1"))
    groups_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, "<i8"))

    @classmethod
    def from_values(cls, scores: list[float], labels: list[float], groups: list[str]) -> "Columns":
        """Make columns of Python values."""
        return cls(np.array(scores, "<f8"), np.array(labels, "<f8"), *encode_strings(groups))

    def __len__(self) -> int:
        return len(self.scores)

    def group(self, index: int) -> str:
        """Return the group of one trace."""
        return decode_string(self.groups, self.groups_offsets, index)

    @property
    def num_scored(self) -> int:
        """Number of traces with a score."""
        return int((~np.isnan(self.scores)).sum())

    @property
    def num_labeled(self) -> int:
        """Number of traces with a label."""
        return int((~np.isnan(self.labels)).sum())

    def with_values(self, updates: dict[int, tuple[float, float, str | None]]) -> "Columns":
        """Return a copy with (score, label, group) replaced at some indices; NaN and None keep the old value."""
        scores, labels = self.scores.copy(), self.labels.copy()
        groups = [self.group(k) for k in range(len(self))]
        for k, (score, label, group) in updates.items():
            scores[k] = scores[k] if math.isnan(score) else score
            labels[k] = labels[k] if math.isnan(label) else label
            groups[k] = groups[k] if group is None else group
        return Columns(scores, labels, *encode_strings(groups))


def join_columns(parts: list[Columns]) -> Columns:
    """Concatenate columns."""
    if len(parts) == 1:
        return parts[0]
    groups, offsets = concatenate_ragged([(p.groups, p.groups_offsets) for p in parts])
    scores = np.concatenate([p.scores for p in parts] or [np.zeros(0, "<f8")])
    labels = np.concatenate([p.labels for p in parts] or [np.zeros(0, "<f8")])
    return Columns(scores, labels, groups, offsets)


def read_columns(files: StoreFiles, ref: ColumnsRef) -> Columns:
    """Read one columns group. CorruptStoreError if it is damaged."""
    entries = {f.path: f for f in ref.files}
    arrays = {}
    for name, (kind, dtype) in schema.COLUMN_ARRAYS.items():
        count = {schema.ROWS: ref.num_traces, schema.OFFSETS: ref.num_traces + 1}.get(kind)
        spec = ArraySpec(np.dtype(dtype), num_rows=count)
        reader = ArrayReader(files, entries, f"{ref.path}/{name}", ChunkCache(0), spec)
        # Copies: they are read by plain numpy for as long as the store is open.
        arrays[name] = reader.copy(0, reader.shape[0])
    offsets = arrays["groups_offsets"]
    if offsets[0] != 0 or offsets[-1] != len(arrays["groups"]) or (offsets[1:] < offsets[:-1]).any():
        raise CorruptStoreError(f"{ref.path}/groups_offsets: not the offsets of the groups")
    try:
        arrays["groups"].tobytes().decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptStoreError(f"{ref.path}/groups: {error}") from None
    return Columns(**arrays)
