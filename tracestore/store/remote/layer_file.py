"""Files of remote stores of which the disk cache has some layers only.

Such a file has the size of the committed file. Layers are fetched when they are needed and verified by their
checksums; the others are holes. In the place of the shard index, which is known from the metadata of the array, the
file has one byte per layer: 1 if the layer is there. A layer gets its byte after its data. Nothing is synced: the
last four bytes name the start of the machine, and the layers of a file from before it are verified again.
"""

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError
from tracestore.platform_support import boot_id
from tracestore.store.format.entries import FileEntry, Layers
from tracestore.store.io import fsio
from tracestore.store.remote.disk_cache import ATTEMPTS, LAYERS_SUFFIX, DiskCache, NextUse, locked_file
from tracestore.store.remote.object_store import ObjectStore

_HERE = 1
_STAMP_BYTES = 4


# Names the start of this machine, or of this process if that is unknown. It does not end with 0.
STAMP = (crc32c(boot_id() or os.urandom(16)) | 1 << 24).to_bytes(_STAMP_BYTES, "little")


class CachedFiles(Protocol):
    """The files of a remote store with their cache."""

    object_store: ObjectStore
    cache: DiskCache
    next_use: NextUse
    on_miss: Callable[[], None]  # called when a reader needs what the cache lacks


class LayerFile:
    """A mapped file with holes.

    Safe to use from threads and processes: a layer is fetched once. After the file was evicted, this object gives the
    layers that it had, and fetches no more.

    Parameters
    ----------
    files : CachedFiles
    entry : FileEntry
        The committed file.
    layers : Layers
        They end in bytes.
    data_bytes : int
        Size of the array with its padding. The index of the shard follows, with a byte for each layer at least.

    Attributes
    ----------
    mapped : MappedFile
    """

    def __init__(self, files: CachedFiles, entry: FileEntry, layers: Layers, data_bytes: int) -> None:
        self._files, self._cache, self._object_store, self._entry = files, files.cache, files.object_store, entry
        self._ends, self._crcs = array("q", layers.ends.astype("<i8").tobytes()), layers.crcs
        self._table = data_bytes
        self._seen = bytearray(len(layers.crcs))  # 1: the layer was here, and stays in this map
        self._path = self._cache.folder / (self._cache.name_of(self._object_store.address, entry) + LAYERS_SUFFIX)
        self._cache.folder.mkdir(parents=True, exist_ok=True)
        num_bytes = entry.size - self._table
        with fsio.map_os_errors(self._cache.folder, lambda: num_bytes):
            while True:
                try:
                    self._open()
                    return
                except OSError as error:
                    if not self._cache.frees_disk(error, num_bytes, files.next_use):
                        raise

    def _open(self) -> None:
        with locked_file(self._path, os.O_CREAT) as fd:
            self._prepare(fd)
            os.utime(fd)  # The access time orders the eviction.
            self.mapped = MappedFile(self._path, self._entry.size, self._entry.path, fd)
            self._inode = os.fstat(fd).st_ino

    def _prepare(self, fd: int) -> None:
        """Make a new file, or verify the layers of one from before the start of the machine."""
        size = self._entry.size
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, 0)
            make_holes(fd, size, self._table)
        elif os.pread(fd, _STAMP_BYTES, size - _STAMP_BYTES) == STAMP:
            return
        flags = os.pread(fd, len(self._crcs), self._table)
        for layer in (k for k, flag in enumerate(flags) if flag):
            begin, end = self._ends[layer], self._ends[layer + 1]
            if crc32c(os.pread(fd, end - begin, begin)) != self._crcs[layer]:
                os.pwrite(fd, b"\0", self._table + layer)
        os.pwrite(fd, STAMP, size - _STAMP_BYTES)

    def missing(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the runs of layers that ranges of bytes need and the file lacks, as first and last + 1."""
        missing = set[int]()
        for begin, end in ranges:
            first, last = bisect_right(self._ends, begin) - 1, bisect_left(self._ends, end)
            if begin < end and self._seen.find(b"\0", first, last) >= 0:
                flags = self.mapped.read(self._table + first, self._table + last)
                self._seen[first:last] = bytes(flag == _HERE for flag in flags)
                missing.update(first + k for k, flag in enumerate(flags) if flag != _HERE)
        runs: list[tuple[int, int]] = []
        for layer in sorted(missing):
            first = runs.pop()[0] if runs and runs[-1][1] == layer else layer
            runs.append((first, layer + 1))
        return runs

    def fetch(self, ranges: Sequence[tuple[int, int]], check: Callable[[], None] = lambda: None) -> bool:
        """Fetch the layers that ranges of bytes need, neighbors with one request.

        Returns
        -------
        bool
            False if the file was evicted, or the server gives no ranges: the file must be mapped again.

        Raises
        ------
        CorruptStoreError
            If a layer on the server is not the committed one, twice.
        """
        if not self.missing(ranges):
            return True
        if self._object_store.is_forked or not self._object_store.has_ranges:
            return False
        self._files.on_miss()
        attempts = num_bytes = 0
        with fsio.map_os_errors(self._cache.folder):
            try:
                with locked_file(self._path, 0, check) as fd:
                    while runs := self.missing(ranges):
                        num_bytes = sum(self._ends[last] - self._ends[first] for first, last in runs)
                        if os.fstat(fd).st_ino != self._inode:
                            return False
                        if attempts == ATTEMPTS:
                            where = f"{self._entry.path}: layer {runs[0][0]}"
                            raise CorruptStoreError(
                                f"{where}: checksum mismatch: damaged at {self._object_store.address}"
                            )
                        attempts += 1
                        self._cache.make_room(num_bytes, self._files.next_use, check)
                        if not all(self._fetch_run(fd, first, last, check) for first, last in runs):
                            return False
                    return True
            except FileNotFoundError:
                return False
            except OSError as error:
                if self._cache.frees_disk(error, num_bytes, self._files.next_use):
                    return False
                raise

    def _fetch_run(self, fd: int, first: int, last: int, check: Callable[[], None]) -> bool:
        """Fetch neighboring layers. Those that are not the committed ones stay missing. False without ranges."""
        layer, crc = first, 0

        def take(piece: Any, offset: int) -> None:
            nonlocal layer, crc
            check()
            view = memoryview(piece)
            fsio.pwritev_all(fd, [view], offset)
            flags = bytearray()
            while layer < last:
                part = view[: self._ends[layer + 1] - offset]
                crc = crc32c(part, crc)
                view, offset = view[len(part) :], offset + len(part)
                if offset < self._ends[layer + 1]:
                    break
                flags.append(_HERE if crc == self._crcs[layer] else 0)
                layer, crc = layer + 1, 0
            os.pwrite(fd, flags, self._table + layer - len(flags))

        begin, end = self._ends[first], self._ends[last]
        if begin == end:
            take(b"", begin)
            return True
        try:
            return self._object_store.stream_range(self._entry, begin, end, take)
        except FileNotFoundError:
            raise CorruptStoreError(f"{self._entry.path}: missing at {self._object_store.address}") from None


def make_holes(fd: int, size: int, data_bytes: int) -> None:
    """Give an empty file its size; the first `data_bytes` of it are holes. Tests put a pattern there."""
    os.ftruncate(fd, size)
