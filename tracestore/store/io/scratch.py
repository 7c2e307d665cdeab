"""Temporary arrays of large traces: in memory up to a limit, beyond it in unnamed files."""

import math
import mmap
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.platform_support import preallocate
from tracestore.store.io.fsio import pwritev_all


class Scratch:
    """Allocator of the writable arrays that one trace needs on its way into the store.

    Up to `max_memory` bytes per trace are allocated in memory. Further arrays are mapped from unnamed
    files in `folder`, of which nothing remains after the process ends in any way. An allocation
    raises OSError (ENOSPC) if the file system is full.
    """

    def __init__(self, folder: Path | None = None, *, max_memory: int = 48 << 20) -> None:
        self.folder, self.max_memory = folder, max_memory
        self._used = 0

    def start(self) -> None:
        """Start a new trace: reset the count of bytes in memory."""
        self._used = 0

    def new_file(self, num_bytes: int) -> "ScratchFile":
        """Return an unnamed file of `num_bytes` bytes, to be written once from front to back."""
        return ScratchFile(self.folder, num_bytes)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialized array, like numpy.empty."""
        dtype = np.dtype(dtype)
        count = shape if isinstance(shape, int) else math.prod(shape)
        num_bytes = count * dtype.itemsize
        self._used += num_bytes
        if self._used <= self.max_memory or num_bytes == 0:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            # Reserve the blocks: running out of space while writing through the map would raise SIGBUS.
            preallocate(file.fileno(), num_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype, count).reshape(shape)


class ScratchFile:
    """An unnamed file: call write(chunk) until it is full, then finish() to map it."""

    def __init__(self, folder: Path | None, num_bytes: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - finish() closes it
        self._num_bytes, self._position = num_bytes, 0

    def write(self, chunk: memoryview) -> None:
        """Append bytes."""
        pwritev_all(self._file.fileno(), [chunk], self._position)
        self._position += len(chunk)

    def finish(self) -> memoryview:
        """Return a read-only map of the bytes, which lives as long as a view of it."""
        assert self._position == self._num_bytes
        with self._file:
            return memoryview(mmap.mmap(self._file.fileno(), self._num_bytes, access=mmap.ACCESS_READ))
