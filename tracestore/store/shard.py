"""Zarr v3 arrays of one shard file each: streamed out, mapped in.

The shard's bytes are streamed here, because through zarr-python a shard is held in
memory twice.
"""

import contextlib
import errno
import json
import math
import os
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.gather import Slab
from tracestore._core.kernels import crc32c, crc32c_combine
from tracestore._core.mapping import MappedFile
from tracestore.errors import StoreDamagedError, printable
from tracestore.store import schema
from tracestore.store.ahead import AheadFile, WrittenRows
from tracestore.store.codecs import ChunkCodec
from tracestore.store.files import FileEntry, StoreFiles
from tracestore.store.fsio import again, make_folders, naming, remove_tree, write_pieces
from tracestore.store.metadata import array_metadata

_BUFFER_BYTES = 1 << 20
_MAX_PIECES = 512  # that wait to be written


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
        self._coder = ChunkCodec(codec, dtype.itemsize) if codec != "none" else None
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
        encoded = self._coder.encode(data)
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


# Of an array's zarr.json.
_MAX_METADATA_BYTES = 1 << 16
# A chunk holds at most so much, or one row.
_MAX_CHUNK_BYTES = schema.INNER_CHUNK_BYTES


def _check_metadata(data: bytes, spec: "ArraySpec") -> tuple[int, int]:
    """-> the rows of an array and of an inner chunk; ValueError unless its zarr.json says what this
    format says, in whatever order and with whatever blanks."""
    meta = json.loads(data)
    num_rows, chunk_rows = meta["shape"][0], meta["codecs"][0]["configuration"]["chunk_shape"][0]
    if type(num_rows) is not int or type(chunk_rows) is not int or not 0 <= num_rows < 1 << 48 or chunk_rows < 1:
        raise ValueError(f"{num_rows!r:.40} rows in chunks of {chunk_rows!r:.40}")
    if chunk_rows > 1 and chunk_rows * spec.row_items * spec.dtype.itemsize > max(
        _MAX_CHUNK_BYTES, schema.MIN_CODED_CHUNK_BYTES
    ):
        raise ValueError(f"inner chunks of {chunk_rows} rows")
    if spec.num_rows is not None and num_rows != spec.num_rows:
        raise ValueError(f"{num_rows} rows, expected {spec.num_rows}")
    attributes = {"tracestore": {"dtype": "bfloat16"}} if spec.is_bfloat16 else {}
    expected = array_metadata((num_rows, *spec.columns), chunk_rows, spec.dtype, spec.codec, attributes)
    if meta != json.loads(expected):
        raise ValueError("not the metadata of this array")
    return num_rows, chunk_rows


def _entry(entries: Mapping[str, FileEntry], path: str) -> FileEntry:
    if path not in entries:
        raise StoreDamagedError(f"{path}: not among the files that were committed")
    return entries[path]


@dataclass(frozen=True)
class ArraySpec:
    """What the format says of an array: dtype as stored, shape behind axis 0, codec ("none" where
    it is not compressed), its number of rows where that is known, and whether its values are
    bfloat16."""

    dtype: np.dtype
    columns: tuple[int, ...] = ()
    codec: str = "none"
    num_rows: int | None = None
    is_bfloat16: bool = False

    @property
    def row_items(self) -> int:
        return math.prod(self.columns)


