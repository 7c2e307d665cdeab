"""The open parts of a store that its traces and batches are read from."""

from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.io.files import ReadableFiles
from tracestore.store.read.chunk_cache import ChunkCache
from tracestore.store.read.generation import PinnedGeneration, open_latest
from tracestore.store.read.segment import SegmentReader


class StoreInternals:
    """One open generation: files, manifest, index, columns and the segments that were used.

    Each process maps the files for itself. Safe to use from threads.

    Attributes
    ----------
    files : ReadableFiles
    manifest : Manifest
    index : StoreIndex
    columns : Columns
    attributes : schema.Attributes
    chunk_cache : ChunkCache
        Decoded chunks of compressed arrays.
    """

    def __init__(self, files: ReadableFiles, cache_bytes: int, generation: PinnedGeneration) -> None:
        self.files, self._generation = files, generation
        self.manifest, self.index, self.columns = generation.manifest, generation.index, generation.columns
        self.attributes = self.manifest.attributes
        self.chunk_cache = ChunkCache(cache_bytes)
        self._segments: dict[int, SegmentReader] = {}
        self._array_files: dict[tuple[int, str], list[FileEntry]] = {}
        self._is_closed = False

    @classmethod
    def open(cls, files: ReadableFiles, cache_bytes: int, generation: int | None = None) -> "StoreInternals":
        """Open the generation with this number if it still exists, else the newest one."""
        return cls(files, cache_bytes, open_latest(files, generation))

    def reopen(self, cache_bytes: int) -> "StoreInternals":
        """Open the same generation again, with maps and a chunk cache of its own."""
        files = self.files.reopen()
        if files.keeps_generations:
            # The server may have replaced the generation: do not ask it.
            return StoreInternals(files, cache_bytes, self._generation)
        return StoreInternals.open(files, cache_bytes, self.manifest.generation)

    def close(self) -> None:
        """Release the maps and the pin. Arrays that were returned stay valid."""
        self._segments.clear()
        self._generation.close()
        self.files.close()
        self._is_closed = True

    @property
    def num_layers(self) -> int:
        """L."""
        return self.attributes.num_layers or 0

    @property
    def num_stored_heads(self) -> int:
        """Attention values of one pair of tokens in one layer: H, or 1 for the head mean."""
        return self.attributes.num_stored_heads

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
        for path in self.files.evicted():
            self._close_evicted(path)
        segment = self._segments.get(number)
        if segment is None:
            if not 0 <= number < self.manifest.num_segments:
                raise CorruptStoreError(
                    f"{self.files.location}: the index names segment {number} of {self.manifest.num_segments}"
                )
            entries = {f.path: f for f in self.index.segment_files(number)}
            segment = self._segments[number] = SegmentReader(
                self.files, number, entries, self.chunk_cache, self.attributes, self.index.segment_rows(number)
            )
        return segment

    def _close_evicted(self, path: str) -> None:
        """Unmap an evicted file, so that the disk gets its space back."""
        folder, number, array = path.split("/")[:3]
        segment = self._segments.get(int(number)) if folder == "segments" else None
        if segment is not None:
            segment.close_array(array)

    def array_files(self, segment: int, name: str) -> list[FileEntry]:
        """Return the files of one array of a segment."""
        found = self._array_files.get((segment, name))
        if found is None:
            prefix = f"{paths.segment(segment)}/{name}/"
            found = [f for f in self.index.segment_files(segment) if f.path.startswith(prefix)]
            self._array_files[segment, name] = found
        return found
