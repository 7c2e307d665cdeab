"""Verification of every object of a remote store."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.io import fsio
from tracestore.store.io.files import RemoteURL
from tracestore.store.maintain.consistency import ConsistencyChecker, collect_damage
from tracestore.store.maintain.leftovers import find_leftovers
from tracestore.store.maintain.verify_report import VerifyReport
from tracestore.store.read.index import SegmentEntry, StoreIndex
from tracestore.store.read.segment import SegmentReader
from tracestore.store.remote.files import RemoteFiles, cache_of_environment, list_generations
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.write.commit import root_metadata

_REQUESTS = 8
# How often the store is read again while a writer changes it.
_ATTEMPTS = 5


class _DownloadedFiles:
    """Objects in unnamed files of a folder: see StoreFiles. The files disappear when the process ends."""

    def __init__(self, cached: RemoteFiles, folder: Path) -> None:
        self._cached, self._folder = cached, folder
        self._files: dict[str, IO[bytes]] = {}

    def create(self, path: str) -> IO[bytes]:
        """Return an empty file for an object."""
        file = self._files[path] = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - see clear
        return file

    def read(self, entry: FileEntry) -> bytes:
        """See StoreFiles."""
        if entry.path not in self._files:
            return self._cached.read(entry)
        return os.pread(self._files[entry.path].fileno(), entry.size, 0)

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


class _ObjectVerifier:
    """Compares objects with the sizes and checksums that were committed, several at a time."""

    def __init__(
        self, object_store: ObjectStore, report: VerifyReport, quick: bool, progress: Callable[[int, int], None] | None
    ) -> None:
        self._object_store, self._report, self._quick, self._progress = object_store, report, quick, progress
        self._lock = threading.Lock()
        self._done = 0

    def announce(self, entries: Iterable[FileEntry]) -> None:
        """Add objects that will be checked to the totals of the report."""
        for entry in entries:
            self._report.num_files += 1
            self._report.num_bytes += entry.size

    def check(self, entries: Iterable[FileEntry], keep: _DownloadedFiles | None = None) -> None:
        """Check announced objects; `keep` receives their bytes."""
        chosen = sorted(entries, key=lambda e: (-e.size, e.path))
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for entry, problem in zip(chosen, pool.map(lambda e: self._problem(e, keep), chosen), strict=True):
                if problem is not None:
                    self._report.damaged[entry.path] = problem

    def _problem(self, entry: FileEntry, keep: _DownloadedFiles | None) -> str | None:
        if self._quick:
            size = self._object_store.size(entry.path)
            self._tell(entry.size)
            if size is None:
                return "missing"
            return None if size == entry.size else f"{size} bytes where {entry.size} were committed"
        file = keep.create(entry.path) if keep is not None else None

        def take(piece: Any, offset: int) -> None:
            if file is not None:
                fsio.pwritev_all(file.fileno(), [memoryview(piece)], offset)
            self._tell(len(piece))

        try:
            crc = self._object_store.stream(entry.path, entry.size, take)
        except FileNotFoundError:
            return "missing"
        except CorruptStoreError as error:
            return str(error).split(": ", 1)[-1]
        return None if crc == entry.crc32c else "checksum mismatch"

    def _tell(self, num_bytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += num_bytes
                self._progress(self._done, self._report.num_bytes)


def verify_remote(address: RemoteURL, *, quick: bool, progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Check the objects of a remote store; see verify_store.

    Each object is downloaded once, even if the disk cache has a copy of it. The segment that is being checked needs
    space in the cache folder.
    """
    object_store = ObjectStore(address)
    for _ in range(_ATTEMPTS):
        numbers = list_generations(object_store)[:2]
        if not numbers:
            raise UsageError(f"{address}: no such store")
        report = _verify(object_store, numbers, quick, progress)
        # A writer may have removed the missing files meanwhile.
        if not report.damaged or list_generations(object_store)[:2] == numbers:
            break
    return report


