"""File system steps of the commit protocol: write, fsync, rename, lock."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tracestore.errors import NoSpaceError, StoreLockedError, UsageError

TEMPORARY_PREFIX = ".tmp-"


def fsync_path(path: Path) -> None:
    """fsync of a file or folder. A failure is raised and never retried."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """os.write until everything is written (short writes are legal)."""
    while len(data):
        data = data[os.write(fd, data) :]


def write_pieces(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    """The pieces one behind the other from `offset` on, without a copy; at most IOV_MAX
    (1,024) of them. One that failed half-way can be written again."""
    left = list(pieces)
    while left:
        written = os.pwritev(fd, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def write_file(path: Path, data: bytes, *, mode: int = 0o444) -> None:
    """A new file with these bytes, on disk when the function returns. Its folder is not synced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, memoryview(data))
        os.fchmod(fd, mode)
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Puts a file in place atomically: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    temporary.unlink(missing_ok=True)
    write_file(temporary, data)
    os.rename(temporary, path)
    fsync_path(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder or file of ours if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def translated_errors(path: Path, needed_bytes: Callable[[], int] | None = None) -> Iterator[None]:
    """ENOSPC and EDQUOT become NoSpaceError, which says what needed_bytes() gives;
    refusals by the file system become UsageError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(path)
            wanted = f"about {needed_bytes():,} bytes were needed, " if needed_bytes else ""
            raise NoSpaceError(f"no space left on the file system of {path}: {wanted}{free:,} are free") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise UsageError(f"cannot write {error.filename or path}: {error.strerror}") from error
        raise


def free_bytes(path: Path) -> int:
    """Free space of the file system that holds `path` or its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


class WriterLock:
    """An exclusive flock on STORE/lock; the kernel drops it when the process dies."""

    def __init__(self, store: Path) -> None:
        self._fd = os.open(store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreLockedError(f"{store}: another writer holds the store") from None
            raise

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
