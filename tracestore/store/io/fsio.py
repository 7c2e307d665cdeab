"""File system steps of the commit protocol: write, fsync, rename, lock."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tracestore.errors import DiskFullError, StorageError, StoreLockedError, UsageError
from tracestore.store.format.paths import TEMPORARY_PREFIX

# Of results.json and the like: 1,000,000 traces tested 25 times take less.
MAX_JSON_BYTES = 4 << 30

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_MAX_PIECES = 512  # of one call; IOV_MAX is 1,024


def retry_eintr(call: Callable[..., Any], *arguments: Any) -> Any:
    """The call, repeated while a signal interrupts it. os.open, write and fsync do so
    themselves; mkdir, rename, unlink, rmdir and truncate do not, and network file
    systems interrupt them."""
    while True:
        try:
            return call(*arguments)
        except InterruptedError:
            continue


@contextlib.contextmanager
def with_filename(path: Path) -> Iterator[None]:
    """An OSError of a call on a descriptor names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fsync_path(path: Path) -> None:
    """fsync of a file or folder. A failure is raised and never retried."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with with_filename(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """os.write until everything is written (short writes are legal)."""
    while len(data):
        data = data[os.write(fd, data) :]


def pwritev_all(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    """The pieces one behind the other from `offset` on, without a copy. What failed
    half-way can be written again."""
    left = list(pieces)
    while left:
        written = os.pwritev(fd, left[:_MAX_PIECES], offset)
        offset += written
        if written == sum(map(len, left[:_MAX_PIECES])):
            del left[:_MAX_PIECES]
            continue
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def write_file(path: Path, data: bytes | memoryview, *, mode: int = 0o444) -> None:
    """A new file with these bytes, on disk when the function returns. Its folder is not synced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with with_filename(path):
            write_all(fd, memoryview(data))
            os.fchmod(fd, mode)
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Puts a file in place atomically: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    remove_tree(temporary)
    write_file(temporary, data)
    retry_eintr(os.rename, temporary, path)
    fsync_path(path.parent)


def open_regular(path: Path) -> BinaryIO:
    """A file to read. UsageError where it is a FIFO, a device or a folder: reading those may never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path}: not a regular file")
    return open(fd, "rb")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The document in a file. ValueError where it is not JSON or larger than max_bytes; OSError and
    UsageError as of open_regular."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("too deeply nested") from None


def makedirs(path: Path) -> None:
    """Path.mkdir(parents=True, exist_ok=True)."""
    if not path.is_dir():
        makedirs(path.parent)
        with contextlib.suppress(FileExistsError):  # another thread made it
            retry_eintr(os.mkdir, path)


def remove_tree(path: Path) -> None:
    """Removes a folder or file of ours if it is there."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            retry_eintr(os.unlink, path)
        return
    for name in os.listdir(path):
        remove_tree(path / name)
    retry_eintr(os.rmdir, path)


def try_remove_tree(path: Path) -> None:
    """remove_tree of what lies in SPOOL_FOLDER: the next writer removes what stays."""
    with contextlib.suppress(OSError):
        remove_tree(path)


@contextlib.contextmanager
def map_os_errors(path: Path, needed_bytes: Callable[[], int] | None = None) -> Iterator[None]:
    """ENOSPC and EDQUOT become DiskFullError, which says what needed_bytes() gives;
    refusals by the file system become UsageError, the rest StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(path)
            wanted = f"about {needed_bytes():,} bytes were needed, " if needed_bytes else ""
            raise DiskFullError(f"no space left on the file system of {path}: {wanted}{free:,} are free") from error
        where = error.filename or path
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise UsageError(f"cannot write {where}: {error.strerror}") from error
        raise StorageError(f"{where}: {error.strerror}; what was committed before stays") from error


def check_destination(path: Path) -> None:
    """UsageError where no file of that name can be made: before the work, not after it."""
    if not path.name or path.is_dir():
        raise UsageError(f"{path}: a folder, expected the name of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder it should lie in does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: the folder does not allow it")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write that has its name when the block has ended, on the disk, or not at all.
    UsageError as of check_destination."""
    check_destination(path)
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    remove_tree(temporary)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            with with_filename(temporary):
                os.fsync(file.fileno())
        retry_eintr(os.rename, temporary, path)
    except BaseException:
        remove_tree(temporary)
        raise
    fsync_path(path.parent)


def free_bytes(path: Path) -> int:
    """Free space of the file system that holds `path` or its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


class WriterLock:
    """An exclusive flock on STORE/lock; the kernel drops it when the process dies."""

    def __init__(self, store: Path) -> None:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(store / "lock", flags, 0o644)
        except FileNotFoundError:
            raise StoreLockedError(f"{store}: another writer has just taken its empty store away") from None
        try:
            with with_filename(store / "lock"):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A writer that committed nothing takes its store away with the file: a lock
            # on that file would keep nobody from making the store anew.
            if not is_same_file(self._fd, store / "lock"):
                raise BlockingIOError(errno.EWOULDBLOCK, "removed")
        except OSError as error:
            os.close(self._fd)
            if error.errno in _HELD:
                raise StoreLockedError(f"{store}: another writer holds the store") from None
            raise

    def text(self) -> bytes:
        """What the file says, at most 64 bytes of it."""
        return os.pread(self._fd, 64, 0)

    def write(self, text: bytes) -> None:
        """Has the file say this and nothing else, durably."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)
        os.fsync(self._fd)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_same_file(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


class Pin:
    """A shared flock on manifest/<g>: generation g and all it names stay as long as this
    object lives. FileNotFoundError where the manifest is gone or on its way.

    A lock belongs to the open file: a forked child keeps the pin until it ends too, and
    a writer in the same process as a reader is held off like any other. Where the file
    system has no locks nothing is pinned; maps of removed files stay readable.
    """

    def __init__(self, fd: int, path: Path) -> None:
        """fd: the manifest, open for reading; closed with the pin. path: where it lies."""
        self._fd = -1
        try:
            if _lock_error(fd, fcntl.LOCK_SH) in _HELD or not is_same_file(fd, path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def read(self, max_bytes: int) -> bytes:
        """The bytes of the pinned manifest; ValueError where they are more than max_bytes."""
        data = b""
        while piece := os.pread(self._fd, 1 << 20, len(data)):
            data += piece
            if len(data) > max_bytes:
                raise ValueError(f"more than {max_bytes} bytes")
        return data

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the interpreter the names of this module may be gone.
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def try_exclusive(fd: int) -> Iterator[bool]:
    """Whether nobody pins the manifest that is open as fd; nobody can while the context lasts, at the
    end of which it is closed."""
    try:
        # EBADF: locks of files open for writing only, so that shared ones may be held.
        yield _lock_error(fd, fcntl.LOCK_EX) not in (*_HELD, errno.EBADF)
    finally:
        os.close(fd)


def _lock_error(fd: int, kind: int) -> int:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
