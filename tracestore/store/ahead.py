"""Rows of a source in files of their own, before it is known where in the store they belong.

A source whose turn has not come would have to wait in memory. Where it is likely to begin a
segment its rows go into files at once, and the arrays of the segment take these files over
(shard.ShardStream); where it turns out otherwise, the rows are copied from there.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracestore.store.fsio import again, make_folders, naming, remove_if_possible, write_pieces

_COPIED_AT_ONCE = 1 << 20


class AheadFile:
    """Rows of one array one behind the other. One thread writes at its end, meanwhile
    another may take the file over or read what is there."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_bytes, self.is_taken = path, 0, False
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def append(self, arrays: Sequence[np.ndarray]) -> "WrittenRows":
        begin = self.num_bytes
        with naming(self.path):
            write_pieces(self._fd, [a.reshape(-1).view("u1").data for a in arrays if a.size], begin)
        self.num_bytes += sum(a.nbytes for a in arrays)
        return WrittenRows(self, begin, arrays[0].dtype, (sum(map(len, arrays)), *arrays[0].shape[1:]))

    def take(self, path: Path) -> None:
        """Gives the file its name in the segment, where it goes on growing."""
        make_folders(path.parent)
        again(os.rename, self.path, path)
        self.path, self.is_taken = path, True

    def close(self) -> None:
        """Nothing is appended any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True)
class WrittenRows:
    """Where the rows of one trace lie; of an array of `dtype` and `shape`."""

    file: AheadFile
    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def pieces(self) -> Iterator[np.ndarray]:
        """The bytes, some at a time."""
        end = self.begin + self.nbytes
        fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with naming(self.file.path):
                position = self.begin
                while position < end:
                    data = os.pread(fd, min(_COPIED_AT_ONCE, end - position), position)
                    if not data:
                        raise OSError(errno.EIO, "shorter than what was written")
                    position += len(data)
                    yield np.frombuffer(data, "u1")
        finally:
            os.close(fd)


class AheadArrays:
    """The arrays of one source, each a file in `folder`; others are begun where a segment
    of that much (`split_bytes`) is split."""

    def __init__(self, folder: Path, split_bytes: int) -> None:
        self._folder, self._split_bytes = folder, split_bytes
        self._files: dict[str, AheadFile] = {}
        self._num_bytes = self._num_splits = 0

    def write(self, arrays: Mapping[str, Sequence[np.ndarray]], segment_bytes: int) -> dict[str, WrittenRows] | None:
        """The arrays of the next trace, with which a segment grows by segment_bytes. -> where they
        lie; None where they could not be written, the last word of this object. OSError where what
        was written before is lost."""
        num_bytes = sum(a.nbytes for rows in arrays.values() for a in rows)
        if self._num_bytes and self._num_bytes + num_bytes > self._split_bytes:
            self.close()
            self._num_bytes, self._num_splits = 0, self._num_splits + 1
        self._num_bytes += segment_bytes
        try:
            return {name: self._file(name).append(pieces) for name, pieces in arrays.items()}
        except OSError:
            self.close()
            return None

    def _file(self, name: str) -> AheadFile:
        if name not in self._files:
            make_folders(self._folder)
            self._files[name] = AheadFile(self._folder / f"{self._num_splits:04d}-{name}")
        return self._files[name]

    def close(self) -> None:
        """Nothing more is written. OSError as of close(2), which may be the first to know that
        what was written is lost."""
        with contextlib.ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            self._files = {}

    def remove(self) -> None:
        """Gives the room back of what no segment has taken over."""
        remove_if_possible(self._folder)
