"""The committed files of a store, wherever they lie."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tracestore._core.mapping import MappedFile
from tracestore.errors import StoreDamagedError, UsageError


@dataclass(frozen=True)
class FileEntry:
    """A file as the manifest names it: path in the store, size and crc32c of all its bytes."""

    path: str
    size: int
    crc32c: int


class Address(str):
    """Where a store lies that is not on this machine: scheme://bucket/folder."""

    @property
    def name(self) -> str:
        return self.rstrip("/").rsplit("/", 1)[-1]


def place_of(store: str | os.PathLike[str]) -> Path | Address:
    """The folder or the address that a user named."""
    text = os.fspath(store)
    return Address(text) if "://" in text else Path(text)


def cache_folder() -> Path:
    """Where files of remote stores are kept: $TRACESTORE_CACHE, or tracestore/ in the user's cache
    folder."""
    given = os.environ.get("TRACESTORE_CACHE")
    if given:
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracestore"
    except RuntimeError:
        raise UsageError("no home folder for files of remote stores: set TRACESTORE_CACHE") from None


def folder_of(store: str | os.PathLike[str]) -> Path:
    """The folder here that holds what is written to a store: itself, or the cache's."""
    place = place_of(store)
    return place if isinstance(place, Path) else cache_folder()


def wrong_size(entry: FileEntry, found: int) -> StoreDamagedError:
    return StoreDamagedError(f"{entry.path}: {found} bytes where {entry.size} were committed")


class StoreFiles(Protocol):
    """How a reader gets at the committed files of one store, which never change."""

    def read(self, entry: FileEntry) -> bytes:
        """All bytes of a small file. StoreDamagedError where it has another size, OSError where
        it cannot be read (FileNotFoundError where it is gone)."""

    def map(self, entry: FileEntry) -> MappedFile:
        """The file, mapped. ValueError where it has another size, OSError as of `read`."""


class LocalFiles:
    """Those of a store in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, entry: FileEntry) -> bytes:
        data = (self.root / entry.path).read_bytes()
        if len(data) != entry.size:
            raise wrong_size(entry, len(data))
        return data

    def map(self, entry: FileEntry) -> MappedFile:
        return MappedFile(self.root / entry.path, entry.size, entry.path)