def _verify(
    object_store: ObjectStore, numbers: list[int], quick: bool, progress: Callable[[int, int], None] | None
) -> VerifyReport:
    report = VerifyReport()
    checker = _ObjectVerifier(object_store, report, quick, progress)
    files, good = RemoteFiles(object_store, cache_of_environment()), []
    for number in numbers:
        name = paths.manifest(number)
        try:
            good.append(mf.parse_manifest(object_store.read(name, mf.MAX_MANIFEST_BYTES), number))
            report.num_files += 1
        except (FileNotFoundError, CorruptStoreError) as error:
            report.damaged[name] = str(error).split(": ", 1)[-1] if isinstance(error, CorruptStoreError) else "missing"
    report.generation = good[0].generation if good else None
    entries = {file.path: file for m in good for file in m.small_files()}
    for manifest in good:
        data = manifest.to_bytes()
        copy = FileEntry(paths.manifest_copy(manifest.generation), len(data), crc32c(data))
        entries[copy.path] = copy
    checker.announce(entries.values())
    checker.check(entries.values())
    segments: dict[str, SegmentEntry] = {}
    indexed = [m for m in good if not any(p.path in report.damaged for p in m.parts)]
    for manifest in indexed:
        try:
            segments |= {s.path: s for s in StoreIndex(files, manifest).segments()}
        except CorruptStoreError as error:
            report.damaged[paths.manifest(manifest.generation)] = str(error)
    for segment in segments.values():
        checker.announce([segment.rows])
    checker.check(s.rows for s in segments.values())
    listed: dict[str, dict[str, FileEntry]] = {}
    for segment in segments.values():
        if segment.rows.path not in report.damaged:
            with collect_damage(report.damaged, segment.rows.path):
                listed[segment.path] = SegmentReader(files, segment, good[0].attributes).entries
                checker.announce(listed[segment.path].values())
    if quick or report.damaged:
        for entries_of_segment in listed.values():
            checker.check(entries_of_segment.values())
    else:
        with fsio.map_os_errors(files.cache.folder):
            _check_contents(files, checker, indexed, listed, report)
    _check_root(object_store, good, report)
    known = {
        *entries,
        *(s.rows.path for s in segments.values()),
        *(path for files_of_segment in listed.values() for path in files_of_segment),
        "manifest/newest",
    }
    if object_store.can_list:

        def load(number: int) -> mf.Manifest:
            return mf.parse_manifest(object_store.read(paths.manifest(number), mf.MAX_MANIFEST_BYTES), number)

        found = object_store.list_recursive("")
        generations = list_generations(object_store)
        report.leftovers = find_leftovers(found, known, report.generation or 0, generations, load, files)
    return report


def _check_contents(
    files: RemoteFiles,
    checker: _ObjectVerifier,
    manifests: list[mf.Manifest],
    listed: dict[str, dict[str, FileEntry]],
    report: VerifyReport,
) -> None:
    """Download each segment once and check its files, then its contents against every generation that has it."""
    generations = [ConsistencyChecker(files, manifest) for manifest in manifests]
    for number in range(max((g.num_segments for g in generations), default=0)):
        found = {s.path for g in generations if (s := g.segment(number)) is not None}
        downloaded = _DownloadedFiles(files, files.cache.folder)
        try:
            for path in found:
                checker.check(listed[path].values(), downloaded)
            if not report.damaged:
                for generation in generations:
                    generation.check_segment(downloaded, number)
        finally:
            downloaded.clear()
    for generation in generations:
        report.damaged |= generation.damaged


def _check_root(object_store: ObjectStore, good: list[mf.Manifest], report: VerifyReport) -> None:
    try:
        found = object_store.read("zarr.json")
    except FileNotFoundError:
        report.damaged["zarr.json"] = "missing"
        return
    if good and found not in {root_metadata(m.attributes) for m in good}:
        report.damaged["zarr.json"] = "not what the manifest says"
