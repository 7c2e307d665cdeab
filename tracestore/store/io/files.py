"""Access to the committed files of a store, and locations of stores."""

import contextlib
import errno
import json
import os
import shlex
import stat
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, UsageError, escape_unprintable
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry, FilesOf, Layers, PartialFile, size_mismatch
from tracestore.store.format.manifest import MAX_MANIFEST_BYTES, Manifest, parse_manifest
from tracestore.store.io import fsio
from tracestore.store.io.locks import Pin

MAX_ROOT_BYTES = 2 << 20  # of the root zarr.json, which holds up to 64 provenances


class RemoteURL(str):
    """URL of a remote store: scheme://bucket/folder."""

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.rstrip("/").rsplit("/", 1)[-1]


class Locations(tuple[Path | RemoteURL, ...]):
    """Locations of several stores that are opened as one."""

    def __str__(self) -> str:
        return " + ".join(map(str, self))

    @property
    def name(self) -> str:
        """Last component of each path."""
        return " + ".join(location.name for location in self)


def is_same_location(one: Path | RemoteURL | Locations, other: Path | RemoteURL) -> bool:
    """Return whether two locations are those of one store."""
    if isinstance(one, Path) and isinstance(other, Path):
        return other.exists() and os.path.samefile(one, other)
    return str(one).rstrip("/") == str(other).rstrip("/")


def parse_location(store: str | os.PathLike[str]) -> Path | RemoteURL:
    """Return the path or the URL of a store that a user named."""
    text = os.fspath(store)
    return RemoteURL(text) if "://" in text else Path(text)


@contextlib.contextmanager
def reading_committed(path: str, what: str = "", prefix: str = "") -> Iterator[None]:
    """Raise CorruptStoreError if a committed file is missing or damaged.

    `what` precedes the reason, and `prefix` (see StoreFiles) the path.
    """
    try:
        yield
    except CorruptStoreError as error:
        if str(error).startswith(prefix):
            raise
        raise CorruptStoreError(f"{prefix}{error}") from None
    except FileNotFoundError:
        raise CorruptStoreError(f"{prefix}{path}: {what}missing") from None
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CorruptStoreError(f"{prefix}{path}: {what}{escape_unprintable(reason, 300)}") from None


