"""The changes that a writer has collected for its next commit."""

import math
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import manifest as mf
from tracestore.store.format import schema
from tracestore.store.format.lens_attribute import LensField
from tracestore.store.format.provenance import Provenance
from tracestore.store.format.ragged import encode_strings
from tracestore.store.lens import LensArrays
from tracestore.store.read.columns import Columns, TraceValues
from tracestore.store.write.pack import PackedTrace, fit_attributes
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.segment_writer import SegmentWriter
from tracestore.store.write.written import TraceBlock, WrittenSegment


class PendingRows:
    """The new rows of the index, as columns, and the values of their traces.

    Attributes
    ----------
    ids : list of str
        Question ids.
    columns : dict of array
        Columns by the names of manifest.TRACE_COLUMNS, and `label`, NaN for none.
    groups : list of str
    """

    def __init__(self) -> None:
        dtypes = mf.TRACE_COLUMNS | {"label": "<f8"}
        self.ids, self.groups = list[str](), list[str]()
        self.columns: dict[str, array[Any]] = {name: array(np.dtype(dtype).char) for name, dtype in dtypes.items()}
        self._scores: dict[str, array[float]] = {}  # each up to the last trace that has it

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, question_id: str, location: Mapping[str, int], given: TraceValues) -> None:
        """Append a row; `location` has the names of manifest.TRACE_COLUMNS."""
        for name, value in location.items():
            self.columns[name].append(value)
        self.columns["label"].append(math.nan if given.label is None else given.label)
        for name, score in given.scores.items():
            if not math.isnan(score):
                self._score(name).append(score)
        self.ids.append(question_id)
        self.groups.append(given.group or "")

    def extend(self, block: TraceBlock, source: int) -> None:
        """Append the traces of a block, as rows of a source."""
        for name, values in (block.locations(source) | {"label": block.labels()}).items():
            self.columns[name].frombytes(np.asarray(values, self.columns[name].typecode).tobytes())
        for name, values in block.scores().items():
            self._score(name).frombytes(values.tobytes())
        self.ids += block.ids
        self.groups += block.groups

    def _score(self, name: str) -> "array[float]":
        """Return the values of a named score, filled up to the rows so far."""
        values = self._scores.setdefault(name, array("d"))
        values.extend(repeat(math.nan, len(self) - len(values)))
        return values

    def values(self, row: int) -> TraceValues:
        """Return the values of a row."""
        scores = {name: self._score(name)[row] for name in self._scores}
        return TraceValues(scores, self.columns["label"][row], self.groups[row])

    def set_values(self, row: int, given: TraceValues) -> None:
        """Replace all values of a row."""
        for name, score in (dict.fromkeys(self._scores, math.nan) | dict(given.scores)).items():
            self._score(name)[row] = score
        self.columns["label"][row], self.groups[row] = given.label, given.group or ""

    def remove(self, first: int) -> None:
        """Remove the rows from `first` on."""
        columns: list[Any] = [self.ids, self.groups, *self.columns.values(), *self._scores.values()]
        for values in columns:
            del values[first:]

    def to_columns(self) -> Columns:
        """Return the values of the traces."""
        scores = {name: np.array(self._score(name)) for name in self._scores}
        scores = {name: values for name, values in scores.items() if not np.isnan(values).all()}
        return Columns(scores, np.array(self.columns["label"]), *encode_strings(self.groups))


class Key(NamedTuple):
    """The key of a trace, its position in its source, and the label that the source gives, None for none."""

    question_id: str
    sample: int
    position: int
    label: float | None


WrittenPlace = tuple[SegmentWriter | WrittenSegment, int]


