"""The index of one generation: from a key to a trace, and from a trace to its arrays."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast, overload

import numpy as np

from tracestore._core.index import KeyTable, LocationTable, find_key
from tracestore.errors import CorruptStoreError, escape_unprintable
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.provenance import Provenance
from tracestore.store.format.zip_group import ZipGroup
from tracestore.store.io.files import StoreFiles, reading_committed


@dataclass(frozen=True)
class TraceRow:
    """The location of each part of one trace. A segment of -1 means that the trace lacks the part."""

    graph_segment: int
    graph_row: int
    sequence_segment: int
    sequence_row: int
    num_tokens: int
    layout: int
    nonfinite: int
    sample: int
    source: int
    source_position: int

    @property
    def primary_location(self) -> tuple[int, int]:
        """Segment and row of the texts of the trace."""
        if self.graph_segment >= 0:
            return self.graph_segment, self.graph_row
        return self.sequence_segment, self.sequence_row


@dataclass(frozen=True)
class SourceEntry:
    """A committed input file: its path below SRC, size, digest of samples of its bytes, and provenance if known."""

    path: str
    size: int
    fingerprint: str
    num_traces: int
    num_skipped: int
    provenance: Provenance | None


@dataclass(frozen=True)
class SegmentEntry:
    """A committed segment: its number of traces, and the file with its small arrays and its list of files."""

    num_traces: int
    rows: FileEntry

    @property
    def path(self) -> str:
        """Folder of the segment in the store."""
        return self.rows.path.rpartition("/")[0]


def part_segments(part: ZipGroup, begin: int = 0, end: int | None = None) -> list[SegmentEntry]:
    """Return some segments of an index part.

    Raises
    ------
    CorruptStoreError
        If a name is not one of the format.
    ValueError
        If the arrays of the part are inconsistent.
    """
    end = part.num_items("segment_size") if end is None else end
    traces, sizes, sums = (part.read(f"segment_{n}", begin, end).tolist() for n in ("traces", "size", "crc32c"))
    found = []
    for name, count, size, crc in zip(part.strings("segment_name", begin, end), traces, sizes, sums, strict=True):
        if count < 0:
            raise ValueError(f"segment_traces: found {count}")
        found.append(SegmentEntry(count, FileEntry(paths.segment_rows(f"segments/{name}"), size, crc)))
    return found


Method = TypeVar("Method", bound=Callable[..., Any])


def _checked(method: Method) -> Method:
    """Turn a ValueError of a StoreIndex method, which a damaged part causes, into CorruptStoreError."""

    @wraps(method)
    def call(self: "StoreIndex", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except ValueError as error:
            raise CorruptStoreError(f"{self.name}: {escape_unprintable(str(error), 300)}") from None

    return cast(Method, call)


# Smallest values of index columns (default 0), and largest values that the counts of the store do not bound.
_LEAST = dict.fromkeys(("graph_segment", "sequence_segment"), -1)
_MOST = {"layout": max(schema.LAYOUT_NAMES), "nonfinite": 1}


class StoreIndex:
    """The mapped index parts of a manifest. It creates no Python object for a trace."""

    def __init__(self, files: StoreFiles, manifest: mf.Manifest) -> None:
        self.manifest = manifest
        self._parts: list[ZipGroup] = []
        self._columns: dict[str, np.ndarray] = {}
        self._keys: list[KeyTable] = []
        self._first_trace = [p.first_trace for p in manifest.parts]
        self._first_segment = [p.first_segment for p in manifest.parts]
        self._first_source = [p.first_source for p in manifest.parts]
        self.name = f"{files.prefix}index/" + ",".join(p.path.removeprefix("index/") for p in manifest.parts)
        for ref in manifest.parts:
            with reading_committed(ref.path, prefix=files.prefix):
                mapped = files.map(ref)
                part = ZipGroup(mapped, mf.PART_DTYPES)
                arrays = part.views()
                mf.check_part(ref, {name: len(array) for name, array in arrays.items()})
                keys = KeyTable(arrays["key_table"], arrays["id_offsets"], arrays["id"], arrays["sample"], mapped)
            self._parts.append(part)
            self._keys.append(keys)
        try:
            self._places = LocationTable(
                self.location_parts(), manifest.num_segments, manifest.attributes.allowed_layouts
            )
        except (ValueError, KeyError) as error:
            raise CorruptStoreError(f"{paths.manifest(manifest.generation)}: the index: {error}") from None

    def __len__(self) -> int:
        return self.manifest.num_traces

    def location_parts(self) -> list[tuple[Any, ...]]:
        """Return the parts as LocationTable takes them."""
        return [(first, part.views(), part.mapped) for first, part in zip(self._first_trace, self._parts, strict=True)]

    def part_arrays(self, number: int) -> dict[str, np.ndarray]:
        """Read all arrays of a part."""
        part = self._parts[number]
        return {name: part.read(name) for name in mf.PART_DTYPES}

    @_checked
    def find(self, question_id: str, sample: int = 0) -> int:
        """Return the store index of a key, or -1."""
        part, row = find_key(self._keys, question_id.encode("utf-8", "surrogatepass"), sample)
        return -1 if part < 0 else self._first_trace[part] + row

    @_checked
    def locations(self, indices: np.ndarray) -> np.ndarray:
        """Return the locations of some traces, (n, 6) int64; LocationTable.look_up names the columns."""
        out = np.empty((len(indices), 6), np.int64)
        self._places.look_up(np.ascontiguousarray(indices, np.int64), out)
        return out

    @_checked
    def row(self, index: int) -> TraceRow:
        """Return the locations of trace `index` (0 <= index < N), with the patches of later parts applied."""
        graph, graph_row, num_tokens, layout, sequence, sequence_row = self.locations(np.array([index]))[0].tolist()
        part = bisect_right(self._first_trace, index) - 1
        k = index - self._first_trace[part]
        sample, source, position = (
            int(self._parts[part].read(name, k, k + 1)[0]) for name in ("sample", "source", "source_position")
        )
        nonfinite = int(self.read_column("nonfinite")[index])
        return TraceRow(
            graph, graph_row, sequence, sequence_row, num_tokens, layout, nonfinite, sample, source, position
        )

    @_checked
    def read_column(self, name: str) -> np.ndarray:
        """Return one of manifest.TRACE_COLUMNS for all traces, read-only, with patches applied."""
        values = self._columns.get(name)
        if values is None:
            values = self._load_column(name)
            self._check_column(name, values)
            values.flags.writeable = False
            self._columns[name] = values
        return values

    def _check_column(self, name: str, values: np.ndarray) -> None:
        if len(values) == 0:
            return
        most = _MOST.get(name)
        if name.endswith("_segment"):
            most = self.manifest.num_segments - 1
        elif name == "source":
            most = self.manifest.num_sources - 1
        least = _LEAST.get(name, 0)
        if values.min() < least or (most is not None and values.max() > most):
            raise ValueError(f"{name}: values from {values.min()} to {values.max()}, expected {least} to {most}")

    def _load_column(self, name: str) -> np.ndarray:
        pieces = [part.read(name) for part in self._parts]
        patched = [part for part in self._parts if part.num_items("patch_trace")]
        if len(pieces) == 1 and not patched:
            return pieces[0]
        values = np.concatenate(pieces) if pieces else np.zeros(0, mf.TRACE_COLUMNS[name])
        group = mf.GROUP_SEQUENCE if name.startswith("sequence") else mf.GROUP_GRAPH
        column = "patch_" + name.removeprefix("graph_").removeprefix("sequence_")
        for part in patched:
            if column not in part:
                continue
            patch = part.read(column)
            chosen = part.read("patch_group") == group if name != "nonfinite" else np.ones(len(patch), bool)
            target = part.read("patch_trace")[chosen]
            if len(target) and not 0 <= target.min() <= target.max() < len(values):
                raise ValueError(f"patch_trace: values from {target.min()} to {target.max()}")
            values[target] = patch[chosen] | (values[target] if name == "nonfinite" else 0)
        return values

    @_checked
    def question_ids(self, indices: np.ndarray) -> list[str]:
        """Return the question ids of some traces."""
        return self._places.question_ids(np.ascontiguousarray(indices, np.int64))

    def question_id(self, index: int) -> str:
        """Return the question id of one trace."""
        return self.question_ids(np.array([index]))[0]

    @_checked
    def segments(self) -> list[SegmentEntry]:
        """Return every segment, in order."""
        return [entry for part in self._parts for entry in part_segments(part)]

    def _part_of_segment(self, segment: int) -> int:
        part = bisect_right(self._first_segment, segment) - 1
        # A commit with patches only adds a part that begins at the segment number of the next part.
        while part > 0 and self.manifest.parts[part].num_segments == 0:
            part -= 1
        return part

    @_checked
    def segment(self, number: int) -> SegmentEntry:
        """Return a segment by its number, its position in the order of the store."""
        part = self._part_of_segment(number)
        k = number - self._first_segment[part]
        return part_segments(self._parts[part], k, k + 1)[0]

    @_checked
    def source(self, number: int) -> SourceEntry:
        """Return a committed source by its number."""
        part = bisect_right(self._first_source, number) - 1
        k = number - self._first_source[part]
        return self._sources(self._parts[part], k, k + 1)[0]

    @_checked
    def _sources(self, part: ZipGroup, begin: int, end: int) -> list[SourceEntry]:
        path, fingerprint = (part.strings(f"source_{name}", begin, end) for name in ("path", "fingerprint"))
        size, traces, skipped = (part.read(f"source_{n}", begin, end).tolist() for n in ("size", "traces", "skipped"))
        known, numbers = self.manifest.attributes.provenance, part.read("source_provenance", begin, end).tolist()
        for number in numbers:
            if not -1 <= number < len(known):
                raise ValueError(f"source_provenance: found {number}, expected -1 to {len(known) - 1}")
        provenance = [None if number < 0 else known[number] for number in numbers]
        return [
            SourceEntry(*source) for source in zip(path, size, fingerprint, traces, skipped, provenance, strict=True)
        ]

    @_checked
    def check_key_tables(self) -> None:
        """Raise CorruptStoreError unless the key table of each part has every row of the part exactly once."""
        for part in self._parts:
            rows = part.read("key_table")
            rows = np.sort(rows[rows > 0])
            if not np.array_equal(rows, np.arange(1, part.num_items("sample") + 1)):
                raise ValueError("key_table: a row is missing or repeated")

    def sources(self, first: int = 0) -> Iterator[SourceEntry]:
        """Yield the committed sources from number `first` on."""
        for begin, part in zip(self._first_source, self._parts, strict=True):
            count = part.num_items("source_size")
            yield from self._sources(part, min(count, max(0, first - begin)), count)


class QuestionIds(Sequence[str]):
    """The question ids of a store, decoded on access."""

    def __init__(self, index: StoreIndex) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, item: int) -> str: ...
    @overload
    def __getitem__(self, item: slice) -> list[str]: ...
    def __getitem__(self, item: int | slice) -> str | list[str]:
        if isinstance(item, slice):
            return [self._index.question_id(k) for k in range(*item.indices(len(self)))]
        k = range(len(self))[item]
        return self._index.question_id(k)

    def take(self, indices: np.ndarray) -> list[str]:
        """Return the ids of some traces."""
        return self._index.question_ids(indices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} question ids>"
