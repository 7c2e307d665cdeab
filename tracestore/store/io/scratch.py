"""ScratchFile beside the memory: arrays of one large trace, in files without a name."""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.platform_support import preallocate


class Scratch:
    """Writable arrays for what one trace needs on its way into the store.

    Up to max_memory bytes of a trace are memory; what is beyond lies in files in `folder`
    that have no name, so that nothing is left of them however the process ends.
    start() begins a trace. OSError (ENOSPC) where the file system has no room.
    """

    def __init__(self, folder: Path | None = None, *, max_memory: int = 48 << 20) -> None:
        self.folder, self.max_memory = folder, max_memory
        self._used = 0

    def start(self) -> None:
        self._used = 0

    def new_file(self, num_bytes: int) -> "ScratchFile":
        """To be written once, front to back; what is written takes no memory of the process."""
        return ScratchFile(self.folder, num_bytes)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """As numpy.empty."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        num_bytes = count * dtype.itemsize
        self._used += num_bytes
        if self._used <= self.max_memory or num_bytes == 0:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            # Reserved: writing through the map cannot run out of space, which would be a signal.
            preallocate(file.fileno(), num_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype, count).reshape(shape)


class ScratchFile:
    """A file without a name: write(piece) until it is full, then finish() maps it."""

    def __init__(self, folder: Path | None, num_bytes: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - finish() closes it
        self._num_bytes, self._position = num_bytes, 0

    def write(self, piece: memoryview) -> None:
        while len(piece):
            written = os.pwrite(self._file.fileno(), piece, self._position)
            self._position += written
            piece = piece[written:]

    def finish(self) -> memoryview:
        """The bytes, read-only, for as long as a view of them lives."""
        assert self._position == self._num_bytes
        with self._file:
            return memoryview(mmap.mmap(self._file.fileno(), self._num_bytes, access=mmap.ACCESS_READ))
