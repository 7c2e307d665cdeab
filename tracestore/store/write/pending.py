"""The changes that a writer has collected for its next commit."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import InvalidInputError
from tracestore.store.format import manifest as mf
from tracestore.store.format import schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.lens_attribute import LensField
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.files import ReadableFiles, reading_committed
from tracestore.store.lens import LensArrays
from tracestore.store.read.columns import TraceValues
from tracestore.store.read.index import SegmentEntry
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.pack import PackedTrace, fit_attributes
from tracestore.store.write.record import TraceRecord, read_record
from tracestore.store.write.segment_writer import SegmentWriter


@dataclass
class PendingRow:
    """A new row of the index; `values` has the keys of manifest.TRACE_COLUMNS, `given` goes to the columns."""

    question_id: str
    values: dict[str, int]
    given: TraceValues


class Key(NamedTuple):
    """The key of a trace, its position in its source, and the label that the source gives, None for none."""

    question_id: str
    sample: int
    position: int
    label: float | None


class WrittenSegment:
    """A segment that another process has given its name; for the rest see SegmentWriter.

    Parameters
    ----------
    files : ReadableFiles
        Those of the store that has it: the one that is written or replaced.
    name : str
    num_traces : int
    rows : FileEntry
        Its rows.zip.
    attributes : schema.Attributes
        Those that its arrays must have.

    Raises
    ------
    CorruptStoreError
        If its name is not that of its rows, or the metadata of its arrays do not fit the attributes.
    """

    def __init__(
        self, files: ReadableFiles, name: str, num_traces: int, rows: FileEntry, attributes: schema.Attributes
    ) -> None:
        self.source, self.name, self.rows, self.number, self.folder = files, name, rows, -1, Path()
        with reading_committed(rows.path):
            data = files.read(rows)
            if crc32c(data) != rows.crc32c or hashlib.blake2b(data, digest_size=16).hexdigest() != name:
                raise ValueError("not the rows that its name and checksum say")
        self.reader = SegmentReader(files, SegmentEntry(num_traces, rows), attributes)
        self.files = [(e.path.removeprefix(f"{self.reader.name}/"), e.size, e.crc32c) for e in self.entries]
        self.num_bytes = sum(size for _, size, _ in self.files)
        self.num_tokens = int(self.reader.values("num_tokens").sum(dtype=np.int64))
        names = {name for name in schema.LARGE_ARRAYS if self.reader.has(name)}
        self.field_names = names & {*schema.STORED_FIELDS} | ({"edges"} if "edge_index" in names else set())
        files.fetch(self.reader.entries[f"{self.reader.name}/{array}/zarr.json"] for array in names)
        for array in names:
            self.reader.check_metadata(array)

    @property
    def entries(self) -> list[FileEntry]:
        """All files, rows.zip last."""
        return [*self.reader.entries.values(), self.rows]

    def __len__(self) -> int:
        return self.reader.num_rows

    def packed(self, row: int) -> PackedTrace:
        """Return a row with its texts and checksums, without its arrays."""
        reader = self.reader
        trace = PackedTrace(read_record(reader, row), 0, 0, 0, "", extras=reader.string("extras", row))
        trace.graph_crc, trace.sequence_crc = (reader.scalar(f"{n}_crc32c", row) for n in mf.GROUP_NAMES)
        return trace

    def finish(self) -> None:
        """Do nothing: it is complete."""

    flush = close_fd = remove = finish  # remove: another commit may name it.

    def savepoint(self) -> None:
        """Return what rollback() needs: nothing."""

    def rollback(self, savepoint: Any) -> None:
        """Do nothing."""


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
        Rows that it gave, and traces that the store had.
    entries : list of Entry
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
    entries: list[Entry] = field(default_factory=list)


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
    traces to new values of their columns; missing ones (NaN, None) keep the old value. `closed_sources` has the paths
    of sources that are no longer open. `steps` repeats all changes on a newer generation.
    """

    steps: list[Callable[[], None]] = field(default_factory=list)

    rows: list[PendingRow] = field(default_factory=list)
    keys: dict[tuple[str, int], int] = field(default_factory=dict)
    patches: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    updates: dict[int, TraceValues] = field(default_factory=dict)
    sources: list[PendingSource] = field(default_factory=list)
    closed_sources: set[str] = field(default_factory=set)
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
        return not (self.rows or self.patches or self.updates or self.sources or self.lens or self.closed_sources)

    @property
    def num_bytes(self) -> int:
        """Size of the segments in bytes."""
        return sum(s.num_bytes for s in self.segments) + (self.lens.segment.num_bytes if self.lens else 0)

    def discard(self) -> None:
        """Remove all files."""
        if self.lens is not None:
            self.lens.remove()
        self.remove_segments()

    def place(self, trace: PackedTrace, first: int, new_folder: Callable[[], Path]) -> WrittenPlace:
        """Return the segment and row of a written trace. `first` is the number of the first segment."""
        segment: SegmentWriter | WrittenSegment = trace.segment
        if segment not in self.segments:
            segment.number = first + len(self.segments)
            if isinstance(segment, WrittenSegment):
                segment.folder = new_folder()
            self.segments.append(segment)
        return segment, trace.row

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
