"""The index of one generation: from a key to a trace, and from a trace to its arrays."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from tracestore._core.index import LocationTable
from tracestore.errors import CorruptStoreError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.provenance import Provenance
from tracestore.store.format.ragged import checked_indices
from tracestore.store.format.zip_group import ZipGroup
from tracestore.store.io.files import StoreFiles, reading_committed

T = TypeVar("T")


def grouped(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each value of integers (n,), ascending, with the positions that have it, int64, ascending."""
    order = np.argsort(values, kind="stable")
    found, begins = np.unique(values[order], return_index=True)
    return zip(found.tolist(), np.split(order, begins[1:]), strict=False)  # no values are split into one part


class TraceRow(NamedTuple):
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


class SourceEntry(NamedTuple):
    """A committed input file: its path below SRC, size, digest of samples of its bytes, and provenance if known."""

    path: str
    size: int
    fingerprint: str
    num_traces: int
    num_skipped: int
    provenance: Provenance | None


class SegmentEntry(NamedTuple):
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


# Smallest values of index columns (default 0), and largest values that the counts of the store do not bound.
_LEAST = dict.fromkeys(("graph_segment", "sequence_segment"), -1)
_MOST = {"layout": max(schema.LAYOUT_NAMES), "nonfinite": 1}


class _Origin(NamedTuple):
    """The store of an index part, and the numbers of its first trace, segment and source among all stores."""

    manifest: mf.Manifest
    name: str
    first_trace: int = 0
    first_segment: int = 0
    first_source: int = 0

    def renumbered(self, column: str, values: np.ndarray) -> np.ndarray:
        """Return values of one of manifest.TRACE_COLUMNS as numbers among all stores. ValueError out of bounds."""
        kind = column.removeprefix("graph_").removeprefix("sequence_")
        counts = {"segment": self.manifest.num_segments, "source": self.manifest.num_sources}
        least, most = _LEAST.get(column, 0), counts[kind] - 1 if kind in counts else _MOST.get(column)
        if len(values) and (values.min() < least or (most is not None and values.max() > most)):
            raise ValueError(f"{column}: values from {values.min()} to {values.max()}, expected {least} to {most}")
        first = {"segment": self.first_segment, "source": self.first_source}.get(kind, 0)
        return np.where(values < 0, values, values + first).astype(values.dtype) if first else values


class _Part(NamedTuple):
    """A mapped index part."""

    group: ZipGroup
    origin: _Origin
    checked: Callable[[], AbstractContextManager[None]]  # turns the errors of a damaged part into CorruptStoreError


def _open_part(files: StoreFiles, ref: mf.PartRef, origin: _Origin) -> _Part:
    checked = partial(reading_committed, ref.path, prefix=files.prefix)
    with checked():
        group = ZipGroup(files.map(ref), mf.PART_DTYPES)
        mf.check_part(ref, {name: len(array) for name, array in group.views().items()})
    return _Part(group, origin, checked)


