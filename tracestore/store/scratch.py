"""Room beside the memory: arrays of one large trace, in files without a name."""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


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

    def buffer(self, num_bytes: int) -> mmap.mmap:
        """A file's bytes. All of them are reserved: writing to them cannot run out of space."""
        with tempfile.TemporaryFile(dir=self.folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """As numpy.empty."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        num_bytes = count * dtype.itemsize
        self._used += num_bytes
        if self._used <= self.max_memory or num_bytes == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(self.buffer(num_bytes), dtype, count).reshape(shape)
