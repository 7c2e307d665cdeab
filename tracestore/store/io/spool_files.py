"""Rows of a source in files of their own, before it is known where in the store they belong.

A source whose turn has not come would have to wait in memory. Where it is likely to begin a
segment its rows go into files at once, and the arrays of the segment take these files over
(shard.ShardWriter); where it turns out otherwise, the rows are copied from there.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracestore.store.io.fsio import free_bytes, makedirs, pwritev_all, retry_eintr, try_remove_tree, with_filename

_COPIED_AT_ONCE = 1 << 20
# Files that may be open for all sources ahead together, of the 1,024 that a process usually has.
_free_files = threading.BoundedSemaphore(256)


class SpoolFile:
    """Rows of one array one behind the other. One thread writes at its end, meanwhile
    another may take the file over or read what is there."""

    def __init__(self, path: Path) -> None:
        if not _free_files.acquire(blocking=False):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        self.path, self.num_bytes, self.is_taken = path, 0, False
        self._fd, self._is_whole, self._lock = -1, False, threading.Lock()
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        finally:
            if self._fd < 0:
                _free_files.release()

    def append(self, arrays: Sequence[np.ndarray]) -> "SpooledRows":
        begin = self.num_bytes
        pieces = [a.data.cast("B") for a in arrays if a.size]
        with with_filename(self.path):
            pwritev_all(self._fd, pieces, begin)
        first, num_bytes = arrays[0], sum(map(len, pieces))
        self.num_bytes += num_bytes
        return SpooledRows(self, begin, num_bytes, first.dtype, (sum(map(len, arrays)), *first.shape[1:]))

    def take(self, path: Path) -> int:
        """Gives the file its name in the segment, where it goes on growing. -> a descriptor for
        the one who takes it: what the disk fails to keep is told to those who had the file open."""
        makedirs(path.parent)
        with self._lock:
            fd = os.dup(self._fd)
            try:
                retry_eintr(os.rename, self.path, path)
            except BaseException:
                os.close(fd)
                raise
            self.path, self.is_taken = path, True
        return fd

    def end(self) -> None:
        """Nothing more is appended."""
        with self._lock:
            self._is_whole = True

    def close_if_done(self) -> None:
        """Where nothing more is appended and the file was taken. OSError as of close(2), which
        may be the first to know that what was written is lost."""
        with self._lock:
            if self._is_whole and self.is_taken:
                self._close()

    def close(self) -> None:
        """It has been ended, and nobody takes it any more."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _free_files.release()
            os.close(fd)


@dataclass(frozen=True)
class SpooledRows:
    """Where the rows of one trace lie; of an array of `dtype` and `shape`."""

    file: SpoolFile
    begin: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.nbytes // self.dtype.itemsize

    def pieces(self) -> Iterator[np.ndarray]:
        """The bytes, some at a time."""
        end = self.begin + self.nbytes
        fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with with_filename(self.file.path):
                position = self.begin
                while position < end:
                    data = os.pread(fd, min(_COPIED_AT_ONCE, end - position), position)
                    if not data:
                        raise OSError(errno.EIO, "shorter than what was written")
                    position += len(data)
                    yield np.frombuffer(data, "u1")
        finally:
            os.close(fd)


class SpoolArrays:
    """The arrays of one source, each a file in `folder`; others are begun where a segment
    of that much (`split_bytes`) is split."""

    def __init__(self, folder: Path, split_bytes: int) -> None:
        self._folder, self._split_bytes = folder, split_bytes
        self._files: dict[str, SpoolFile] = {}
        self._ended: list[SpoolFile] = []
        self._num_bytes = self._num_splits = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether the file system has so much."""
        return free_bytes(self._folder) >= num_bytes

    def write(
        self, arrays: Mapping[str, Sequence[np.ndarray]], num_bytes: int, segment_bytes: int
    ) -> dict[str, SpooledRows] | None:
        """The arrays of the next trace, num_bytes in all; a segment grows by segment_bytes with it.
        -> where they lie; None where they could not be written: nothing more is to be written
        then. OSError where what was written before is lost."""
        if self._num_bytes and self._num_bytes + num_bytes > self._split_bytes:
            self.end()
            self._num_bytes, self._num_splits = 0, self._num_splits + 1
        self._num_bytes += segment_bytes
        try:
            return {name: self._file(name).append(pieces) for name, pieces in arrays.items()}
        except OSError:
            return None

    def _file(self, name: str) -> SpoolFile:
        if name not in self._files:
            makedirs(self._folder)
            self._files[name] = SpoolFile(self._folder / f"{self._num_splits:04d}-{name}")
        return self._files[name]

    def end(self) -> None:
        """Nothing more is written; OSError as of SpoolFile.close_if_done."""
        files, self._files = self._files, {}
        self._ended += files.values()
        with contextlib.ExitStack() as stack:
            for file in files.values():
                file.end()
                stack.callback(file.close_if_done)

    def remove(self) -> None:
        """After end(): gives back what no segment has taken over."""
        for file in self._ended:
            with contextlib.suppress(OSError):
                file.close()
        try_remove_tree(self._folder)
