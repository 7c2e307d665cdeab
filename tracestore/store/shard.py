"""Zarr v3 arrays of one shard file each: streamed out, mapped in.

The shard's bytes are streamed here, because through zarr-python a shard is held in
memory twice.
"""

import contextlib
import errno
import json
import os
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.gather import Slab
from tracestore._core.kernels import crc32c, crc32c_combine
from tracestore._core.mapping import MappedFile
from tracestore.errors import StoreDamagedError
from tracestore.store.ahead import AheadFile, WrittenRows
from tracestore.store.files import FileEntry, StoreFiles
from tracestore.store.fsio import again, make_folders, naming, remove_tree, write_pieces

_BUFFER_BYTES = 1 << 20
_MAX_PIECES = 512  # that wait to be written


def _numcodec(name: str, itemsize: int) -> Any:
    """The numcodecs codec behind --codec NAME."""
    from numcodecs import Blosc, Zstd, blosc

    blosc.use_threads = False  # also makes the compressed bytes independent of the machine
    if name == "zstd":
        return Zstd(level=3)
    return Blosc(cname=name.removeprefix("blosc-"), clevel=5, shuffle=Blosc.SHUFFLE, blocksize=0, typesize=itemsize)


class ShardStream:
    """Appends rows to a shard file; `mark` and `rollback` take appended rows back.

    The file descriptor is opened when bytes are written and may be closed between
    traces (`suspend`), so that a source split over many segments needs few.
    """

    def __init__(self, path: Path, dtype: np.dtype, columns: tuple[int, ...], codec: str, chunk_bytes: int) -> None:
        self.path, self.dtype, self.columns, self.codec = path, dtype, columns, codec
        self.row_bytes = dtype.itemsize * int(np.prod(columns, dtype=np.int64))
        self.chunk_rows = max(1, chunk_bytes // max(1, self.row_bytes))
        self.num_bytes = 0
        self._buffer = bytearray()  # rows of a chunk to be coded
        self._pieces: list[memoryview] = []  # arrays to be written as they are
        self._waiting = 0
        self._written = 0
        self._crc = 0
        self._taken: AheadFile | None = None  # the file that became this one's
        self._coder = _numcodec(codec, dtype.itemsize) if codec != "none" else None
        self._chunks: list[tuple[int, int]] = []
        self._fd = -1
        self._finished = False

    @property
    def num_rows(self) -> int:
        return self.num_bytes // self.row_bytes

    def _open(self) -> int:
        if self._fd < 0:
            make_folders(self.path.parent)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._fd

    def _emit(self, pieces: list[memoryview]) -> None:
        with naming(self.path):
            write_pieces(self._open(), pieces, self._written)
        self._written += sum(map(len, pieces))

    def _emit_own(self, data: Any) -> None:
        """Bytes that no caller has the checksum of."""
        self._crc = crc32c(data, self._crc)
        self._emit([memoryview(data)])

    def _emit_chunk(self, data: Any) -> None:
        assert self._coder is not None
        encoded = memoryview(self._coder.encode(np.frombuffer(data, self.dtype))).cast("B")
        self._chunks.append((self._written, len(encoded)))
        self._emit_own(encoded)

    def append(self, arrays: Sequence[np.ndarray], crc: int | None = None) -> None:
        """Adds rows, of which `crc` is the crc32c where the caller has it. The arrays must
        not change before the next flush, mark or finish."""
        pieces = [a.reshape(-1).view("u1").data for a in arrays if a.size]
        num_bytes = sum(map(len, pieces))
        self.num_bytes += num_bytes
        if self._coder is None:
            if crc is None:
                for piece in pieces:
                    self._crc = crc32c(piece, self._crc)
            else:
                self._crc = crc32c_combine(self._crc, crc, num_bytes)
        for piece in pieces:
            if self._coder is None:
                self._pieces.append(piece)
                self._waiting += len(piece)
                if self._waiting >= _BUFFER_BYTES or len(self._pieces) >= _MAX_PIECES:
                    self.flush()
            else:
                self._buffer += piece
                if len(self._buffer) >= self.chunk_rows * self.row_bytes:
                    self.flush()

    def append_written(self, rows: WrittenRows, crc: int) -> None:
        """As append, of rows that lie in a file. It becomes this one's if it begins with the first rows of all;
        then nothing is to be written of it, as long as none of its rows is left out. From there
        on its rows move towards its beginning, never over rows that are still to come."""
        assert self._coder is None
        if not rows.nbytes:
            return
        self.flush()
        if self._written == rows.begin == 0 and not rows.file.is_taken:
            self.suspend()
            with contextlib.suppress(OSError):  # it may lie on another file system
                self._fd, self._taken = rows.file.take(self.path), rows.file
            rows.file.close_if_done()
        if self._taken is rows.file and self._written == rows.begin:
            self._crc = crc32c_combine(self._crc, crc, rows.nbytes)
            self._written += rows.nbytes
            self.num_bytes += rows.nbytes
            return
        found = 0
        for piece in rows.pieces():
            found = crc32c(piece, found)
            self.append([piece])
            self.flush()
        if found != crc:
            raise OSError(errno.EIO, "other bytes than were written", str(rows.file.path))

    def flush(self) -> None:
        """Writes what waits, but for a chunk that is not full yet where chunks are coded."""
        if self._coder is None:
            if self._pieces:
                self._emit(self._pieces)
                self._pieces, self._waiting = [], 0
            return
        chunk_bytes = self.chunk_rows * self.row_bytes
        whole = len(self._buffer) // chunk_bytes * chunk_bytes
        for begin in range(0, whole, chunk_bytes):
            self._emit_chunk(bytes(self._buffer[begin : begin + chunk_bytes]))
        del self._buffer[:whole]

    def mark(self) -> tuple[Any, ...]:
        self.flush()
        return self.num_bytes, self._written, self._crc, bytes(self._buffer), len(self._chunks)

    def rollback(self, mark: tuple[Any, ...]) -> None:
        self.num_bytes, written, self._crc, buffer, chunks = mark
        self._buffer = bytearray(buffer)
        self._pieces, self._waiting = [], 0
        del self._chunks[chunks:]
        # Also where the counters agree: a write that failed half-way has left bytes.
        self.suspend()
        self._written = written
        if written == 0:
            # Not cut: its writer may still be at work on a file that was taken over.
            remove_tree(self.path)
            self._taken = None
        elif self.path.exists():
            again(os.truncate, self.path, written)

    def suspend(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def finish(self) -> tuple[int, int]:
        """Pads the last inner chunk, writes the index, syncs; -> size and crc32c of the file."""
        assert not self._finished
        self._finished = True
        self.flush()
        if self._taken is not None:  # beyond these it has rows of traces that were left out
            with naming(self.path):
                again(os.ftruncate, self._open(), self._written)
        if self._coder is None and self.num_rows:
            # As many chunks as it takes, but of even size: then the last one needs padding of less than
            # a row a chunk, not of up to a whole chunk, which was a hundredth of real stores.
            self.chunk_rows = -(-self.num_rows // -(-self.num_rows // self.chunk_rows))
        elif not self._chunks:
            # One short inner chunk is stored at its own size.
            self.chunk_rows = min(self.chunk_rows, self.num_rows)
        chunk_bytes = self.chunk_rows * self.row_bytes
        padding = -self.num_bytes % chunk_bytes
        if self._coder is None:
            self._emit_own(bytes(padding))
            count = (self.num_bytes + padding) // chunk_bytes
            self._chunks = [(k * chunk_bytes, chunk_bytes) for k in range(count)]
        elif self._buffer:
            self._emit_chunk(bytes(self._buffer) + bytes(padding))
        index = b"".join(struct.pack("<QQ", *c) for c in self._chunks)
        self._emit_own(index + struct.pack("<I", crc32c(index)))
        fd = self._open()
        with naming(self.path):
            os.fchmod(fd, 0o444)
            os.fsync(fd)
        self.suspend()
        return self._written, self._crc


ChunkKey = tuple[str, int]  # the array's name in the store, the number of the inner chunk


class ChunkCache:
    """Decoded inner chunks of compressed shards, bounded in bytes.

    Who knows the order of what is to come announces it: then what is not announced goes
    first, least recently used, and after that what is needed last (Belady 1966). Safe to
    use from threads; a forked child starts with a lock of its own."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_decoded = 0
        self._chunks: OrderedDict[ChunkKey, np.ndarray] = OrderedDict()
        self._announced: dict[ChunkKey, deque[int]] = {}  # when it will be asked for, in announcements
        self._clock = 0
        self._lock, self._pid = threading.Lock(), os.getpid()

    def get(self, key: ChunkKey, decode: Callable[[], np.ndarray]) -> np.ndarray:
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
                return chunk
        # Decoded outside the lock: two threads may do it twice, neither waits.
        chunk = decode()
        with self._lock:
            self.num_decoded += 1
            if key not in self._chunks:
                self._chunks[key] = chunk
                self.num_bytes += chunk.nbytes
            self._trim()
        return chunk

    def announce(self, keys: Sequence[ChunkKey]) -> None:
        """These will be asked for, after all that were announced before."""
        with self._lock:
            self._clock += 1
            for key in keys:
                self._announced.setdefault(key, deque()).append(self._clock)

    def done(self, keys: Sequence[ChunkKey]) -> None:
        """Takes the oldest announcement of each back: it was asked for, or will not be."""
        with self._lock:
            for key in keys:
                self._announced[key].popleft()
                if not self._announced[key]:
                    del self._announced[key]

    def _trim(self) -> None:
        while self.num_bytes > self.max_bytes and len(self._chunks) > 1:
            newest = next(reversed(self._chunks))
            found = next((k for k in self._chunks if k not in self._announced and k != newest), None)
            if found is None:
                found = max((k for k in self._chunks if k != newest), key=lambda k: self._announced[k][0])
            self.num_bytes -= self._chunks.pop(found).nbytes

    def limit(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        with self._lock:
            self._trim()


def _entry(entries: Mapping[str, FileEntry], path: str) -> FileEntry:
    if path not in entries:
        raise StoreDamagedError(f"{path}: not among the files that were committed")
    return entries[path]


class ArrayReader:
    """Rows of one array. Uncompressed: read-only views of the map, which stays
    alive with them; reading one ends the process where the file was cut short after it
    was opened. Compressed: a copy, assembled from decoded inner chunks.

    The file's size, the shard's index and the metadata are checked when the array
    is first opened; `name` is its path in the store, `entries` the committed files.
    """

    def __init__(self, files: StoreFiles, entries: Mapping[str, FileEntry], name: str, cache: ChunkCache) -> None:
        self.name = name
        try:
            meta = json.loads(files.read(_entry(entries, f"{name}/zarr.json")))
            self.shape: tuple[int, ...] = tuple(int(n) for n in meta["shape"])
            sharding = meta["codecs"][0]["configuration"]
            self.chunk_rows = int(sharding["chunk_shape"][0])
            inner = [c["name"] for c in sharding["codecs"] if c["name"] != "bytes"]
            self.dtype = np.dtype(meta["data_type"]).newbyteorder("<")
            if meta["codecs"][0]["name"] != "sharding_indexed" or self.chunk_rows < 1 or min(self.shape) < 0:
                raise ValueError("not an array of this format")
            self._codec = inner[0] if inner else None
            if self._codec == "blosc":
                self._codec = (
                    "blosc-" + next(c for c in sharding["codecs"] if c["name"] == "blosc")["configuration"]["cname"]
                )
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StoreDamagedError(f"{name}/zarr.json: {reason}") from None
        self.row_items = int(np.prod(self.shape[1:], dtype=np.int64))
        self._cache = cache
        self._offsets: np.ndarray | None = None
        self._mapped: MappedFile | None = None
        self._flat = np.zeros(0, self.dtype)
        self._slab = Slab(self._flat, 0, 1)
        if self.shape[0] == 0:
            return
        file_name = f"{name}/c/" + "/".join("0" * len(self.shape))
        num_chunks = -(-self.shape[0] // self.chunk_rows)
        try:
            mapped = self._mapped = files.map(_entry(entries, file_name))
            if self._codec is None:
                mapped.check_shard(num_chunks, self.chunk_rows * self.row_items * self.dtype.itemsize)
                self._flat = np.frombuffer(memoryview(mapped), self.dtype, self.shape[0] * self.row_items)
                self._slab = Slab(mapped, self.shape[0], self.row_items * self.dtype.itemsize)
            else:
                self._offsets = self._coded_index(mapped, num_chunks)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StoreDamagedError(f"{file_name}: {reason}") from None

    @staticmethod
    def _coded_index(mapped: MappedFile, num_chunks: int) -> np.ndarray:
        end = len(mapped) - 4
        begin = end - 16 * num_chunks
        if begin < 0:
            raise ValueError("shorter than its index")
        index = mapped.read(begin, end)
        if crc32c(index) != int.from_bytes(mapped.read(end, end + 4), "little"):
            raise ValueError("shard: checksum mismatch")
        offsets = np.frombuffer(index, "<u8").reshape(num_chunks, 2)
        if (offsets[:, 0] + offsets[:, 1] > begin).any() or (offsets > begin).any():
            raise ValueError("shard: offset out of bounds")
        return offsets

    def _decode(self, chunk: int) -> np.ndarray:
        assert self._offsets is not None and self._codec is not None and self._mapped is not None
        offset, size = (int(v) for v in self._offsets[chunk])
        try:
            data = _numcodec(self._codec, self.dtype.itemsize).decode(self._mapped.read(offset, offset + size))
        except RuntimeError as error:
            raise StoreDamagedError(f"{self.name}: inner chunk {chunk}: {error}") from None
        items = np.frombuffer(data, self.dtype)
        if items.size != self.chunk_rows * self.row_items:
            raise StoreDamagedError(f"{self.name}: inner chunk {chunk} decodes to another size")
        return items

    def pieces(self, begin: int, end: int) -> list[np.ndarray]:
        """Rows begin .. end as flat arrays one behind the other, nothing copied: one view
        of the map, or views of decoded inner chunks."""
        if not 0 <= begin <= end <= self.shape[0]:
            raise StoreDamagedError(f"{self.name}: rows {begin} to {end} of {self.shape[0]}")
        items = self.row_items
        if self._offsets is None:
            return [self._flat[begin * items : end * items]]
        found = []
        for chunk in range(begin // self.chunk_rows, -(-end // self.chunk_rows)):
            data = self._cache.get((self.name, chunk), lambda c=chunk: self._decode(c))  # type: ignore[misc]
            first = chunk * self.chunk_rows
            lo, hi = max(begin, first), min(end, first + self.chunk_rows)
            found.append(data[(lo - first) * items : (hi - first) * items])
        return found

    def chunk_keys(self, begin: int, end: int) -> list[ChunkKey]:
        """The inner chunks of rows begin .. end as the cache knows them; none if uncompressed."""
        if self._offsets is None or end <= begin:
            return []
        return [(self.name, k) for k in range(begin // self.chunk_rows, -(-end // self.chunk_rows))]

    def sources(self, begin: int, end: int) -> list[Any]:
        """The same as sources of a gather: a Span, or flat uint8 arrays."""
        if self._offsets is not None or end > self.shape[0] or begin < 0:
            return [piece.view("u1") for piece in self.pieces(begin, end)]
        return [self._slab.span(begin, end)]

    def flat(self, begin: int, end: int) -> np.ndarray:
        """Rows begin .. end as one read-only array."""
        pieces = self.pieces(begin, end)
        if len(pieces) == 1:
            return pieces[0]
        out = np.concatenate(pieces) if pieces else np.empty(0, self.dtype)
        out.flags.writeable = False
        return out

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Rows begin .. end in the array's shape."""
        return self.flat(begin, end).reshape(end - begin, *self.shape[1:])

    def copy(self, begin: int, end: int) -> np.ndarray:
        """As `rows`, in memory of its own: StoreDamagedError, never a signal, where the file
        was cut short meanwhile."""
        if self._offsets is None and self._mapped is not None and 0 <= begin <= end <= self.shape[0]:
            row_bytes = self.row_items * self.dtype.itemsize
            flat = np.frombuffer(self._mapped.read(begin * row_bytes, end * row_bytes), self.dtype)
        else:
            flat = self.flat(begin, end).copy()
            flat.flags.writeable = False
        return flat.reshape(end - begin, *self.shape[1:])

    def check(self) -> None:
        """After views of it were read: StoreDamagedError if the file has been cut short."""
        if self._mapped is not None:
            self._mapped.check()
