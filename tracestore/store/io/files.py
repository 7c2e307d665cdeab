"""The committed files of a store, wherever they lie."""

import errno
import os
import stat
from pathlib import Path
from typing import Protocol

from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format.entries import FileEntry, size_mismatch


class RemoteURL(str):
    """Where a store lies that is not on this machine: scheme://bucket/folder."""

    @property
    def name(self) -> str:
        return self.rstrip("/").rsplit("/", 1)[-1]


def parse_location(store: str | os.PathLike[str]) -> Path | RemoteURL:
    """The folder or the address that a user named."""
    text = os.fspath(store)
    return RemoteURL(text) if "://" in text else Path(text)


def cache_dir() -> Path:
    """Where files of remote stores are kept: $TRACESTORE_CACHE_DIR, or tracestore/ in the user's cache
    folder."""
    given = os.environ.get("TRACESTORE_CACHE_DIR")
    if given:
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracestore"
    except RuntimeError:
        raise UsageError("no home folder for files of remote stores: set TRACESTORE_CACHE_DIR") from None


def local_dir(store: str | os.PathLike[str]) -> Path:
    """The folder here that holds what is written to a store: itself, or the cache's."""
    place = parse_location(store)
    return place if isinstance(place, Path) else cache_dir()


class StoreFiles(Protocol):
    """How a reader gets at the committed files of one store, which never change."""

    def read(self, entry: FileEntry) -> bytes:
        """All bytes of a small file. CorruptStoreError where it has another size, OSError where
        it cannot be read (FileNotFoundError where it is gone)."""

    def map(self, entry: FileEntry) -> MappedFile:
        """The file, mapped. ValueError where it has another size, OSError as of `read`."""


class LocalFiles:
    """Those of a store in a folder. The folder itself may be a link; inside it none is followed,
    and nothing but regular files is opened."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, entry: FileEntry) -> bytes:
        fd = self.open(entry.path)
        try:
            size = os.fstat(fd).st_size
            if size != entry.size:
                raise size_mismatch(entry, size)
            return _read_all(fd, size)
        finally:
            os.close(fd)

    def read_small(self, path: str, max_bytes: int) -> bytes:
        """All bytes of a file that no manifest names. CorruptStoreError where it is larger than
        max_bytes or not a file, OSError as of `read`."""
        fd = self.open(path)
        try:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise CorruptStoreError(f"{path}: {size} bytes, expected at most {max_bytes}")
            return _read_all(fd, size)
        finally:
            os.close(fd)

    def map(self, entry: FileEntry) -> MappedFile:
        fd = self.open(entry.path)
        try:
            return MappedFile(self.root / entry.path, entry.size, entry.path, fd)
        finally:
            os.close(fd)

    def open(self, path: str) -> int:
        """Return a descriptor to read a file of the store, path relative to its folder.

        Raises
        ------
        CorruptStoreError
            Where a link is on the way or it is no regular file.
        OSError
            Where it cannot be opened; FileNotFoundError where it is not there.
        """
        *folders, name = path.split("/")
        parent = self._open_folder(folders)
        try:
            if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise not_regular_error(self.root, path)
            # O_NONBLOCK: it may have become a FIFO since.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise not_regular_error(self.root, path)
            return fd
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise not_regular_error(self.root, path) from None
            error.filename = str(self.root / path)
            raise
        finally:
            os.close(parent)

    def list_dir(self, folder: str) -> list[str]:
        """Return the names in a folder of the store; none where it is not there. CorruptStoreError
        where it is a link or no folder."""
        try:
            fd = self._open_folder(folder.split("/"))
        except FileNotFoundError:
            return []
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _open_folder(self, parts: list[str]) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        fd = os.open(self.root, flags)
        for k, part in enumerate(parts):
            try:
                inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=fd)
            except OSError as error:
                path = "/".join(parts[: k + 1])
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise not_regular_error(self.root, path) from None
                error.filename = str(self.root / path)
                raise
            finally:
                os.close(fd)
            fd = inner
        return fd


def not_regular_error(store: Path, path: str) -> CorruptStoreError:
    """The error for what is no regular file or folder where a store has one."""
    if (store / path).is_symlink():
        return CorruptStoreError(
            f"{path}: a link, which is not followed inside a store; for a copy without links run: "
            f"cp -rL {store} NEW_STORE"
        )
    return CorruptStoreError(f"{path}: not a regular file or folder")


def _read_all(fd: int, size: int) -> bytes:
    """Read at most `size` bytes; fewer where the file was cut short meanwhile."""
    pieces = []
    while size and (piece := os.read(fd, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
