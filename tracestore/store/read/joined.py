"""Several stores that are read as one: their traces follow each other, in the order of the stores."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from tracestore._core.index import LocationTable
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import schema
from tracestore.store.format.entries import FileEntry, FilePart
from tracestore.store.format.labels import ScoreField
from tracestore.store.format.provenance import require_compatible
from tracestore.store.io.files import FilePrefetcher, Locations, ReadableFiles, is_same_location
from tracestore.store.read.generation import PinnedGeneration
from tracestore.store.read.index import SegmentEntry, SourceEntry, StoreIndex, TraceRow
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.segment import SegmentReader

T = TypeVar("T")

# Sizes that two stores must share where both know them.
_SIZES = ("num_layers", "hidden_dim", "num_heads", "hidden_dtype", "attention_dtype")


def require_same_options(stores: Sequence[StoreInternals]) -> None:
    """Raise UsageError unless the stores were made with the same form of attention and the same dtypes."""
    first = stores[0]
    for store in stores[1:]:
        for name in ("attention", "dtype"):
            found, expected = store.attributes.options[name], first.attributes.options[name]
            if found != expected:
                raise UsageError(
                    f"{store.files.location} was made with --{name} {found}, {first.files.location} with {expected}"
                )


def joined_score_fields(stores: Sequence[StoreInternals]) -> dict[str, ScoreField]:
    """Return the named scores of all stores, the default score of the first one first.

    UsageError if a name has two directions.
    """
    found: dict[str, ScoreField] = {}
    for store in stores:
        attributes = store.attributes
        for name in sorted(attributes.scores, key=lambda name: (name != attributes.default_score, name)):
            field = attributes.scores[name]
            if found.setdefault(name, field).direction != field.direction:
                raise UsageError(
                    f"{store.files.location}: a high score {name} marks {field.direction} answers, in the stores before "
                    f"{found[name].direction} ones; store one of them under another name (tracestore score --name)"
                )
    return found


def _joined_attributes(stores: Sequence[StoreInternals], allow_mixed_provenance: bool) -> schema.Attributes:
    """Return the attributes of all stores; UsageError unless `merge` would accept them, in this order."""
    require_same_options(stores)
    joined, first = stores[0].attributes, stores[0].files.location
    known = list(joined.provenance)
    for store in stores[1:]:
        where, added = store.files.location, store.attributes
        for name in _SIZES:
            found, expected = getattr(added, name), getattr(joined, name)
            if None not in (found, expected) and found != expected:
                raise UsageError(f"{where}: {name}: found {found}, expected {expected} as in {first}")
        layouts = {joined.attention_layout, added.attention_layout} - {None}
        if len(layouts) == 2 and "edges" in layouts:
            raise UsageError(f"{where}: {added.attention_layout} attention, expected {joined.attention_layout}")
        values = {name: getattr(joined, name) or getattr(added, name) for name in _SIZES}
        values["attention_layout"] = "square" if "square" in layouts else next(iter(layouts), None)
        joined = replace(joined, **values)
        for provenance in () if allow_mixed_provenance else added.provenance:
            require_compatible(known, [provenance], str(where))
        known += added.provenance
        for provenance in added.provenance:
            joined, _ = joined.with_provenance(provenance)
    codec = next((c for s in stores if (c := s.attributes.options["codec"]) != "none"), "none")
    scores = joined_score_fields(stores)
    options = joined.options | {"codec": codec}
    joined = replace(joined, options=options, scores=scores, default_score=next(iter(scores), None), layouts=())
    return replace(joined, lens=_joined_lens(stores, joined))


def _joined_lens(stores: Sequence[StoreInternals], joined: schema.Attributes) -> Any:
    """Return the lens of the stores that have one, as an attribute of all; None if their bytes differ."""
    found = []
    for store, first in zip(stores, _firsts(store.manifest.num_segments for store in stores), strict=False):
        if (lens := store.attributes.lens) is not None:
            rows = store.index.segment(lens.segment).rows
            provenance = None if lens.provenance is None else store.attributes.provenance[lens.provenance]
            number = None if provenance is None else joined.provenance.index(provenance)
            # Its checksum is one of the matrix too: rows.zip lists the checksums of the other files.
            found.append((rows.crc32c, replace(lens, segment=lens.segment + first, provenance=number)))
    same = {(crc, replace(lens, segment=0, provenance=None)) for crc, lens in found}
    return found[0][1] if len(same) == 1 else None


def _firsts(counts: Iterable[int]) -> list[int]:
    """Return the sum of the counts before each one, and that of all."""
    return list(accumulate(counts, initial=0))


def _joined_manifest(stores: Sequence[StoreInternals], attributes: schema.Attributes) -> mf.Manifest:
    """Return a manifest of the files of all stores, numbered one after another. Its generation is 0."""
    manifests = [store.manifest for store in stores]
    parts, columns, counts = [], [], dict.fromkeys(("trace", "segment", "source"), 0)
    for manifest in manifests:
        moved = {f"first_{kind}": count for kind, count in counts.items()}
        for part in manifest.parts:
            parts.append(replace(part, **{name: getattr(part, name) + by for name, by in moved.items()}))
        columns += [replace(c, first_trace=c.first_trace + counts["trace"]) for c in manifest.columns]
        for kind in counts:
            counts[kind] += getattr(manifest, f"num_{kind}s")
    sums = {
        f.name: sum(getattr(m, f.name) for m in manifests) for f in fields(mf.Manifest) if f.name.startswith("num_")
    }
    default = attributes.default_score
    sums["num_scored"] = sum(
        s.manifest.num_scored if s.attributes.default_score == default else s.columns.num_scored(default)
        for s in stores
    )
    stored = tuple(sorted({name for manifest in manifests for name in manifest.fields}))
    return mf.Manifest(0, attributes, tuple(parts), tuple(columns), fields=stored, **sums)


class JoinedIndex(StoreIndex):
    """The indexes of several stores, with their traces, segments and sources numbered one after another."""

    def __init__(self, manifest: mf.Manifest, indexes: Sequence[StoreIndex]) -> None:
        self.manifest, self._indexes, self._columns = manifest, indexes, {}
        self.name = " + ".join(index.name for index in indexes)
        manifests = [index.manifest for index in indexes]
        self._traces, self._segments, self._sources_before = (
            _firsts(getattr(m, f"num_{kind}s") for m in manifests) for kind in ("trace", "segment", "source")
        )
        parts = []
        for trace, segment, index in zip(self._traces, self._segments, indexes, strict=False):
            of_store = trace, segment, index.manifest.num_segments, index.manifest.attributes.allowed_layouts
            parts += [(trace + first, arrays, mapped, *of_store) for first, arrays, mapped in index.location_parts()]
        self._places = LocationTable(parts, manifest.num_segments, manifest.attributes.allowed_layouts)

    def locations(self, indices: np.ndarray) -> np.ndarray:
        """See StoreIndex."""
        return self._naming_store(StoreIndex.locations, indices)

    def question_ids(self, indices: np.ndarray) -> list[str]:
        """See StoreIndex."""
        return self._naming_store(StoreIndex.question_ids, indices)

    def _naming_store(self, look_up: Callable[[StoreIndex, np.ndarray], T], indices: np.ndarray) -> T:
        """Look some traces up. CorruptStoreError names the store whose index is damaged."""
        try:
            return look_up(self, indices)
        except CorruptStoreError:
            for first, index in zip(self._traces, self._indexes, strict=False):
                own = indices - first
                look_up(index, own[(own >= 0) & (own < len(index))])
            raise

    def find(self, question_id: str, sample: int = 0) -> int:
        """See StoreIndex. The first store that has the key wins."""
        for first, index in zip(self._traces, self._indexes, strict=False):
            if (found := index.find(question_id, sample)) >= 0:
                return first + found
        return -1

    def row(self, index: int) -> TraceRow:
        """See StoreIndex."""
        k = bisect_right(self._traces, index) - 1
        row, first = self._indexes[k].row(index - self._traces[k]), self._segments[k]
        return replace(
            row,
            graph_segment=row.graph_segment + (first if row.graph_segment >= 0 else 0),
            sequence_segment=row.sequence_segment + (first if row.sequence_segment >= 0 else 0),
            source=row.source + self._sources_before[k],
        )

    def read_column(self, name: str) -> np.ndarray:
        """See StoreIndex."""
        if name not in self._columns:
            columns = [index.read_column(name) for index in self._indexes]
            if name in ("graph_segment", "sequence_segment", "source"):
                firsts = self._sources_before if name == "source" else self._segments
                columns = [np.where(c < 0, c, c + first) for c, first in zip(columns, firsts, strict=False)]
            self._columns[name] = np.concatenate(columns).astype(mf.TRACE_COLUMNS[name])
            self._columns[name].flags.writeable = False
        return self._columns[name]

    def segments(self) -> list[SegmentEntry]:
        """See StoreIndex."""
        return [entry for index in self._indexes for entry in index.segments()]

    def segment(self, number: int) -> SegmentEntry:
        """See StoreIndex."""
        k = bisect_right(self._segments, number) - 1
        return self._indexes[k].segment(number - self._segments[k])

    def source(self, number: int) -> SourceEntry:
        """See StoreIndex."""
        k = bisect_right(self._sources_before, number) - 1
        return self._indexes[k].source(number - self._sources_before[k])

    def sources(self, first: int = 0) -> Iterator[SourceEntry]:
        """See StoreIndex."""
        for begin, index in zip(self._sources_before, self._indexes, strict=False):
            yield from index.sources(max(0, first - begin))


class _JoinedFiles(ReadableFiles):
    """Names the stores. Nothing is read through it: each store has files of its own."""

    def __init__(self, location: Locations) -> None:
        self.location = location


class _JoinedPrefetcher(FilePrefetcher):
    """Prefetches the files of each store."""

    def __init__(self, prefetchers: Sequence[FilePrefetcher]) -> None:
        self._prefetchers, self._stack = prefetchers, ExitStack()

    def __enter__(self) -> "_JoinedPrefetcher":
        for prefetcher in self._prefetchers:
            self._stack.enter_context(prefetcher)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def advance(self, batch: int) -> None:
        """See FilePrefetcher."""
        for prefetcher in self._prefetchers:
            prefetcher.advance(batch)


class JoinedInternals(StoreInternals):
    """The internals of several stores as those of one, for reading.

    Raises
    ------
    UsageError
        If `merge` would refuse one of the stores, a store is given twice, or none of them has the chosen score.
    """

    def __init__(
        self,
        members: Sequence[StoreInternals],
        cache_bytes: int,
        score: str | None = None,
        *,
        allow_mixed_provenance: bool = False,
    ) -> None:
        location = Locations(member.files.location for member in members)  # type: ignore[misc]
        for k, one in enumerate(location):
            if any(is_same_location(one, other) for other in location[:k]):
                raise UsageError(f"{one}: is given twice")
        manifest = _joined_manifest(members, _joined_attributes(members, allow_mixed_provenance))
        index = JoinedIndex(manifest, [member.index for member in members])
        columns = tuple(mapped for member in members for mapped in member.mapped_columns)
        files = _JoinedFiles(location)  # type: ignore[abstract]
        super().__init__(files, cache_bytes, PinnedGeneration(manifest, index, columns, None), score)
        self._members = tuple(members)
        # Files of local stores are never evicted.
        self._evicting = [member for member in members if member.files.keeps_generations]
        self._first_segment = _firsts(member.manifest.num_segments for member in members)
        for member in members:
            member.chunk_cache = self.chunk_cache

    @property
    def members(self) -> tuple[StoreInternals, ...]:
        """See StoreInternals."""
        return self._members

    def reopen(self, cache_bytes: int) -> StoreInternals:
        """See StoreInternals."""
        members = [member.reopen(cache_bytes) for member in self._members]
        return JoinedInternals(members, cache_bytes, self.score_name, allow_mixed_provenance=True)

    def close(self) -> None:
        """See StoreInternals."""
        super().close()
        for member in self._members:
            member.close()

    def _open_segment(self, number: int) -> SegmentReader:
        k = bisect_right(self._first_segment, number) - 1
        return self._members[k].segment(number - self._first_segment[k])

    def close_evicted(self) -> None:
        """See StoreInternals."""
        for member in self._evicting:
            before = member.num_evictions
            member.close_evicted()
            if member.num_evictions > before:
                self.num_evictions += member.num_evictions - before
                self._segments.clear()

    def prefetch(
        self,
        files_of: Callable[[StoreInternals, np.ndarray], Iterable[FileEntry | FilePart]],
        traces: Callable[[int], np.ndarray],
        start: int,
        total: int,
    ) -> FilePrefetcher:
        """See StoreInternals."""

        def of(begin: int, end: int) -> Callable[[int], np.ndarray]:
            def own(batch: int) -> np.ndarray:
                found = traces(batch)
                return found[(begin <= found) & (found < end)] - begin

            return own

        ranges = pairwise(self.first_traces)
        return _JoinedPrefetcher(
            [m.prefetch(files_of, of(*bounds), start, total) for m, bounds in zip(self._members, ranges, strict=True)]
        )
