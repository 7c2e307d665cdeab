"""Files of packed rows whose position in the store is not known yet.

A source that is packed before its turn would otherwise wait in memory. If it is likely to start a
segment, its rows are written to files at once, and the arrays of the segment adopt these files
(ShardWriter.append_spooled). If the prediction was wrong, the rows are copied from the files.
store.write.spool has the other kind of spool file, which carries whole traces from Dask workers.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracestore.store.io.fsio import (
    free_bytes,
    makedirs,
    pwritev_all,
    retry_eintr,
    try_remove_tree,
    with_filename,
)

_COPY_BYTES = 1 << 20
# Limit on open spool files of all sources, well below the usual limit of 1,024 files per process.
_free_files = threading.BoundedSemaphore(256)


class SpoolFile:
    """A file of consecutive rows of one array.

    One thread appends while another thread may move the file into a segment or read it.
    """

    def __init__(self, path: Path) -> None:
        if not _free_files.acquire(blocking=False):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        self.path, self.num_bytes, self.is_moved = path, 0, False
        self._fd, self._is_finished, self._lock = -1, False, threading.Lock()
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        finally:
            if self._fd < 0:
                _free_files.release()

    def append(self, arrays: Sequence[np.ndarray]) -> "SpooledRows":
        """Write the rows of one trace at the end of the file and return their location."""
        begin = self.num_bytes
        buffers = [a.data.cast("B") for a in arrays if a.size]
        with with_filename(self.path):
            pwritev_all(self._fd, buffers, begin)
        first, num_bytes = arrays[0], sum(map(len, buffers))
        self.num_bytes += num_bytes
        return SpooledRows(self, begin, num_bytes, first.dtype, (sum(map(len, arrays)), *first.shape[1:]))

    def move_to(self, path: Path) -> int:
        """Rename the file to its path in a segment, where it continues to grow.

        Returns
        -------
        int
            A duplicate of the descriptor. The kernel reports a failed write-back only to descriptors
            that were open at that time, so a newly opened one could miss the error.
        """
        makedirs(path.parent)
        with self._lock:
            fd = os.dup(self._fd)
            try:
                retry_eintr(os.rename, self.path, path)
            except BaseException:
                os.close(fd)
                raise
            self.path, self.is_moved = path, True
        return fd

    def finish(self) -> None:
        """Declare that no more rows are appended."""
        with self._lock:
            self._is_finished = True

    def close_if_done(self) -> None:
        """Close the file if it is finished and was moved.

        Raises
        ------
        OSError
            If close(2) fails, which may be the first report of lost data.
        """
        with self._lock:
            if self._is_finished and self.is_moved:
                self._close()

    def close(self) -> None:
        """Close a finished file that no segment adopts any more."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _free_files.release()
            os.close(fd)


@dataclass(slots=True)
class SpooledRows:
    """Location of the rows of one trace in a spool file, with the dtype and shape of the array."""

    file: SpoolFile
    begin: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of items."""
        return self.nbytes // self.dtype.itemsize

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield the bytes as uint8 arrays of limited size."""
        end = self.begin + self.nbytes
        fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with with_filename(self.file.path):
                position = self.begin
                while position < end:
                    data = os.pread(fd, min(_COPY_BYTES, end - position), position)
                    if not data:
                        raise OSError(errno.EIO, "shorter than the data written to it")
                    position += len(data)
                    yield np.frombuffer(data, "u1")
        finally:
            os.close(fd)


class SpoolArrays:
    """The arrays of one source as spool files in `folder`.

    New files are started where a segment of `split_bytes` bytes is split.
    """

    def __init__(self, folder: Path, split_bytes: int) -> None:
        self._folder, self._split_bytes = folder, split_bytes
        self._files: dict[str, SpoolFile] = {}
        self._finished: list[SpoolFile] = []
        self._num_bytes = self._num_splits = 0

    def has_space(self, num_bytes: int) -> bool:
        """Return whether the file system has `num_bytes` free bytes."""
        return free_bytes(self._folder) >= num_bytes

    def write(
        self, arrays: Mapping[str, Sequence[np.ndarray]], num_bytes: int, segment_bytes: int
    ) -> dict[str, SpooledRows] | None:
        """Write the arrays of the next trace.

        Parameters
        ----------
        arrays : Mapping[str, Sequence[np.ndarray]]
            Consecutive parts of each array.
        num_bytes : int
            Total size of the arrays.
        segment_bytes : int
            Number of bytes by which the trace increases the size of its segment.

        Returns
        -------
        dict[str, SpooledRows] or None
            Locations of the arrays, or None if they cannot be written; no call may follow then.

        Raises
        ------
        OSError
            If data that was written before is lost.
        """
        if self._num_bytes and self._num_bytes + num_bytes > self._split_bytes:
            self.finish()
            self._num_bytes, self._num_splits = 0, self._num_splits + 1
        self._num_bytes += segment_bytes
        try:
            return {name: self._file(name).append(rows) for name, rows in arrays.items()}
        except OSError:
            return None

    def _file(self, name: str) -> SpoolFile:
        if name not in self._files:
            makedirs(self._folder)
            self._files[name] = SpoolFile(self._folder / f"{self._num_splits:04d}-{name}")
        return self._files[name]

    def finish(self) -> None:
        """Declare that nothing more is written; raise OSError if written data is lost."""
        files, self._files = self._files, {}
        self._finished += files.values()
        with contextlib.ExitStack() as stack:
            for file in files.values():
                file.finish()
                stack.callback(file.close_if_done)

    def remove(self) -> None:
        """Remove the files that no segment has adopted; call finish() first."""
        for file in self._finished:
            with contextlib.suppress(OSError):
                file.close()
        try_remove_tree(self._folder)