class ArrayReader:
    """Rows of one array. Uncompressed: read-only views of the map, which stays
    alive with them; reading one ends the process where the file was cut short after it
    was opened. Compressed: a copy, assembled from decoded inner chunks.

    The file's size, the shard's index and the metadata are checked when the array
    is first opened; `name` is its path in the store, `entries` the committed files.
    """

    def __init__(
        self, files: StoreFiles, entries: Mapping[str, FileEntry], name: str, cache: ChunkCache, spec: ArraySpec
    ) -> None:
        self.name, self.dtype, self.row_items = name, spec.dtype, spec.row_items
        self._cache, self._codec = cache, None if spec.codec == "none" else ChunkCodec(spec.codec, spec.dtype.itemsize)
        try:
            entry = _entry(entries, f"{name}/zarr.json")
            if entry.size > _MAX_METADATA_BYTES:
                raise ValueError(f"{entry.size} bytes")
            num_rows, self.chunk_rows = _check_metadata(files.read(entry), spec)
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else printable(str(error), 200)
            raise StoreDamagedError(f"{name}/zarr.json: {reason}") from None
        self.shape = (num_rows, *spec.columns)
        self._offsets: np.ndarray | None = None
        self._mapped: MappedFile | None = None
        self._flat = np.zeros(0, self.dtype)
        self._slab = Slab(self._flat, 0, 1)
        if num_rows == 0:
            return
        file_name = f"{name}/c/" + "/".join("0" * len(self.shape))
        num_chunks = -(-num_rows // self.chunk_rows)
        chunk_bytes = self.chunk_rows * self.row_items * self.dtype.itemsize
        entry = _entry(entries, file_name)
        try:
            if self._codec is None and entry.size != num_chunks * (chunk_bytes + 16) + 4:
                raise ValueError(f"{entry.size} bytes for {num_chunks} inner chunks of {chunk_bytes}")
            if entry.size < 16 * num_chunks + 4:
                raise ValueError("shorter than its index")
            mapped = self._mapped = files.map(entry)
            if self._codec is None:
                mapped.check_shard(num_chunks, chunk_bytes)
                self._flat = np.frombuffer(memoryview(mapped), self.dtype, num_rows * self.row_items)
                self._slab = Slab(mapped, num_rows, self.row_items * self.dtype.itemsize)
            else:
                self._offsets = self._coded_index(mapped, num_chunks, chunk_bytes)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StoreDamagedError(f"{file_name}: {reason}") from None

    @staticmethod
    def _coded_index(mapped: MappedFile, num_chunks: int, chunk_bytes: int) -> np.ndarray:
        end = len(mapped) - 4
        begin = end - 16 * num_chunks
        index = mapped.read(begin, end)
        if crc32c(index) != int.from_bytes(mapped.read(end, end + 4), "little"):
            raise ValueError("shard: checksum mismatch")
        offsets = np.frombuffer(index, "<u8").reshape(num_chunks, 2)
        # One behind the other, and none larger than a codec makes what it cannot compress.
        if (offsets > begin).any() or (offsets[:, 1] > chunk_bytes + chunk_bytes // 8 + 1024).any():
            raise ValueError("shard: offset out of bounds")
        ends = offsets[:, 0] + offsets[:, 1]
        if offsets[0, 0] != 0 or (offsets[1:, 0] != ends[:-1]).any() or ends[-1] != begin:
            raise ValueError("shard: inner chunks that do not lie one behind the other")
        return offsets

    def _decode(self, chunk: int) -> np.ndarray:
        assert self._offsets is not None and self._codec is not None and self._mapped is not None
        offset, size = (int(v) for v in self._offsets[chunk])
        try:
            data = self._mapped.read(offset, offset + size)
            return self._codec.decode(data, self.chunk_rows * self.row_items * self.dtype.itemsize).view(self.dtype)
        except ValueError as error:
            raise StoreDamagedError(f"{self.name}: inner chunk {chunk}: {error}") from None

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
        if self._offsets is not None or not 0 <= begin <= end <= self.shape[0]:
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

    def check_chunks(self) -> None:
        """Decode every inner chunk of a compressed array. StoreDamagedError names the first that is damaged."""
        if self._offsets is not None:
            for chunk in range(len(self._offsets)):
                self._decode(chunk)

    def check(self) -> None:
        """After views of it were read: StoreDamagedError if the file has been cut short."""
        if self._mapped is not None:
            self._mapped.check()
