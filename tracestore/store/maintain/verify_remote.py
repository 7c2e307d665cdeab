"""Checking every object of a remote store against its manifest."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.format.entries import FileEntry
from tracestore.store.io.files import RemoteURL
from tracestore.store.maintain.verify_report import VerifyReport
from tracestore.store.read.index import StoreIndex
from tracestore.store.remote.files import RemoteFiles, cache_of_environment, list_generations
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.write.commit import root_metadata

_REQUESTS = 8
# How often the store is looked at anew where a writer is at work on it.
_ATTEMPTS = 5


class _ObjectVerifier:
    """Compares objects with what was committed, several at a time."""

    def __init__(
        self, object_store: ObjectStore, report: VerifyReport, quick: bool, progress: Callable[[int, int], None] | None
    ) -> None:
        self._object_store, self._report, self._quick, self._progress = object_store, report, quick, progress
        self._lock = threading.Lock()
        self._done = 0

    def check(self, entries: Iterable[FileEntry]) -> None:
        chosen = sorted(entries, key=lambda e: (-e.size, e.path))
        self._report.num_files += len(chosen)
        self._report.num_bytes += sum(e.size for e in chosen)
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for entry, problem in zip(chosen, pool.map(self._problem, chosen), strict=True):
                if problem is not None:
                    self._report.damaged[entry.path] = problem

    def _problem(self, entry: FileEntry) -> str | None:
        if self._quick:
            size = self._object_store.size(entry.path)
            self._tell(entry.size)
            if size is None:
                return "missing"
            return None if size == entry.size else f"{size} bytes where {entry.size} were committed"
        try:
            crc = self._object_store.stream(entry.path, entry.size, lambda piece, offset: self._tell(len(piece)))
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
    """As verify_store. Nothing of it is taken from the cache, but the list of files."""
    object_store = ObjectStore(address)
    for _ in range(_ATTEMPTS):
        numbers = list_generations(object_store)[:2]
        if not numbers:
            raise UsageError(f"{address}: no such store")
        report = _verify(object_store, numbers, quick, progress)
        # A writer may have taken away meanwhile what was looked for.
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
    checker.check(entries.values())
    segments: dict[str, FileEntry] = {}
    for manifest in good:
        if not any(p.path in report.damaged for p in manifest.parts):
            try:
                segments |= {f.path: f for f in StoreIndex(files, manifest).files()}
            except CorruptStoreError as error:
                report.damaged[paths.manifest(manifest.generation)] = str(error)
    checker.check(segments.values())
    _check_root(object_store, good, report)
    known = {
        *entries,
        *segments,
        "zarr.json",
        "lock",
        "manifest/newest",
        *map(paths.manifest, list_generations(object_store)),
    }
    if object_store.can_list:
        folders = {str(Path(p.path).parent) for m in good for p in m.parts}
        found = object_store.list_recursive("")
        report.leftovers = [p for p in found if p not in known and str(Path(p).parent) not in folders]
    return report


def _check_root(object_store: ObjectStore, good: list[mf.Manifest], report: VerifyReport) -> None:
    try:
        found = object_store.read("zarr.json")
    except FileNotFoundError:
        report.damaged["zarr.json"] = "missing"
        return
    if good and found not in {root_metadata(m.attributes) for m in good}:
        report.damaged["zarr.json"] = "not what the manifest says"