class Entry(NamedTuple):
    """A trace of a pending source: what resolves its key again on a newer generation.

    Attributes
    ----------
    record : TraceRecord or Key
    given : TraceValues
        Its scores and group.
    trace : PackedTrace or None
        Without its arrays; None if the store had them.
    segment, row : SegmentWriter, WrittenSegment or None, int
        The pending row with its arrays.
    """

    record: TraceRecord | Key
    given: TraceValues
    trace: PackedTrace | None = None
    segment: SegmentWriter | WrittenSegment | None = None
    row: int = -1

    @classmethod
    def of(cls, trace: PackedTrace) -> "Entry":
        """Return the entry of a trace in a row of a segment, with its own scores and group."""
        given = TraceValues(trace.record.scores, group=trace.record.group)
        return cls(trace.record, given, trace, trace.segment, trace.row)


@dataclass
class PendingSource:
    """A source that the next commit records.

    Attributes
    ----------
    path : str
    size : int
    fingerprint : str
    stated : Provenance or None
    is_numbered : bool
        A program gave the trace: the path is the number of the trace in the store.
    provenance : int
        Position of `stated` in the attribute provenance.
    num_traces, num_skipped : int
        Rows that it gave, and traces whose key another source has added.
    entries : list of Entry or TraceBlock
        What repeats it on a newer generation.
    """

    path: str
    size: int
    fingerprint: str
    stated: Provenance | None = None
    is_numbered: bool = False
    provenance: int = -1
    num_traces: int = 0
    num_skipped: int = 0
    entries: list[Entry | TraceBlock] = field(default_factory=list)


class PendingLens:
    """A final norm and an unembedding matrix, written into a segment in a temporary folder.

    Parameters
    ----------
    folder : Path
        The folder, which does not exist.
    attributes : schema.Attributes
        Those of the store.
    arrays : LensArrays
        In the form in which they are stored.
    """

    def __init__(self, folder: Path, attributes: schema.Attributes, arrays: LensArrays) -> None:
        self._field = LensField(-1, arrays.shape[0], arrays.dtype, arrays.norm, arrays.eps, None)
        self.segment = SegmentWriter(folder, -1, replace(attributes, lens=self._field))
        digest = arrays.new_digest()

        def blocks() -> Iterator[np.ndarray]:
            for block in arrays.blocks():
                digest.update(block.reshape(-1).view("u1"))
                yield block

        try:
            self.segment.write_lens(blocks(), arrays.small)
        except BaseException:
            self.remove()
            raise
        self.digest: bytes = digest.digest()

    def place(self, number: int, provenance: int) -> LensField:
        """Return the attribute of a store in which its segment has a number; `provenance` is -1 if it is unknown."""
        return replace(self._field, segment=number, provenance=None if provenance < 0 else provenance)

    def remove(self) -> None:
        """Remove the files."""
        self.segment.remove()