class StoreIndex:
    """The mapped index parts of a manifest, or of several stores. It creates no Python object for a trace.

    Attributes
    ----------
    name : str
        The files, for errors.
    """

    def __init__(self, files: StoreFiles, manifest: mf.Manifest) -> None:
        self.name = f"{files.prefix}index/" + ",".join(p.path.removeprefix("index/") for p in manifest.parts)
        origin = _Origin(manifest, self.name)
        self._set_parts(manifest, [origin], [_open_part(files, ref, origin) for ref in manifest.parts])

    @classmethod
    def joined(cls, manifest: mf.Manifest, indexes: "Sequence[StoreIndex]") -> "StoreIndex":
        """Return the indexes of several stores as one.

        Their traces, segments and sources are numbered one after another, as in `manifest`. The first store that has
        a key wins.
        """
        joined, parts = cls.__new__(cls), list[_Part]()
        origins, firsts = list[_Origin](), [0, 0, 0]
        for index in indexes:
            origins.append(_Origin(index.manifest, index.name, *firsts))
            parts += [part._replace(origin=origins[-1]) for part in index._parts]
            counts = index.manifest.num_traces, index.manifest.num_segments, index.manifest.num_sources
            firsts = [first + count for first, count in zip(firsts, counts, strict=True)]
        joined.name = " + ".join(index.name for index in indexes)
        joined._set_parts(manifest, origins, parts)
        return joined

    def _set_parts(self, manifest: mf.Manifest, origins: list[_Origin], parts: list[_Part]) -> None:
        self.manifest, self._origins, self._parts = manifest, origins, parts
        self._columns: dict[str, np.ndarray] = {}
        self._first_trace = [p.first_trace for p in manifest.parts]
        self._first_segment = [p.first_segment for p in manifest.parts]
        self._first_source = [p.first_source for p in manifest.parts]
        try:
            self._places = LocationTable(self.location_parts())
        except (ValueError, KeyError) as error:
            raise CorruptStoreError(f"{paths.manifest(manifest.generation)}: the index: {error}") from None

    def __len__(self) -> int:
        return self.manifest.num_traces

    def location_parts(self) -> list[tuple[Any, ...]]:
        """Return the parts as LocationTable takes them."""
        found = []
        for first, part in zip(self._first_trace, self._parts, strict=True):
            origin, of_store = part.origin, part.origin.manifest
            numbers = origin.first_trace, origin.first_segment, of_store.num_segments
            found.append((first, part.group.views(), part.group.mapped, *numbers, of_store.attributes.allowed_layouts))
        return found

    def part_arrays(self, number: int) -> dict[str, np.ndarray]:
        """Read all arrays of a part."""
        group = self._parts[number].group
        return {name: group.read(name) for name in mf.PART_DTYPES}

    def find(self, question_id: str, sample: int = 0) -> int:
        """Return the store index of a key, or -1."""
        encoded = question_id.encode("utf-8", "surrogatepass")
        try:
            return self._places.find(encoded, sample)
        except ValueError as error:
            text, number = error.args
            with self._parts[number].checked():
                raise ValueError(text) from None
            raise

    def has_any(self, keys: Sequence[tuple[str, int]]) -> bool:
        """Return whether the store has one of some keys."""
        return any(self.find(*key) >= 0 for key in keys)

    def _look_up(self, look_up: Callable[[np.ndarray], T], indices: np.ndarray) -> T:
        """Look some traces up. CorruptStoreError names the index that is damaged."""
        indices = checked_indices(indices)
        try:
            return look_up(indices)
        except ValueError:
            for origin in self._origins:
                own = indices - origin.first_trace
                with reading_committed(origin.name):
                    look_up(indices[(own >= 0) & (own < origin.manifest.num_traces)])
            raise CorruptStoreError(f"{self.name}: a trace beyond the index") from None

    def locations(self, indices: np.ndarray) -> np.ndarray:
        """Return the locations of some traces, (n, 6) int64; LocationTable.look_up names the columns."""
        return self._look_up(self._locations, indices)

    def _locations(self, indices: np.ndarray) -> np.ndarray:
        out = np.empty((len(indices), 6), np.int64)
        self._places.look_up(indices, out)
        return out

    def row(self, index: int) -> TraceRow:
        """Return the locations of trace `index` (0 <= index < N), with the patches of later parts applied."""
        graph, graph_row, num_tokens, layout, sequence, sequence_row = self.locations(np.array([index]))[0].tolist()
        number = bisect_right(self._first_trace, index) - 1
        part, k = self._parts[number], index - self._first_trace[number]
        try:
            sample, source, position = (
                int(part.group.read(name, k, k + 1)[0]) for name in ("sample", "source", "source_position")
            )
            if not 0 <= source < part.origin.manifest.num_sources:
                raise ValueError(f"source: found {source} of {part.origin.manifest.num_sources}")
        except ValueError:
            with part.checked():
                raise
        source += part.origin.first_source
        nonfinite = int(self.read_column("nonfinite")[index])
        return TraceRow(
            graph, graph_row, sequence, sequence_row, num_tokens, layout, nonfinite, sample, source, position
        )

    def read_column(self, name: str) -> np.ndarray:
        """Return one of manifest.TRACE_COLUMNS for all traces, read-only, with patches applied."""
        values = self._columns.get(name)
        if values is None:
            values = self._load_column(name)
            values.flags.writeable = False
            self._columns[name] = values
        return values

    def _load_column(self, name: str) -> np.ndarray:
        pieces = []
        for part in self._parts:
            with part.checked():
                pieces.append(part.origin.renumbered(name, part.group.read(name)))
        patched = [part for part in self._parts if part.group.num_items("patch_trace")]
        if len(pieces) == 1 and not patched:
            return pieces[0]
        values = np.concatenate(pieces) if pieces else np.zeros(0, mf.TRACE_COLUMNS[name])
        group = mf.GROUP_SEQUENCE if name.startswith("sequence") else mf.GROUP_GRAPH
        column = "patch_" + name.removeprefix("graph_").removeprefix("sequence_")
        for part in patched:
            if column not in part.group:
                continue
            with part.checked():
                patch, target = part.group.read(column), part.group.read("patch_trace")
                if not 0 <= target.min() <= target.max() < part.origin.manifest.num_traces:
                    raise ValueError(f"patch_trace: values from {target.min()} to {target.max()}")
                if name != "nonfinite":
                    chosen = part.group.read("patch_group") == group
                    patch, target = patch[chosen], target[chosen]
                patch, target = part.origin.renumbered(name, patch), target + part.origin.first_trace
            values[target] = patch | (values[target] if name == "nonfinite" else 0)
        return values

    def question_ids(self, indices: np.ndarray) -> list[str]:
        """Return the question ids of some traces."""
        return self._look_up(self._places.question_ids, indices)

    def question_id(self, index: int) -> str:
        """Return the question id of one trace."""
        return self.question_ids(np.array([index]))[0]

    def segments(self) -> list[SegmentEntry]:
        """Return every segment, in order."""
        found: list[SegmentEntry] = []
        for part in self._parts:
            with part.checked():
                found += part_segments(part.group)
        return found

    def segment(self, number: int) -> SegmentEntry:
        """Return a segment by its number, its position in the order of the store."""
        k = bisect_right(self._first_segment, number) - 1
        # A commit with patches only adds a part that begins at the segment number of the next part.
        while k > 0 and self.manifest.parts[k].num_segments == 0:
            k -= 1
        begin = number - self._first_segment[k]
        with self._parts[k].checked():
            return part_segments(self._parts[k].group, begin, begin + 1)[0]

    def source(self, number: int) -> SourceEntry:
        """Return a committed source by its number."""
        k = bisect_right(self._first_source, number) - 1
        begin = number - self._first_source[k]
        return self._sources(k, begin, begin + 1)[0]

    def _sources(self, k: int, begin: int, end: int) -> list[SourceEntry]:
        """Return sources of a part; the open ones of its store without a fingerprint, as if they were unknown."""
        part = self._parts[k]
        attributes, group = part.origin.manifest.attributes, part.group
        known, first = attributes.provenance, self._first_source[k] - part.origin.first_source
        with part.checked():
            path, fingerprint = (group.strings(f"source_{name}", begin, end) for name in ("path", "fingerprint"))
            size, traces, skipped = (
                group.read(f"source_{name}", begin, end).tolist() for name in ("size", "traces", "skipped")
            )
            numbers = group.read("source_provenance", begin, end).tolist()
            for number in numbers:
                if not -1 <= number < len(known):
                    raise ValueError(f"source_provenance: found {number}, expected -1 to {len(known) - 1}")
        provenance = [None if number < 0 else known[number] for number in numbers]
        for first_open, end_open in attributes.open_sources:
            for number in range(max(begin, first_open - first), min(end, end_open - first)):
                fingerprint[number - begin] = ""
        return [
            SourceEntry(*source) for source in zip(path, size, fingerprint, traces, skipped, provenance, strict=True)
        ]

    def check_key_tables(self) -> None:
        """Raise CorruptStoreError unless the key table of each part has every row of the part exactly once."""
        for part in self._parts:
            with part.checked():
                rows = part.group.read("key_table")
                rows = np.sort(rows[rows > 0])
                if not np.array_equal(rows, np.arange(1, part.group.num_items("sample") + 1)):
                    raise ValueError("key_table: a row is missing or repeated")

    def fingerprints(self) -> Iterator[tuple[str, str]]:
        """Yield path and fingerprint of each source, also of the open ones."""
        for part in self._parts:
            with part.checked():
                count = part.group.num_items("source_size")
                yield from zip(
                    *(part.group.strings(f"source_{n}", 0, count) for n in ("path", "fingerprint")), strict=True
                )

    def sources(self, first: int = 0) -> Iterator[SourceEntry]:
        """Yield the committed sources from number `first` on."""
        for k, begin in enumerate(self._first_source):
            count = self._parts[k].group.num_items("source_size")
            yield from self._sources(k, min(count, max(0, first - begin)), count)


class QuestionIds(Sequence[str]):
    """The question ids of a store, decoded on access."""

    def __init__(self, index: StoreIndex) -> None:
        self._index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # they are pickled as a list

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, item: int) -> str: ...
    @overload
    def __getitem__(self, item: slice) -> list[str]: ...
    def __getitem__(self, item: int | slice) -> str | list[str]:
        if isinstance(item, slice):
            return [self._index.question_id(k) for k in range(*item.indices(len(self)))]
        return self._index.question_id(range(len(self))[item])

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
