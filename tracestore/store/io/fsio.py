"""File system operations of the commit protocol: write, fsync, rename, lock."""

import contextlib
import csv
import errno
import fcntl
import io
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tracestore.errors import CorruptStoreError, DiskFullError, StorageError, StoreLockedError, UsageError
from tracestore.platform_support import name_file, open_unnamed, rename_exclusive
from tracestore.store.format.paths import TEMPORARY_PREFIX

# Default size limit of JSON documents: results.json of 1,000,000 traces and 25 runs stays below it.
MAX_JSON_BYTES = 4 << 30

# Errors of flock() that mean that another process holds the lock.
_LOCK_HELD_ERRORS = (errno.EWOULDBLOCK, errno.EACCES)
# Largest field of a CSV file that is read. The longest id and every other value that `write_rows` gets are shorter.
MAX_FIELD_BYTES = 64 << 20
_MAX_IOVECS = 512  # per call of pwritev; IOV_MAX is 1,024
# How long a writer waits for the lock of a store, which others hold during a commit.
LOCK_WAIT_S = 30.0
_LOCK_POLL_S = 0.005
# Errors of link() on file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def retry_eintr(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``call(*arguments)``, repeated while a signal interrupts it.

    Python retries os.open, write and fsync itself, but not mkdir, rename, unlink, rmdir and truncate,
    which can be interrupted on network file systems.
    """
    while True:
        try:
            return call(*arguments)
        except InterruptedError:
            continue


@contextlib.contextmanager
def with_filename(path: Path) -> Iterator[None]:
    """Add the file name to an OSError of a call on a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fsync_path(path: Path) -> None:
    """Synchronize a file or folder with the disk. A failure is raised and never retried."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with with_filename(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Write all of `data`; a single os.write may write less."""
    while len(data):
        data = data[os.write(fd, data) :]


def pwritev_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the buffers consecutively from `offset` on, without copying them.

    After a failure the same call can be repeated.
    """
    remaining = list(buffers)
    while remaining:
        written = os.pwritev(fd, remaining[:_MAX_IOVECS], offset)
        offset += written
        if written == sum(map(len, remaining[:_MAX_IOVECS])):
            del remaining[:_MAX_IOVECS]
            continue
        while remaining and written >= len(remaining[0]):
            written -= len(remaining.pop(0))
        if written:
            remaining[0] = remaining[0][written:]


def write_file(path: Path, data: bytes | memoryview, *, mode: int = 0o444) -> None:
    """Create a file with these bytes and synchronize it with the disk, but not its folder."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with with_filename(path):
            write_all(fd, memoryview(data))
            os.fchmod(fd, mode)
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Create or replace a file atomically: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    remove_tree(temporary)
    write_file(temporary, data)
    retry_eintr(os.rename, temporary, path)
    fsync_path(path.parent)


def give_name(temporary: Path, path: Path) -> bool:
    """Give a complete file or folder its name, unless the name exists; the caller synchronizes the folder of the name.

    Returns
    -------
    bool
        False, with nothing changed, if the name exists.
    """
    try:
        if not temporary.is_dir():
            try:
                retry_eintr(os.link, temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
            else:
                retry_eintr(os.unlink, temporary)
                return True
        if not rename_exclusive(temporary, path):
            # Only a file system without this call and without links gets here. The lock of the store excludes
            # other writers.
            if os.path.lexists(path):
                return False
            retry_eintr(os.rename, temporary, path)
    except FileExistsError:
        return False
    return True


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises
    ------
    UsageError
        If it is a FIFO, a device or a folder, because reading those may never end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path}: not a regular file")
    return open(fd, "rb")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON document in a file.

    Raises
    ------
    ValueError
        If the file is not valid JSON or larger than `max_bytes`.
    UsageError
        If it is not a regular file.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"larger than {max_bytes:,} bytes")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("too deeply nested") from None