@dataclass
class Pending:
    """All changes of the next commit.

    `keys` maps a key (question id, sample) to its position in `rows`. `patches` maps (trace, field group) to
    new locations of committed traces, by the names of manifest.PATCH_COLUMNS. `updates` maps committed
    traces to new values of their columns; missing ones (NaN, None) keep the old value. `closed_sources` has the
    numbers of sources that are no longer open, `has_attributes` is true if a layout or a score is defined without traces.
    `steps` repeats all changes on a newer generation.
    """

    steps: list[Callable[[], None]] = field(default_factory=list)

    rows: PendingRows = field(default_factory=PendingRows)
    keys: dict[tuple[str, int], int] = field(default_factory=dict)
    patches: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    updates: dict[int, TraceValues] = field(default_factory=dict)
    sources: list[PendingSource] = field(default_factory=list)
    closed_sources: set[int] = field(default_factory=set)
    has_attributes: bool = False
    segments: list[SegmentWriter | WrittenSegment] = field(default_factory=list)
    lens: PendingLens | None = None
    lens_provenance: int = -1

    @property
    def all_segments(self) -> list[SegmentWriter | WrittenSegment]:
        """The segments with traces, and that of the lens."""
        return [*(s for s in self.segments if len(s)), *([self.lens.segment] if self.lens else [])]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to commit."""
        has_values = self.rows or self.patches or self.updates or self.sources or self.closed_sources
        return not (has_values or self.lens or self.has_attributes)

    @property
    def num_bytes(self) -> int:
        """Size of the segments in bytes."""
        return sum(s.num_bytes for s in self.segments) + (self.lens.segment.num_bytes if self.lens else 0)

    def has_score(self, name: str) -> bool:
        """Return whether a trace gets a value of a named score."""
        values = (given.scores.get(name, math.nan) for given in self.updates.values())
        return name in self.rows.to_columns().scores or not all(map(math.isnan, values))

    def discard(self) -> None:
        """Remove all files."""
        if self.lens is not None:
            self.lens.remove()
        self.remove_segments()

    def place(self, segment: SegmentWriter | WrittenSegment, first: int, new_folder: Callable[[], Path]) -> None:
        """Add a written segment unless it was added. `first` is the number of the first segment."""
        if segment not in self.segments:
            segment.number = first + len(self.segments)
            if isinstance(segment, WrittenSegment):
                segment.folder = new_folder()
            self.segments.append(segment)

    def savepoint(self) -> Callable[[], None]:
        """Return a function that reverts what was appended to the segments since this call."""
        count = len(self.segments)
        savepoint = self.segments[-1].savepoint() if count else None

        def roll_back() -> None:
            self.remove_segments(count)
            if savepoint is not None:
                self.segments[-1].rollback(savepoint)

        return roll_back

    def flush(self) -> None:
        """Write the buffered arrays of the last segment, whose memory can be released then."""
        for segment in self.segments[-1:]:
            segment.flush()

    def remove_segments(self, first: int = 0) -> None:
        """Remove the segments from `first` on, with their files."""
        for segment in self.segments[first:]:
            segment.close_fd()
        for segment in self.segments[first:]:
            segment.remove()
        del self.segments[first:]


def location_of(trace: PackedTrace, groups: Collection[int], segment: int, row: int, source: int) -> dict[str, int]:
    """Return the values of manifest.TRACE_COLUMNS of a trace whose field groups `groups` are in a row of a segment."""
    return {
        "graph_segment": segment if mf.GROUP_GRAPH in groups else -1,
        "graph_row": row,
        "sequence_segment": segment if mf.GROUP_SEQUENCE in groups else -1,
        "sequence_row": row,
        "num_tokens": trace.num_tokens,
        "layout": trace.layout,
        "nonfinite": int(trace.num_nonfinite > 0),
        "sample": trace.record.sample,
        "source": source,
        "source_position": trace.record.position,
    }


class SegmentsAhead:
    """Segments that a thread or a task writes before the keys of their traces are resolved.

    Parameters
    ----------
    options : Mapping
        Those of the store.
    new_folder : callable
        Return a folder for a segment, which does not exist.
    split_bytes : int
        Maximum size of a segment.
    """

    def __init__(self, options: Mapping[str, str], new_folder: Callable[[], Path], split_bytes: int) -> None:
        self._attributes = schema.Attributes(attention=options["attention"], options=dict(options))
        self._new_folder, self._split_bytes = new_folder, split_bytes
        self.pending = Pending()

    def append(self, trace: PackedTrace) -> None:
        """Append a trace to the last segment, or to a new one if that is full or of another shape."""
        segments = self.pending.segments
        last = segments[-1] if segments else None
        if isinstance(last, SegmentWriter):
            is_full = len(last) > 0 and last.num_bytes + trace.num_bytes > self._split_bytes
            with suppress(InvalidInputError):
                attributes = fit_attributes(last.attributes, trace)
                if not is_full:
                    last.append(trace, attributes)
                    trace.segment, trace.row = last, len(last) - 1
                    return
            last.close_fd()
        last = SegmentWriter(self._new_folder(), -1, self._attributes)
        segments.append(last)
        last.append(trace, fit_attributes(self._attributes, trace))
        trace.segment, trace.row = last, 0

    def discard(self) -> None:
        """Remove the segments that no writer has taken over."""
        for segment in self.pending.segments:
            if segment.number < 0:
                segment.remove()
