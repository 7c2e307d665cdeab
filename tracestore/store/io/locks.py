"""Locks of writers and pins of readers: flock, which the kernel releases when the process ends."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tracestore.errors import CorruptStoreError, StoreLockedError, UsageError
from tracestore.store.io.fsio import open_regular, with_filename

# Errors of flock() that mean that another process holds the lock.
_LOCK_HELD_ERRORS = (errno.EWOULDBLOCK, errno.EACCES)
# How long a writer waits for the lock of a store, which others hold during a commit.
LOCK_WAIT_S = 30.0
_LOCK_POLL_S = 0.005


class FolderRemovedError(StoreLockedError):
    """The folder or its lock was removed while the lock was taken: another process has removed its empty folder."""


class WriterLock:
    """An exclusive flock on FOLDER/lock, which the kernel releases when the process ends.

    Parameters
    ----------
    folder : Path
    wait_s : float
        How long to wait while another process holds the lock.

    Raises
    ------
    StoreLockedError
        If another process holds the lock.
    FolderRemovedError
        If another process has just removed the folder.
    """

    def __init__(self, folder: Path, *, wait_s: float = 0.0) -> None:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(folder / "lock", flags, 0o644)
        except FileNotFoundError:
            raise FolderRemovedError(f"{folder}: another writer has just removed its empty store") from None
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP):
                raise CorruptStoreError("lock: not a regular file") from None
            raise
        try:
            with with_filename(folder / "lock"):
                self._wait(wait_s)
            # A writer that committed nothing removes its store including this file. A lock on the
            # removed file would not exclude a writer that creates the store again.
            if not is_same_file(self._fd, folder / "lock"):
                raise FolderRemovedError(f"{folder}: another writer has just removed its empty store")
        except OSError as error:
            os.close(self._fd)
            if error.errno in _LOCK_HELD_ERRORS:
                raise StoreLockedError(f"{folder}: another writer holds the store") from None
            raise
        except BaseException:
            os.close(self._fd)
            raise

    def _wait(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while number := lock_error(self._fd):
            if number not in _LOCK_HELD_ERRORS or time.monotonic() >= until:
                raise OSError(number, os.strerror(number))
            time.sleep(_LOCK_POLL_S)

    def read(self) -> bytes:
        """Return the first 64 bytes of the lock file."""
        return os.pread(self._fd, 64, 0)

    def write(self, text: bytes) -> None:
        """Replace the contents of the lock file, durably."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)
        os.fsync(self._fd)

    def release(self) -> None:
        """Release the lock; no-op if it is released already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_same_file(fd: int, path: Path) -> bool:
    """Return whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


class Pin:
    """A shared flock on a manifest, which keeps writers from removing that generation.

    The lock belongs to the open file: a forked child keeps the pin until it ends too, and the pin
    also excludes a writer in the same process. On a file system without locks nothing is pinned, but
    memory maps of removed files stay readable.

    Parameters
    ----------
    fd : int
        Descriptor of the manifest, open for reading. The pin closes it.
    path : Path
        Path of the manifest.

    Raises
    ------
    FileNotFoundError
        If the manifest was removed, or a writer is removing it.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = -1
        try:
            if lock_error(fd, fcntl.LOCK_SH) in _LOCK_HELD_ERRORS or not is_same_file(fd, path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._path = fd, path

    @property
    def is_gone(self) -> bool:
        """True if the pinned manifest has lost its name: the store was replaced."""
        return self._fd >= 0 and not is_same_file(self._fd, self._path)

    def read(self, max_bytes: int) -> bytes:
        """Return the bytes of the pinned manifest; raise ValueError if there are more than `max_bytes`."""
        data = b""
        while chunk := os.pread(self._fd, 1 << 20, len(data)):
            data += chunk
            if len(data) > max_bytes:
                raise ValueError(f"larger than {max_bytes} bytes")
        return data

    def close(self) -> None:
        """Release the pin; no-op if it is released already."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The globals of this module may be gone when the interpreter exits.
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def try_exclusive(fd: int) -> Iterator[bool]:
    """Try to lock the manifest open as `fd` exclusively during the block, and close it afterwards.

    Yields True if no reader has the manifest pinned; no reader can pin it during the block then.
    """
    try:
        # EBADF: the file system allows exclusive locks only on files open for writing, so readers may hold a pin.
        yield lock_error(fd) not in (*_LOCK_HELD_ERRORS, errno.EBADF)
    finally:
        os.close(fd)


def is_locked(path: str) -> bool:
    """Return whether another process holds a lock file, such as the one next to a file that vLLM writes."""
    with contextlib.suppress(OSError, UsageError), open_regular(Path(path)) as file:
        return lock_error(file.fileno(), fcntl.LOCK_SH) in _LOCK_HELD_ERRORS
    return False


def lock_error(fd: int, kind: int = fcntl.LOCK_EX) -> int:
    """Lock an open file without waiting, and return 0 or the number of the error that keeps from it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
