"""Plans of conversions and receipts of their tasks: small files of a store that no generation names."""

import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.io.files import LocalFiles, ReadableFiles, RemoteURL, parse_location, reading_committed
from tracestore.store.io.ownership import remove_own

if TYPE_CHECKING:
    from tracestore.store.remote.remote_files import RemoteFiles

_MAX_RECEIPT_BYTES = 1 << 30
_REQUESTS = 16  # at a time


class PlanFiles(Protocol):
    """The folder `receipts/` of a store. Writers add to it by CommitTarget.create_file() and keep_file().

    Attributes
    ----------
    location : Path or RemoteURL
        The store, for any process: the path is absolute.
    files : ReadableFiles
        The files of the store.
    """

    location: Path | RemoteURL
    files: ReadableFiles

    def times(self) -> dict[str, float]:
        """Return when each file was written, in seconds since 1970, by its path in the store."""

    def map(self, path: str) -> MappedFile:
        """Return a map of a file; FileNotFoundError if it does not exist."""

    def has_segment(self, path: str) -> bool:
        """Return whether a segment is complete."""

    def check(self, entries: Iterable[FileEntry]) -> None:
        """Raise CorruptStoreError if a file is missing or has another size."""

    def remove(self, found: Iterable[str]) -> None:
        """Remove files; a missing one is no error."""


def open_plan_files(store: str | os.PathLike[str]) -> PlanFiles:
    """Return the plans and receipts of a store, which need not exist, by its path or URL."""
    location = parse_location(store)
    if isinstance(location, Path):
        return _LocalPlanFiles(LocalFiles(location.absolute()))
    # Imported here because remote stores need an extra.
    from tracestore.store.remote.remote_files import RemoteFiles

    return _RemotePlanFiles(RemoteFiles.open(location))


class _LocalPlanFiles(PlanFiles):
    def __init__(self, files: LocalFiles) -> None:
        self.files = self._local = files
        self.location = self._store = files.root

    def times(self) -> dict[str, float]:
        names = self._local.list_dir(paths.RECEIPTS) if self._store.is_dir() else ()
        found: dict[str, float] = {}
        for path in (f"{paths.RECEIPTS}/{name}" for name in sorted(names)):
            with suppress(FileNotFoundError):  # Another process may remove it.
                found[path] = os.lstat(self._store / path).st_mtime
        return found

    def map(self, path: str) -> MappedFile:
        fd = self._local.open(path)
        try:
            return MappedFile(self._store / path, name=path, fd=fd)
        finally:
            os.close(fd)

    def has_segment(self, path: str) -> bool:
        return (self._store / path).is_dir()

    def check(self, entries: Iterable[FileEntry]) -> None:
        for entry in entries:
            with reading_committed(entry.path):
                fd = self._local.open(entry.path)
                try:
                    _require_size(entry, os.fstat(fd).st_size)
                finally:
                    os.close(fd)

    def remove(self, found: Iterable[str]) -> None:
        for path in found:
            remove_own(self._store, path)


class _RemotePlanFiles(PlanFiles):
    def __init__(self, files: "RemoteFiles") -> None:
        self.files, self._objects = files, files.object_store
        self._objects.require_writable()
        self.location = self._objects.address

    def times(self) -> dict[str, float]:
        return {found.path: found.written for found in self._objects.list_objects(paths.RECEIPTS)}

    def map(self, path: str) -> MappedFile:
        with tempfile.TemporaryFile() as file:
            file.write(self._objects.read(path, _MAX_RECEIPT_BYTES))
            file.flush()
            return MappedFile(path, name=path, fd=file.fileno())

    def has_segment(self, path: str) -> bool:
        return self._objects.size(paths.segment_rows(path)) is not None

    def check(self, entries: Iterable[FileEntry]) -> None:
        # Also those that the cache has: others may have removed the objects.
        listed = list(entries)
        with ThreadPoolExecutor(_REQUESTS) as pool:
            sizes = pool.map(lambda entry: self._objects.size(entry.path), listed)
            for entry, size in zip(listed, sizes, strict=True):
                _require_size(entry, size)

    def remove(self, found: Iterable[str]) -> None:
        self._objects.delete(list(found))


def _require_size(entry: FileEntry, size: int | None) -> None:
    if size != entry.size:
        raise CorruptStoreError(f"{entry.path}: missing") if size is None else size_mismatch(entry, size)
