"""Scores, labels and groups: one value for each trace, replaceable without a change to the traces.

A columns group covers a range of traces. Commits add groups and merge those of
like size; replacing values rewrites them as one.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tracestore.errors import CorruptStoreError, escape_unprintable
from tracestore.store.format import schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.manifest import ColumnsRef
from tracestore.store.format.ragged import concatenate_ragged, decode_string, encode_strings, is_offsets
from tracestore.store.format.zip_group import ZipGroup
from tracestore.store.io.files import StoreFiles


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


class MappedColumns:
    """A columns group whose file is mapped, and whose values have not been read.

    Raises
    ------
    CorruptStoreError
        If it does not have the form of this format.
    FileNotFoundError
        If the file is missing.
    """

    def __init__(self, files: StoreFiles, ref: ColumnsRef) -> None:
        self._ref = ref
        with self._checked():
            self._group = ZipGroup(files.map(FileEntry(ref.path, ref.size, ref.crc32c)), schema.COLUMN_DTYPES)
            for name, count in (("scores", 0), ("labels", 0), ("groups_offsets", 1)):
                if self._group.num_items(name) != ref.num_traces + count:
                    raise ValueError(f"{name}: not of {ref.num_traces} traces")

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptStoreError(f"{self._ref.path}: {escape_unprintable(str(error), 300)}") from None

    def read(self) -> Columns:
        """Return a copy of the values."""
        with self._checked():
            columns = Columns(**{name: self._group.read(name) for name in schema.COLUMN_DTYPES})
            if not is_offsets(columns.groups_offsets, len(columns.groups)):
                raise ValueError("groups_offsets: not the offsets of the groups")
            columns.groups.tobytes().decode("utf-8", "surrogatepass")
            return columns


def read_columns(files: StoreFiles, ref: ColumnsRef) -> Columns:
    """Return a copy of the values of one columns group; see MappedColumns for the errors."""
    return MappedColumns(files, ref).read()