class FilePrefetcher(Protocol):
    """Prefetches files during one pass over a store."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def advance(self, batch: int) -> None:
        """Record that this batch is read next and that those before it have been read."""


class StoreFiles(Protocol):
    """Read access to the committed files of one store, which never change.

    Attributes
    ----------
    prefix : str
        Precedes the paths of files in errors: the location of the store and a slash, if several are opened as one.
    cache_bytes : int or None
        Bytes of the cache that files are fetched into; None for local files.
    """

    prefix: str = ""
    cache_bytes: int | None = None

    @property
    def has_ranges(self) -> bool:
        """True if parts of files are fetched when they are needed."""
        return False

    def read(self, entry: FileEntry) -> bytes:
        """Return all bytes of a small file; see map() for the errors."""
        return self.map(entry).read(0, entry.size)

    def map(self, entry: FileEntry) -> MappedFile:
        """Return a memory map of a file.

        Raises
        ------
        ValueError
            If the file has another size than `entry`.
        OSError
            If it cannot be read; FileNotFoundError if it does not exist.
        """

    def map_layers(self, entry: FileEntry, layers: Layers, data_bytes: int) -> PartialFile | None:
        """Return a map of a file whose layers are fetched when they are needed; None to map the whole file.

        `layers` end in bytes. The index of the shard follows `data_bytes` of the array with its padding.
        """
        return None


class ReadableFiles(StoreFiles, Protocol):
    """The files and the generations of a store, for readers.

    What a class does not define is that of a local store, whose files stay while their generation is pinned.

    Attributes
    ----------
    keeps_generations : bool
        A generation stays readable without a pin.
    location : Path, RemoteURL or Locations
    """

    keeps_generations: bool = False
    location: Path | RemoteURL | Locations

    def generations(self) -> list[int]:
        """Return the numbers of the generations that have a manifest, newest first."""

    def read_manifest(self, generation: int, max_bytes: int) -> tuple[bytes, "Pin | None"]:
        """Return the bytes of a manifest, and the pin that keeps its generation.

        Raises
        ------
        FileNotFoundError
            If a writer has removed the generation.
        OSError, ValueError
            If the manifest cannot be read or is larger than max_bytes.
        """

    def list_dir(self, folder: str) -> list[str]:
        """Return the names in a folder of the store; none if it does not exist, or a web server would have to list it."""

    def read_small(self, path: str, max_bytes: int) -> bytes:
        """Return all bytes of a file that no manifest lists; OSError if it cannot be read.

        CorruptStoreError if it is larger than `max_bytes` or not a regular file.
        """

    def load_manifest(self, generation: int) -> Manifest:
        """Return a manifest. CorruptStoreError if it is damaged, FileNotFoundError if it is gone."""
        path = paths.manifest(generation)
        try:
            data = self.read_small(path, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CorruptStoreError(f"{path}: {error.strerror}") from None
        return parse_manifest(data, generation)

    def no_store_error(self) -> Exception:
        """Return the error for a location without any generation."""

    def require_root(self) -> None:
        """Raise UsageError unless the location has the metadata of a store's root."""

    def link(self, entry: FileEntry, path: Path) -> None:
        """Make a hard link `path` to a file, or a copy if links are refused or the store is remote. It is durable then.

        CorruptStoreError if it is missing or has another size, or a copy another checksum.
        """

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Make several small files available at once."""

    def evicted(self) -> Sequence[str]:
        """Return the paths of files that were mapped and have left the cache since the last call."""
        return ()

    def prefetch(self, files_of: FilesOf, start: int, total: int) -> FilePrefetcher | None:
        """Return a prefetcher for the batches start .. total - 1; None for local files, which need none.

        `files_of(batch)` lists what a batch needs.
        """
        return None

    def reopen(self) -> Self:
        """Return the same files with state of its own."""
        return self

    def close(self) -> None:
        """Release what the files hold."""


class LocalFiles(ReadableFiles):
    """Access to the files of a local store.

    The store's folder itself may be a symbolic link. Inside it no link is followed; only regular files are opened.
    """

    def __init__(self, root: Path) -> None:
        self.root = self.location = root
        self._pinned: tuple[int, weakref.ref[Pin]] | None = None  # the generation that was read last

    def generations(self) -> list[int]:
        """See ReadableFiles."""
        return sorted((int(n) for n in self.list_dir("manifest") if paths.is_generation(n)), reverse=True)

    def read_manifest(self, generation: int, max_bytes: int) -> tuple[bytes, Pin]:
        """See ReadableFiles."""
        path = paths.manifest(generation)
        pin = Pin(self.open(path), self.root / path)
        try:
            self._pinned = generation, weakref.ref(pin)
            return pin.read(max_bytes), pin
        except BaseException:
            pin.close()
            raise

    def no_store_error(self) -> Exception:
        """See ReadableFiles."""
        if not self.root.exists():
            return UsageError(f"{self.root}: no such store")
        if (self.root / "lock").exists():
            return UsageError(f"{self.root}: the store is empty, nothing has been committed")
        return UsageError(f"{self.root}: not a store")

    def require_root(self) -> None:
        """See ReadableFiles."""
        if not self.has_root():
            raise UsageError(
                f"{self.root}: not a store, or one without its zarr.json (tracestore verify {shlex.quote(str(self.root))} --repair)"
            )

    def has_root(self) -> bool:
        """Return whether the root zarr.json is that of a store of this format."""
        try:
            data = json.loads(self.read_small("zarr.json", MAX_ROOT_BYTES))
            schema.Attributes.from_json(data["attributes"]["tracestore"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, CorruptStoreError):
            return False
        return bool(data.get("node_type") == "group")

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Do nothing: the files are here."""

    def close(self) -> None:
        """Do nothing."""

    def read(self, entry: FileEntry) -> bytes:
        """Return all bytes of a small file; see StoreFiles."""
        data = self.read_small(entry.path, entry.size)
        if len(data) != entry.size:
            raise size_mismatch(entry, len(data))
        return data

    def read_small(self, path: str, max_bytes: int) -> bytes:
        """See ReadableFiles."""
        fd = self.open(path)
        try:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise CorruptStoreError(f"{path}: found {size} bytes, expected at most {max_bytes}")
            return _read_all(fd, size)
        finally:
            os.close(fd)

    def map(self, entry: FileEntry) -> MappedFile:
        """Return a memory map of a file; see StoreFiles. CorruptStoreError if another store has replaced this one."""
        try:
            return self.map_path(entry.path, entry.size)
        except FileNotFoundError:
            number, pin = (0, None) if self._pinned is None else (self._pinned[0], self._pinned[1]())
            if pin is None or not pin.is_gone:
                raise
        where = f"{self.prefix}{paths.manifest(number)}"
        raise CorruptStoreError(f"{where}: generation {number} is gone; open the store again")

    def map_path(self, path: str, size: int = -1) -> MappedFile:
        """Return a memory map of a file, which may have any size if `size` is -1."""
        fd = self.open(path)
        try:
            return MappedFile(self.root / path, size, self.prefix + path, fd)
        finally:
            os.close(fd)

    def link(self, entry: FileEntry, path: Path) -> None:
        """See ReadableFiles."""
        with reading_committed(entry.path):
            fd = self.open(entry.path)
        try:
            if os.fstat(fd).st_size != entry.size or not fsio.try_link(fd, self.root / entry.path, path):
                fsio.copy_file(fd, path, entry)
        finally:
            os.close(fd)

    def open(self, path: str) -> int:
        """Open a file for reading and return its descriptor; `path` is relative to the store.

        Raises
        ------
        CorruptStoreError
            If a component of the path is a symbolic link, or the file is not a regular file.
        OSError
            If it cannot be opened; FileNotFoundError if it does not exist.
        """
        *folders, name = path.split("/")
        parent = self._open_folder(folders)
        try:
            if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise not_regular_error(self.root, path)
            # O_NONBLOCK: another process may have replaced the file by a FIFO since the stat.
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
        """Return the names in a folder of the store, or an empty list if the folder does not exist.

        Raises
        ------
        CorruptStoreError
            If it is a symbolic link or not a folder.
        """
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
    """Return the error for a path of a store that is not a regular file or folder."""
    if (store / path).is_symlink():
        return CorruptStoreError(
            f"{path}: found a symbolic link, which is not followed inside a store. To make a copy without links, run: "
            f"cp -rL {store} NEW_STORE"
        )
    return CorruptStoreError(f"{path}: not a regular file or folder")


def _read_all(fd: int, size: int) -> bytes:
    """Return the next `size` bytes, or fewer if the file is truncated at the same time."""
    chunks = []
    while size and (chunk := os.read(fd, size)):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
