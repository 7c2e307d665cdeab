"""The open parts of a store that its traces and batches are read from."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format.entries import FileEntry, FilePart
from tracestore.store.format.labels import CORRECT, threshold_or_default
from tracestore.store.io.files import FilePrefetcher, LocalFiles, ReadableFiles, parse_location
from tracestore.store.lens import Lens
from tracestore.store.read.chunk_cache import ChunkCache
from tracestore.store.read.columns import Columns, MappedColumns
from tracestore.store.read.generation import PinnedGeneration, open_latest
from tracestore.store.read.segment import SegmentReader

# Files of which a larger share is read are fetched whole.
_WHOLE_SHARE = 0.5
_KEYS_AT_ONCE = 1 << 16


def open_files(path: str | os.PathLike[str]) -> ReadableFiles:
    """Return the files of a local or remote store; raise UsageError if there is no folder."""
    place = parse_location(path)
    if not isinstance(place, Path):
        # Imported here: most stores are local, and access to others is an extra.
        from tracestore.store.remote.remote_files import RemoteFiles

        return RemoteFiles.open(place)
    if not place.is_dir():
        raise UsageError(f"{place}: {'not a store' if place.exists() else 'no such store'}")
    return LocalFiles(place)


class StoreInternals:
    """One open generation: files, manifest, index, columns and the segments that were used.

    Each process maps the files for itself. Safe to use from threads.

    Attributes
    ----------
    files : ReadableFiles
    manifest : Manifest
    index : StoreIndex
    attributes : schema.Attributes
    num_layers : int
        L.
    num_stored_heads : int
        Attention values of one pair of tokens in one layer: H, or 1 for the head mean.
    chunk_cache : ChunkCache
        Decoded chunks of compressed arrays.
    score_name : str or None
        The named score that is used; None for a store without scores.
    score_direction : {"correct", "hallucination"}
        The answers that a high score marks.
    num_evictions : int
        Files that the cache of a remote store evicted since the store was opened.

    Raises
    ------
    UsageError
        If the store lacks the chosen score.
    """

    def __init__(
        self, files: ReadableFiles, cache_bytes: int, generation: PinnedGeneration, score: str | None = None
    ) -> None:
        self.files, self._generation = files, generation
        self.manifest, self.index = generation.manifest, generation.index
        self.attributes = self.manifest.attributes
        self.num_layers, self.num_stored_heads = self.attributes.num_layers or 0, self.attributes.num_stored_heads
        self.score_name = score or self.attributes.default_score
        if score is not None and score not in self.attributes.scores:
            generation.close()
            found = ", ".join(sorted(self.attributes.scores)) or "none"
            raise UsageError(f"{files.location}: found no score {score!r}; its scores are: {found}")
        field = self.attributes.scores.get(self.score_name or "")
        self.score_direction = CORRECT if field is None else field.direction
        self.chunk_cache = ChunkCache(cache_bytes)
        self._segments: dict[int, SegmentReader] = {}
        self._whole: frozenset[int] = frozenset()
        self.num_evictions = 0
        self._is_closed = False

    @classmethod
    def open(
        cls, files: ReadableFiles, cache_bytes: int, generation: int | None = None, score: str | None = None
    ) -> "StoreInternals":
        """Open the generation with this number if it still exists, else the newest one, with a chosen score."""
        return cls(files, cache_bytes, open_latest(files, generation), score)

    def reopen(self, cache_bytes: int) -> "StoreInternals":
        """Open the same generation again, with maps and a chunk cache of its own."""
        files = self.files.reopen()
        if files.keeps_generations:
            # The server may have replaced the generation: do not ask it.
            return StoreInternals(files, cache_bytes, self._generation, self.score_name)
        return StoreInternals.open(files, cache_bytes, self.manifest.generation, self.score_name)

    def close(self) -> None:
        """Release the maps and the pin. Arrays that were returned stay valid."""
        self._segments.clear()
        self._generation.close()
        self.files.close()
        self._is_closed = True

    @property
    def members(self) -> "tuple[StoreInternals, ...]":
        """The stores that are opened as one, in the order of their traces; here this one."""
        return (self,)

    @property
    def first_traces(self) -> list[int]:
        """The number of the first trace of each of `members`, and that of all traces."""
        return list(accumulate((member.manifest.num_traces for member in self.members), initial=0))

    def origin(self, index: int) -> tuple[str, int]:
        """Return the location of the store of a trace, and the index of the trace in it."""
        first = self.first_traces
        k = bisect_right(first, index) - 1
        return str(self.members[k].files.location), index - first[k]

    def store_of(self, index: int) -> tuple[str, ...]:
        """Return the location of the store of a trace where several are opened as one; nothing otherwise."""
        return (self.origin(index)[0],) if len(self.members) > 1 else ()

    def shared_keys(self) -> list[list[int]]:
        """Return the traces of each key (question id, sample) that several of `members` have."""
        found: dict[int, list[int]] = {}
        samples, count = self.index.read_column("sample"), self.manifest.num_traces
        for begin in range(self.first_traces[1], count, _KEYS_AT_ONCE):
            traces = np.arange(begin, min(begin + _KEYS_AT_ONCE, count))
            keys = zip(traces.tolist(), self.index.question_ids(traces), samples[traces].tolist(), strict=True)
            for trace, question_id, sample in keys:
                if (first := self.index.find(question_id, sample)) != trace:
                    found.setdefault(first, [first]).append(trace)
        return list(found.values())

    @property
    def mapped_columns(self) -> tuple[MappedColumns, ...]:
        """The columns groups of the generation."""
        return self._generation.mapped_columns

    @property
    def columns(self) -> Columns:
        """Scores, labels and groups, which are read on first use."""
        return self._generation.columns

    @property
    def scores(self) -> np.ndarray:
        """The score that is used (N,) float64, NaN where missing."""
        return self.columns.score(self.score_name)

    def score_threshold(self, chosen: float | None) -> float:
        """Return the score threshold, chosen or the default one; UsageError if that does not fit the scores."""
        return threshold_or_default(chosen, self.scores, self.columns.labels, str(self.files.location))

    def layer_number(self, layer: int) -> int:
        """Return a layer counted from the first; a negative one counts from the last. UsageError if there is none."""
        if not -self.num_layers <= layer < self.num_layers:
            raise UsageError(f"found layer {layer}, expected {-self.num_layers} to {self.num_layers - 1}")
        return layer % self.num_layers

    def segment(self, number: int) -> SegmentReader:
        """Return the reader of a segment.

        Raises
        ------
        UsageError
            If the store is closed.
        CorruptStoreError
            If the store has no such segment.
        """
        if self._is_closed:
            raise UsageError(f"{self.files.location}: the store is closed")
        self.close_evicted()
        segment = self._segments.get(number)
        if segment is None:
            if not 0 <= number < self.manifest.num_segments:
                raise CorruptStoreError(
                    f"{self.files.location}: the index names segment {number} of {self.manifest.num_segments}"
                )
            segment = self._segments[number] = self._open_segment(number)
        return segment

    def _open_segment(self, number: int) -> SegmentReader:
        entry, reads_layers = self.index.segment(number), number not in self._whole
        return SegmentReader(self.files, entry, self.attributes, self.chunk_cache, reads_layers)

    def prefetch(
        self,
        files_of: "Callable[[StoreInternals, np.ndarray], Iterable[FileEntry | FilePart]]",
        traces: Callable[[int], np.ndarray],
        start: int,
        total: int,
    ) -> list[FilePrefetcher]:
        """Return a prefetcher for the batches start .. total - 1 of each remote store.

        `traces` returns the traces of a batch, and `files_of` the files that some traces of a store are read from.
        """
        prefetchers = []
        for member, (begin, end) in zip(self.members, pairwise(self.first_traces), strict=True):

            def files(batch: int, member: StoreInternals = member, begin: int = begin, end: int = end) -> Any:
                found = traces(batch)
                return files_of(member, found[(begin <= found) & (found < end)] - begin)

            prefetchers.append(member.files.prefetch(files, start, total))
        return [prefetcher for prefetcher in prefetchers if prefetcher is not None]

    def announce(self, indices: np.ndarray | None, share: float, *, is_scattered: bool) -> None:
        """Record that a share of some traces, None for all, is read soon. What is read mostly is fetched whole.

        If neighbors are not read one after another (`is_scattered`), the cache must have room for all of these files.
        """
        needed, remote = 0.0, [member for member in self.members if member.files.has_ranges]
        for first, member in zip(self.first_traces, self.members, strict=False):
            if member in remote:
                count = member.manifest.num_traces
                chosen = np.arange(count) if indices is None else indices - first
                needed += member._choose_whole(chosen[(chosen >= 0) & (chosen < count)], share)
        for member in remote:
            if is_scattered and needed > (member.files.cache_bytes or 0):
                member._whole = frozenset()
            member._segments.clear()  # A segment that is opened again fetches what was chosen.
        if remote:
            self._segments.clear()

    def _choose_whole(self, chosen: np.ndarray, share: float) -> float:
        """Choose the segments whose files are fetched whole, and return about how many bytes these have."""
        locations = self.index.locations(np.arange(self.manifest.num_traces))
        segments, tokens = locations[:, 0] + 1, locations[:, 2]
        num_segments = self.manifest.num_segments + 1
        total, read = (np.bincount(segments[k], tokens[k], num_segments)[1:] for k in (slice(None), chosen))
        is_whole = share * read > _WHOLE_SHARE * total
        self._whole = frozenset(np.flatnonzero(is_whole).tolist())
        return self.manifest.num_bytes * float(total[is_whole].sum() / max(1.0, total.sum()))

    @property
    def lens(self) -> Lens | None:
        """Final norm and unembedding matrix; None for a store without them."""
        field = self.attributes.lens
        if field is None:
            return None
        number = field.segment
        # The segment is looked up again at each use, because its file may be evicted or the store closed.
        return self.segment(number).lens(lambda: self.segment(number).array("unembedding"))

    def close_evicted(self) -> None:
        """Unmap the files that the cache of a remote store evicted, so that the disk gets their space back."""
        for path in self.files.evicted():
            self.num_evictions += 1
            segment_path, _, inner = path.removeprefix("segments/").partition("/")
            for number, segment in list(self._segments.items()):
                if segment.name == f"segments/{segment_path}":
                    if inner == "rows.zip":
                        del self._segments[number]
                    else:
                        segment.close_array(inner.partition("/")[0])


class StorePin(NamedTuple):
    """State of a store that makes the indices of a TraceStore valid for another one."""

    location: str
    generation: int
    num_traces: int
    num_segments: int
    segments_crc32c: int

    @classmethod
    def of(cls, store: StoreInternals, num_segments: int | None = None) -> "StorePin":
        """Return the pin of a store, with the checksum of its first segments, by default of all."""
        segments, manifest = store.index.segments()[:num_segments], store.manifest
        sums = crc32c(np.array([segment.rows.crc32c for segment in segments], np.uint32))
        return cls(str(store.files.location), manifest.generation, manifest.num_traces, len(segments), sums)
