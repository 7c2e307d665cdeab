"""Plans of conversions and receipts of their tasks: small files of a store that no generation names."""

import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tracestore._core.mapping import MappedFile
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.io.files import LocalFiles, ReadableFiles, RemoteURL, parse_location
from tracestore.store.io.ownership import remove_own

if TYPE_CHECKING:
    from tracestore.store.remote.remote_files import RemoteFiles

_MAX_RECEIPT_BYTES = 1 << 30
_REQUESTS = 16  # at a time


class PlanFiles:
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

    def __init__(self, path: Path) -> None:
        self.location = self._store = path.absolute()
        self.files = self._local = LocalFiles(self._store)

    def times(self) -> dict[str, float]:
        """Return when each file was written, in seconds since 1970, by its path in the store."""
        names = self._local.list_dir(paths.RECEIPTS) if self._store.is_dir() else ()
        found: dict[str, float] = {}
        for path in (f"{paths.RECEIPTS}/{name}" for name in sorted(names)):
            with suppress(FileNotFoundError):  # Another process may remove it.
                found[path] = os.lstat(self._store / path).st_mtime
        return found

    def map(self, path: str) -> MappedFile:
        """Return a map of a file; FileNotFoundError if it does not exist."""
        return self._local.map_path(path)

    def sizes(self, found: Iterable[str]) -> dict[str, int]:
        """Return the sizes of the files of segments that exist; CorruptStoreError for what is not a file."""
        sizes: dict[str, int] = {}
        for path in found:
            with suppress(FileNotFoundError):
                fd = self._local.open(path)
                sizes[path] = os.fstat(fd).st_size
                os.close(fd)
        return sizes

    def remove(self, found: Iterable[str]) -> None:
        """Remove files; a missing one is no error."""
        for path in found:
            remove_own(self._store, path)

    def check(self, entries: Iterable[FileEntry]) -> None:
        """Raise CorruptStoreError if a file is missing or has another size."""
        listed = list(entries)
        sizes = self.sizes(entry.path for entry in listed)
        for entry in listed:
            if (size := sizes.get(entry.path)) != entry.size:
                raise size_mismatch(entry, size)


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

    def sizes(self, found: Iterable[str]) -> dict[str, int]:
        # Also of those that the cache has: others may have removed the objects. A list has all files of a segment.
        folders = dict.fromkeys("/".join(path.split("/")[:2]) for path in found)
        with ThreadPoolExecutor(_REQUESTS) as pool:
            objects = chain.from_iterable(pool.map(self._objects.list_objects, folders))
            return {entry.path: entry.size for entry in objects}

    def remove(self, found: Iterable[str]) -> None:
        self._objects.delete(list(found))


def open_plan_files(store: str | os.PathLike[str]) -> PlanFiles:
    """Return the plans and receipts of a store, which need not exist, by its path or URL."""
    location = parse_location(store)
    if isinstance(location, Path):
        return PlanFiles(location)
    # Imported here because remote stores need an extra.
    from tracestore.store.remote.remote_files import RemoteFiles

    return _RemotePlanFiles(RemoteFiles.open(location))
