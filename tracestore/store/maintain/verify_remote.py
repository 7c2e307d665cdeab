"""Verification of every object of a remote store."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from tracestore._core.mapping import MappedFile
from tracestore.errors import UsageError
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.io import fsio
from tracestore.store.io.files import RemoteURL, StoreFiles
from tracestore.store.maintain.verifier import StoreVerifier, VerifyReport
from tracestore.store.remote.remote_files import RemoteFiles

_REQUESTS = 8
# How often the store is read again while a writer changes it.
_ATTEMPTS = 5


class _DownloadedFiles(StoreFiles):
    """Objects in unnamed files of a folder: see StoreFiles. The files disappear when the process ends."""

    def __init__(self, cached: RemoteFiles, folder: Path) -> None:
        self._cached, self._folder = cached, folder
        self._files: dict[str, IO[bytes]] = {}

    def create(self, path: str) -> IO[bytes]:
        """Return an empty file for an object."""
        file = self._files[path] = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - see clear
        return file

    def map(self, entry: FileEntry) -> MappedFile:
        """See StoreFiles."""
        if entry.path not in self._files:
            return self._cached.map(entry)
        return MappedFile(self._folder, entry.size, entry.path, self._files[entry.path].fileno())

    def clear(self) -> None:
        """Release the disk space. Maps that are open stay valid."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class _ObjectVerifier(StoreVerifier):
    """Verification of objects. Each is downloaded once, even if the disk cache has a copy of it."""

    files: RemoteFiles

    def __init__(self, files: RemoteFiles, quick: bool, progress: Callable[[int, int], None] | None) -> None:
        super().__init__(files, quick, _REQUESTS, progress)
        self._object_store = files.object_store
        self._downloaded: _DownloadedFiles | None = None  # receives the objects that are checked

    def start(self, pool: ThreadPoolExecutor, entry: FileEntry) -> Callable[[], int]:
        """See StoreVerifier."""
        return pool.submit(self._check_size if self.quick else self._download, entry).result

    def _check_size(self, entry: FileEntry) -> int:
        size = self._object_store.size(entry.path)
        self.advance(entry.size)
        if size != entry.size:
            raise size_mismatch(entry, size)
        return entry.crc32c

    def _download(self, entry: FileEntry) -> int:
        file = None if self._downloaded is None else self._downloaded.create(entry.path)

        def take(piece: Any, offset: int) -> None:
            if file is not None:
                fsio.pwritev_all(file.fileno(), [memoryview(piece)], offset)
            self.advance(len(piece))

        return self._object_store.stream(entry.path, entry.size, take)

    @contextlib.contextmanager
    def segment_files(self) -> Iterator[StoreFiles]:
        """See StoreVerifier. The segment that is being checked needs space in the cache folder."""
        folder = self.files.cache.folder
        with fsio.map_os_errors(folder):
            self._downloaded = _DownloadedFiles(self.files, folder)
            try:
                yield self._downloaded
            finally:
                self._downloaded.clear()

    def list_all(self) -> list[str]:
        """See StoreVerifier."""
        return self._object_store.list_recursive("") if self._object_store.can_list else []


def verify_remote(address: RemoteURL, *, quick: bool, progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Check the objects of a remote store; see verify_store."""
    files = RemoteFiles.open(address)
    for _ in range(_ATTEMPTS):
        numbers = files.generations()[:2]
        if not numbers:
            raise UsageError(f"{address}: no such store")
        report = _ObjectVerifier(files, quick, progress).run(numbers)
        # A writer may have removed the missing files meanwhile.
        if not report.damaged or files.generations()[:2] == numbers:
            break
    return report
