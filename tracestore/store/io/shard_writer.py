"""Writing of a Zarr v3 array with one shard file.

The shard is streamed to its file; zarr-python would hold it in memory twice.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c, crc32c_combine
from tracestore.store.format.codecs import ChunkCodec
from tracestore.store.format.zarr_json import shard_index
from tracestore.store.io.fsio import makedirs, pwritev_all, remove_tree, retry_eintr, with_filename

# Limits on the data that waits to be written.
_BUFFER_BYTES = 4 << 20
_MAX_BUFFERS = 512


class ShardWriter:
    """Writer that appends rows to a shard file; rollback() removes the rows appended after a savepoint.

    The file is opened when bytes are written and may be closed between traces (close_fd()), so that a
    source that is split over many segments needs few descriptors.
    """

    def __init__(self, path: Path, dtype: np.dtype, columns: tuple[int, ...], codec: str, chunk_bytes: int) -> None:
        self.path, self.dtype, self.columns, self.codec = path, dtype, columns, codec
        self.row_bytes = dtype.itemsize * int(np.prod(columns, dtype=np.int64))
        self.chunk_rows = max(1, chunk_bytes // max(1, self.row_bytes))
        self.num_bytes = 0
        self._buffer = bytearray()  # rows of an incomplete chunk, with a codec
        self._pending: list[memoryview] = []  # buffers to be written, without a codec
        self._pending_bytes = 0
        self._written = 0
        self._crc = 0
        self._coder = ChunkCodec(codec, dtype.itemsize) if codec != "none" else None
        self._chunks: list[tuple[int, int]] = []
        self._fd = -1

    @property
    def num_rows(self) -> int:
        """Number of rows appended so far."""
        return self.num_bytes // self.row_bytes

    def _open(self) -> int:
        if self._fd < 0:
            makedirs(self.path.parent)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._fd

    def _write(self, buffers: list[memoryview]) -> None:
        with with_filename(self.path):
            pwritev_all(self._open(), buffers, self._written)
        self._written += sum(map(len, buffers))

    def _write_with_crc(self, data: Any) -> None:
        self._crc = crc32c(data, self._crc)
        self._write([memoryview(data)])

    def _write_chunk(self, data: Any) -> None:
        assert self._coder is not None
        encoded = self._coder.encode(data)
        self._chunks.append((self._written, len(encoded)))
        self._write_with_crc(encoded)

    def append(self, arrays: Sequence[np.ndarray], crc: int | None = None) -> None:
        """Append rows.

        Parameters
        ----------
        arrays : sequence of np.ndarray
            Consecutive rows. They must not change before the next flush(), savepoint() or finish().
        crc : int, optional
            CRC-32C of the rows, if the caller has it.
        """
        buffers = [a.reshape(-1).view("u1").data for a in arrays if a.size]
        num_bytes = sum(map(len, buffers))
        self.num_bytes += num_bytes
        if self._coder is None:
            if crc is None:
                for buffer in buffers:
                    self._crc = crc32c(buffer, self._crc)
            else:
                self._crc = crc32c_combine(self._crc, crc, num_bytes)
        for buffer in buffers:
            if self._coder is None:
                self._pending.append(buffer)
                self._pending_bytes += len(buffer)
                if self._pending_bytes >= _BUFFER_BYTES or len(self._pending) >= _MAX_BUFFERS:
                    self.flush()
            else:
                self._buffer += buffer
                if len(self._buffer) >= self.chunk_rows * self.row_bytes:
                    self.flush()

    def flush(self) -> None:
        """Write the buffered rows, except those of an incomplete chunk if the array has a codec."""
        if self._coder is None:
            if self._pending:
                self._write(self._pending)
                self._pending, self._pending_bytes = [], 0
            return
        chunk_bytes = self.chunk_rows * self.row_bytes
        complete = len(self._buffer) // chunk_bytes * chunk_bytes
        for begin in range(0, complete, chunk_bytes):
            self._write_chunk(bytes(self._buffer[begin : begin + chunk_bytes]))
        del self._buffer[:complete]

    def savepoint(self) -> tuple[Any, ...]:
        """Return the state that rollback() restores."""
        self.flush()
        return self.num_bytes, self._written, self._crc, bytes(self._buffer), len(self._chunks)

    def rollback(self, savepoint: tuple[Any, ...]) -> None:
        """Remove all rows that were appended after a savepoint."""
        self.num_bytes, written, self._crc, buffer, chunks = savepoint
        self._buffer = bytearray(buffer)
        self._pending, self._pending_bytes = [], 0
        del self._chunks[chunks:]
        # Truncate even if the counters are equal: a write that failed may have left bytes.
        self.close_fd()
        self._written = written
        if written == 0:
            remove_tree(self.path)
        elif self.path.exists():
            retry_eintr(os.truncate, self.path, written)

    def close_fd(self) -> None:
        """Close the file; the next write opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def finish(self) -> tuple[int, int]:
        """Pad the last inner chunk, write the shard index and close the file.

        Returns
        -------
        tuple[int, int]
            Size and CRC-32C of the file.
        """
        self.flush()
        if self._coder is None and self.num_rows:
            # Use chunks of equal size, so that the padding is less than one row per chunk. Padding of up to
            # a whole chunk made up one percent of real stores.
            self.chunk_rows = -(-self.num_rows // -(-self.num_rows // self.chunk_rows))
        elif not self._chunks:
            # A single short chunk is stored without padding.
            self.chunk_rows = min(self.chunk_rows, self.num_rows)
        chunk_bytes = self.chunk_rows * self.row_bytes
        padding = -self.num_bytes % chunk_bytes
        if self._coder is None:
            self._write_with_crc(bytes(padding))
            count = (self.num_bytes + padding) // chunk_bytes
            self._chunks = [(k * chunk_bytes, chunk_bytes) for k in range(count)]
        elif self._buffer:
            self._write_chunk(bytes(self._buffer) + bytes(padding))
        self._write_with_crc(shard_index(self._chunks))
        fd = self._open()
        with with_filename(self.path):
            os.fchmod(fd, 0o444)
        self.close_fd()
        return self._written, self._crc
