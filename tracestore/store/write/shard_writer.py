"""Writing a Zarr v3 array of one shard file.

The bytes of the shard are streamed here: through zarr-python a shard is held in memory twice.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c, crc32c_combine
from tracestore.store.format.codecs import ChunkCodec
from tracestore.store.io.fsio import makedirs, pwritev_all, remove_tree, retry_eintr, with_filename
from tracestore.store.io.spool_files import SpooledRows, SpoolFile

_BUFFER_BYTES = 1 << 20


_MAX_PIECES = 512  # that wait to be written


class ShardWriter:
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
        self._taken: SpoolFile | None = None  # the file that became this one's
        self._coder = ChunkCodec(codec, dtype.itemsize) if codec != "none" else None
        self._chunks: list[tuple[int, int]] = []
        self._fd = -1
        self._finished = False

    @property
    def num_rows(self) -> int:
        return self.num_bytes // self.row_bytes

    def _open(self) -> int:
        if self._fd < 0:
            makedirs(self.path.parent)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._fd

    def _emit(self, pieces: list[memoryview]) -> None:
        with with_filename(self.path):
            pwritev_all(self._open(), pieces, self._written)
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

    def append_spooled(self, rows: SpooledRows, crc: int) -> None:
        """As append, of rows that lie in a file. It becomes this one's if it begins with the first rows of all;
        then nothing is to be written of it, as long as none of its rows is left out. From there
        on its rows move towards its beginning, never over rows that are still to come."""
        assert self._coder is None
        if not rows.nbytes:
            return
        self.flush()
        if self._written == rows.begin == 0 and not rows.file.is_moved:
            self.close_fd()
            with contextlib.suppress(OSError):  # it may lie on another file system
                self._fd, self._taken = rows.file.move_to(self.path), rows.file
            rows.file.close_if_done()
        if self._taken is rows.file and self._written == rows.begin:
            self._crc = crc32c_combine(self._crc, crc, rows.nbytes)
            self._written += rows.nbytes
            self.num_bytes += rows.nbytes
            return
        found = 0
        for piece in rows.chunks():
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

    def savepoint(self) -> tuple[Any, ...]:
        self.flush()
        return self.num_bytes, self._written, self._crc, bytes(self._buffer), len(self._chunks)

    def rollback(self, mark: tuple[Any, ...]) -> None:
        self.num_bytes, written, self._crc, buffer, chunks = mark
        self._buffer = bytearray(buffer)
        self._pieces, self._waiting = [], 0
        del self._chunks[chunks:]
        # Also where the counters agree: a write that failed half-way has left bytes.
        self.close_fd()
        self._written = written
        if written == 0:
            # Not cut: its writer may still be at work on a file that was taken over.
            remove_tree(self.path)
            self._taken = None
        elif self.path.exists():
            retry_eintr(os.truncate, self.path, written)

    def close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def finish(self) -> tuple[int, int]:
        """Pads the last inner chunk, writes the index, syncs; -> size and crc32c of the file."""
        assert not self._finished
        self._finished = True
        self.flush()
        if self._taken is not None:  # beyond these it has rows of traces that were left out
            with with_filename(self.path):
                retry_eintr(os.ftruncate, self._open(), self._written)
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
        with with_filename(self.path):
            os.fchmod(fd, 0o444)
            os.fsync(fd)
        self.close_fd()
        return self._written, self._crc