def makedirs(path: Path) -> None:
    """Create a folder and its missing parents; unlike Path.mkdir, retry interrupted calls."""
    if not path.is_dir():
        makedirs(path.parent)
        with contextlib.suppress(FileExistsError):  # Another thread has created it.
            retry_eintr(os.mkdir, path)


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents, or a file, if it exists."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            retry_eintr(os.unlink, path)
        return
    for name in os.listdir(path):
        remove_tree(path / name)
    retry_eintr(os.rmdir, path)


def try_remove_tree(path: Path) -> None:
    """Remove a temporary folder or file and ignore errors."""
    with contextlib.suppress(OSError):
        remove_tree(path)


@contextlib.contextmanager
def map_os_errors(path: Path, needed_bytes: Callable[[], int] | None = None) -> Iterator[None]:
    """Convert an OSError of the block to an error of tracestore.

    ENOSPC and EDQUOT become DiskFullError, whose message quotes needed_bytes(). Missing permissions
    and invalid paths become UsageError, and all other errors StorageError.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(path)
            needed = f"about {needed_bytes():,} bytes were needed, " if needed_bytes else ""
            raise DiskFullError(f"no space left on the file system of {path}: {needed}{free:,} are free") from error
        name = error.filename or path
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise UsageError(f"cannot write {name}: {error.strerror}") from error
        raise StorageError(f"{name}: {error.strerror}. Data committed before is not affected.") from error


def check_destination(path: Path) -> None:
    """Raise UsageError if no file can be created at `path`, so that commands fail before their work."""
    if not path.name or path.is_dir():
        raise UsageError(f"{path}: found a folder, expected a file name")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the parent folder does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: the folder is not writable")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` when the block ends without an exception, and never partially.

    Raises
    ------
    UsageError
        If no file can be created at `path`.
    """
    check_destination(path)
    temporary = path.with_name(TEMPORARY_PREFIX + secrets.token_hex(8))
    unnamed = open_unnamed(path.parent)
    try:
        with temporary.open("xb") if unnamed is None else open(unnamed, "wb") as file:
            yield file
            file.flush()
            with with_filename(path):
                os.fsync(file.fileno())
            if unnamed is not None:
                name_file(unnamed, temporary)
        retry_eintr(os.rename, temporary, path)
    except BaseException:
        remove_tree(temporary)
        raise
    fsync_path(path.parent)


def open_csv(file: BinaryIO, encoding: str = "utf-8", errors: str = "surrogatepass") -> io.TextIOWrapper:
    """Return the text of a CSV file for a reader of the csv module, as `write_rows` writes it."""
    # The limit of the csv module is one of the process: 131,072 by default.
    csv.field_size_limit(MAX_FIELD_BYTES)
    return io.TextIOWrapper(file, encoding, errors, newline="")


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file as RFC 4180 describes it, in UTF-8, with floats in full precision.

    Ids may hold lone surrogates, which are encoded like other characters: `open_csv` reads them again.

    The file gets its name when all rows are on disk; on a failure an existing file stays.

    Parameters
    ----------
    path : Path
    header : sequence of str
    rows : iterable of sequence
        Consumed while the file is written.
    """
    with atomic_write(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogatepass", newline="")
        writer = csv.writer(text)
        writer.writerow(header)
        writer.writerows(rows)
        text.detach()


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that holds `path` or its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def require_free_bytes(path: Path, needed_bytes: int, what: str) -> None:
    """Raise DiskFullError if the file system of `path` has fewer free bytes than `what` is known to need."""
    free = free_bytes(path)
    if needed_bytes > free:
        raise DiskFullError(
            f"{path}: {what} needs at least {needed_bytes:,} bytes, {free:,} are free on the file system; "
            "free some space or choose another destination"
        )


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
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in _LOCK_HELD_ERRORS or time.monotonic() >= until:
                    raise
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
            if _lock_error(fd, fcntl.LOCK_SH) in _LOCK_HELD_ERRORS or not is_same_file(fd, path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

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
        yield _lock_error(fd, fcntl.LOCK_EX) not in (*_LOCK_HELD_ERRORS, errno.EBADF)
    finally:
        os.close(fd)


def _lock_error(fd: int, kind: int) -> int:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
