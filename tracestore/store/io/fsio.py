"""File system operations of the commit protocol: write, fsync, link, rename."""

import contextlib
import csv
import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, DiskFullError, StorageError, UsageError
from tracestore.platform_support import name_file, open_unnamed, rename_exclusive
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.format.paths import TEMPORARY_PREFIX

# Default size limit of JSON documents: results.json of 1,000,000 traces and 25 runs stays below it.
MAX_JSON_BYTES = 4 << 30

# Largest field of a CSV file that is read. The longest id and every other value that `write_rows` gets are shorter.
MAX_FIELD_BYTES = 64 << 20
_MAX_IOVECS = 512  # per call of pwritev; IOV_MAX is 1,024
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


class with_filename:
    """Add the file name to an OSError of a call on a file descriptor.

    A class, because each small array that is written enters it, and a generator takes three times as long.
    """

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)


def fsync_path(path: Path) -> None:
    """Synchronize a file or folder with the disk. A failure is raised and never retried."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with with_filename(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Synchronize all files and folders in a folder, and the folder, with the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in (*sorted(names), ""):
            fsync_path(Path(parent, name))


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


@contextlib.contextmanager
def created(path: Path, *, mode: int = 0o444, is_synced: bool = True) -> Iterator[int]:
    """Create a file and yield its descriptor. After the block the file is synchronized with the disk, not its folder.

    Without `is_synced` the caller does that, or removes the file again.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with with_filename(path):
            yield fd
            os.fchmod(fd, mode)
            if is_synced:
                os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes | memoryview, *, mode: int = 0o444, is_synced: bool = True) -> None:
    """Create a file with these bytes; see created()."""
    with created(path, mode=mode, is_synced=is_synced) as fd:
        write_all(fd, memoryview(data))


def try_link(fd: int, source: Path, path: Path) -> bool:
    """Give the file open as `fd`, which lies at `source`, the new name `path` too; False where links are refused."""
    try:
        retry_eintr(os.link, source, path)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    if os.path.samestat(os.fstat(fd), os.lstat(path)):
        with with_filename(path):
            os.fsync(fd)  # The program that wrote the file may not have done that.
        return True
    retry_eintr(os.unlink, path)
    return False


def copy_file(fd: int, path: Path, entry: FileEntry) -> None:
    """Copy the file open as `fd` to the new file `path`. CorruptStoreError unless it is the committed one."""
    if (size := os.fstat(fd).st_size) != entry.size:
        raise size_mismatch(entry, size)
    crc = 0
    with created(path) as out:
        while chunk := os.read(fd, 1 << 20):
            write_all(out, memoryview(chunk))
            crc = crc32c(chunk, crc)
    if crc != entry.crc32c:
        raise CorruptStoreError(f"{entry.path}: checksum mismatch")


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
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
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


@contextlib.contextmanager
def map_os_errors(path: Path, needed_bytes: Callable[[], int] | None = None) -> Iterator[None]:
    """Convert an OSError of the block to an error of tracestore.

    ENOSPC and EDQUOT become DiskFullError, whose message quotes needed_bytes() if that is more than what is free: the
    bytes of compressed sources are not. Missing permissions and invalid paths become UsageError, and all other errors
    StorageError.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free, needed = free_bytes(path), needed_bytes() if needed_bytes else 0
            amount = f"about {needed:,}" if needed > free else "more"
            raise DiskFullError(
                f"no space left on the file system of {path}: {free:,} bytes are free, {amount} were needed"
            ) from error
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


def _is_new(unnamed: int, path: Path, temporary: Path | None) -> bool:
    """Give an unnamed file its name, so that a killed process leaves no other; if it exists, a temporary one instead."""
    try:
        name_file(unnamed, path)
    except FileExistsError:
        if temporary is None:
            raise
        name_file(unnamed, temporary)
        return False
    return True


@contextlib.contextmanager
def atomic_write(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` when the block ends without an exception, and never partially.

    Raises
    ------
    UsageError
        If no file can be created at `path`, or, without `overwrite`, if there is one when the block ends.
    """
    check_destination(path)
    temporary = path.with_name(TEMPORARY_PREFIX + os.urandom(8).hex())
    unnamed = open_unnamed(path.parent)
    try:
        with temporary.open("xb") if unnamed is None else open(unnamed, "wb") as file:
            yield file
            file.flush()
            with with_filename(path):
                os.fsync(file.fileno())
            is_named = unnamed is not None and _is_new(unnamed, path, temporary if overwrite else None)
        if not is_named and (overwrite or not rename_exclusive(temporary, path)):
            if not overwrite and os.path.lexists(path):
                raise FileExistsError(path)
            retry_eintr(os.rename, temporary, path)
    except BaseException as error:
        remove_tree(temporary)
        if isinstance(error, FileExistsError) and not overwrite:
            raise UsageError(f"{path}: exists; choose another name, or replace it with --overwrite") from None
        raise
    fsync_path(path.parent)


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Create or replace a file; see atomic_write()."""
    with atomic_write(path) as file:
        file.write(data)


def open_csv(file: BinaryIO, encoding: str = "utf-8", errors: str = "surrogatepass") -> io.TextIOWrapper:
    """Return the text of a CSV file for a reader of the csv module, as `write_rows` writes it."""
    # The limit of the csv module is one of the process: 131,072 by default.
    csv.field_size_limit(MAX_FIELD_BYTES)
    return io.TextIOWrapper(file, encoding, errors, newline="")


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]], *, overwrite: bool = True) -> None:
    """Write a CSV file as RFC 4180 describes it, in UTF-8, with floats in full precision.

    Ids may hold lone surrogates, which are encoded like other characters: `open_csv` reads them again.

    The file gets its name when all rows are on disk; on a failure an existing file stays.

    Parameters
    ----------
    path : Path
    header : sequence of str
    rows : iterable of sequence
        Consumed while the file is written.
    overwrite : bool
        See `atomic_write`.
    """
    with atomic_write(path, overwrite=overwrite) as file:
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
