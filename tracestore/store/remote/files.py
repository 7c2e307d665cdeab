"""Reading a store of another machine: its files come onto this disk as they are used, whole."""

import argparse
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.console import parse_size
from tracestore.errors import CorruptStoreError, StorageError, TracestoreError, UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry, size_mismatch
from tracestore.store.io import fsio
from tracestore.store.io.files import RemoteURL, StoreFiles
from tracestore.store.read.batch_sources import GRAPH_SEGMENT, LAYOUT, SEQUENCE_SEGMENT
from tracestore.store.read.columns import join_columns, read_columns
from tracestore.store.read.generation import ATTEMPTS, Generation, pause
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.segment import SegmentReader
from tracestore.store.read.store import DEFAULT_CACHE_BYTES, Prefetch, TraceStore
from tracestore.store.remote.disk_cache import DiskCache
from tracestore.store.remote.helper import Helper
from tracestore.store.remote.object_store import ObjectStore

# Files that are fetched at once, small ones when a store is opened, and how far ahead a pass is looked through.
_FETCHERS = 6
_SMALL_AT_ONCE = 16
_BATCHES_AHEAD = 1024
_SHARE_AHEAD = 0.9
_TRIES = 20
_CLOSE_S = 1.0

T = TypeVar("T")


def cache_of_environment() -> DiskCache:
    """In $TRACESTORE_CACHE_DIR, of $TRACESTORE_CACHE_SIZE (such as 100GiB)."""
    text = os.environ.get("TRACESTORE_CACHE_SIZE")
    try:
        return DiskCache(max_bytes=None if text is None else parse_size(text))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"TRACESTORE_CACHE_SIZE: {error}") from None


class RemoteFiles:
    """The committed files of a remote store, by way of the cache."""

    def __init__(self, bucket: ObjectStore, cache: DiskCache) -> None:
        self.bucket, self.cache = bucket, cache
        self.next_use: Callable[[str], int | None] = lambda name: None
        self._mapped: dict[str, str] = {}  # what was mapped: its name in the cache, its path in the store
        self._changed_at = -1  # of the cache, when that was last looked through
        self._lock = threading.Lock()
        self._helper: Helper | None = None

    def _use(self, entry: FileEntry, use: Callable[[str | os.PathLike[str]], T]) -> T:
        for _ in range(_TRIES):
            path = self._get(entry)
            try:
                return use(path)
            except FileNotFoundError:
                continue  # somebody needed its room
        raise StorageError(f"{self.cache.folder}: files go from the cache faster than they can be opened")

    def _get(self, entry: FileEntry) -> Path:
        if not self.bucket.is_forked:
            return self.cache.get(self.bucket, entry, self.next_use)
        name = DiskCache.name_of(self.bucket.address, entry)
        path = self.cache.ready(name)
        if path is not None:
            return path
        with self._lock:
            if self._helper is None or not self._helper.is_of_this_process:
                self._helper = Helper(self.bucket.address, self.cache)
            helper = self._helper
        helper.fetch(entry)
        return self.cache.folder / name

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Has files in the cache, if it is large enough: each takes a server's answer, and they need not
        wait for each other."""
        address = self.bucket.address
        with fsio.map_os_errors(self.cache.folder):
            missing = [e for e in entries if self.cache.ready(DiskCache.name_of(address, e)) is None]
        if len(missing) < 2 or sum(e.size for e in missing) > self.cache.max_bytes or self.bucket.is_forked:
            return
        errors: list[Exception] = []
        stopped = threading.Event()

        def check() -> None:
            if stopped.is_set():
                raise _FetchCancelledError

        def run() -> None:
            try:
                while not stopped.is_set():
                    try:
                        entry = missing.pop()
                    except IndexError:
                        return
                    self.cache.get(self.bucket, entry, self.next_use, check)
            except _FetchCancelledError:
                pass
            except Exception as error:
                errors.append(error)
                stopped.set()

        # Nobody waits for them when the process ends: a server may take minutes to answer.
        threads = [threading.Thread(target=run, daemon=True) for _ in range(min(len(missing), _SMALL_AT_ONCE))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            stopped.set()
        if errors:
            raise errors[0]

    def close(self) -> None:
        with self._lock:
            if self._helper is not None:
                self._helper.close()
            self._helper = None

    def read(self, entry: FileEntry) -> bytes:
        def whole(path: str | os.PathLike[str]) -> bytes:
            with open(path, "rb") as file:
                return file.read()

        data = self._use(entry, whole)
        if len(data) != entry.size:
            raise size_mismatch(entry, len(data))
        return data

    def map(self, entry: FileEntry) -> MappedFile:
        mapped = self._use(entry, lambda path: MappedFile(path, entry.size, entry.path))
        with self._lock:
            self._mapped[self.cache.name_of(self.bucket.address, entry)] = entry.path
        return mapped

    def gone(self) -> list[str]:
        """Paths in the store of files that were mapped and have gone from the cache since: who lets
        go of them gives the disk its room back."""
        mtime = self.cache.mtime()
        if self._changed_at == mtime:
            return []
        with self._lock:
            self._changed_at = mtime
            names = [name for name in self._mapped if not self.cache.holds(name)]
            return [self._mapped.pop(name) for name in names]


class NullPin:
    """Object stores have no locks: a generation is not held. Its segments stay all the same, until
    the store is replaced; index and columns are on this disk once it is open."""

    def close(self) -> None:
        pass


def generations_of(bucket: ObjectStore) -> list[int]:
    """The generations that have a manifest, newest first."""
    names = [n for n in bucket.file_names("manifest") if paths.is_generation(n)]
    if not names and not bucket.can_list:
        with contextlib.suppress(FileNotFoundError):
            newest = bucket.read("manifest/newest", 64).decode("ascii", "replace").strip()
            names = [newest] if paths.is_generation(newest) else []
    return sorted(map(int, names), reverse=True)


def _open_generation(bucket: ObjectStore, files: RemoteFiles, number: int) -> Generation:
    manifest = mf.parse_manifest(bucket.read(paths.manifest(number), mf.MAX_MANIFEST_BYTES), number)
    files.fetch(manifest.small_files())
    index = StoreIndex(files, manifest)
    columns = join_columns([read_columns(files, ref) for ref in manifest.columns])
    return Generation(manifest, index, columns, NullPin())


def open_latest_remote(bucket: ObjectStore, files: RemoteFiles, preferred: int | None = None) -> Generation:
    """As opening.open_latest: `preferred` where it is still there, else the newest."""
    if preferred is not None:
        try:
            return _open_generation(bucket, files, preferred)
        except (FileNotFoundError, CorruptStoreError):
            pass
    before: list[int] = []
    for attempt in range(ATTEMPTS):
        numbers = generations_of(bucket)
        if not numbers:
            if bucket.size("zarr.json") is None:
                raise UsageError(f"{bucket.address}: no such store")
            raise UsageError(
                f"{bucket.address}: a web server that does not list its folders: the file manifest/newest is missing"
                if not bucket.can_list
                else f"{bucket.address}: not a store"
            )
        try:
            return _open_generation(bucket, files, numbers[0])
        except (FileNotFoundError, CorruptStoreError) as error:
            # A writer may have taken it away meanwhile: then there is a newer one.
            if numbers == before:
                name = paths.manifest(numbers[0])
                reason = f"{name}: missing" if isinstance(error, FileNotFoundError) else str(error)
                raise CorruptStoreError(f"{bucket.address}: {reason}") from None
        before = numbers
        pause(attempt)
    raise CorruptStoreError(f"{bucket.address}: generations change faster than they can be read")


class RemoteStore(TraceStore):
    """A store at s3://, gs://, http:// or https://, opened for reading."""

    _files: RemoteFiles

    def _hold(self, path: Path | RemoteURL, found: Generation, files: StoreFiles, cache_bytes: int) -> None:
        super()._hold(path, found, files, cache_bytes)
        self._found = found
        self._array_entries: dict[tuple[int, str], list[tuple[str, FileEntry]]] = {}

    def __init__(
        self, path: str | os.PathLike[str], *, cache_bytes: int = DEFAULT_CACHE_BYTES, cache: DiskCache | None = None
    ) -> None:
        self._open(path, cache_bytes, None, cache)

    def _open(
        self,
        path: str | os.PathLike[str],
        cache_bytes: int,
        generation: int | None,
        cache: DiskCache | None = None,
    ) -> None:
        bucket = ObjectStore(os.fspath(path))
        files = RemoteFiles(bucket, cache or cache_of_environment())
        self._hold(bucket.address, open_latest_remote(bucket, files, generation), files, cache_bytes)

    def again(self, cache_bytes: int = DEFAULT_CACHE_BYTES) -> "RemoteStore":
        # Nothing is asked of the server: what was found may have been replaced there.
        store = RemoteStore.__new__(RemoteStore)
        files = RemoteFiles(self._files.bucket, self._files.cache)
        store._hold(self.path, self._found, files, cache_bytes)
        return store

    def _segment(self, number: int) -> SegmentReader:
        for path in self._files.gone():
            segment, name = path.split("/")[1:3]
            held = self._segments.get(int(segment)) if path.startswith("segments/") else None
            if held is not None:
                held.forget(name)
        return super()._segment(number)

    def close(self) -> None:
        super().close()
        self._files.close()

    def coming(self, traces: Callable[[int], np.ndarray], start: int, total: int, view: str) -> Prefetch:
        return Prefetcher(self, traces, start, total, view)

    def files_of(self, indices: np.ndarray, view: str) -> Iterator[tuple[str, FileEntry]]:
        """The files that a batch of some traces is gathered from, some of them repeatedly, and their
        names in the cache."""
        columns = (GRAPH_SEGMENT, SEQUENCE_SEGMENT, LAYOUT)
        for graph, sequence, layout in np.unique(self._index.places(indices)[:, columns], axis=0).tolist():
            if view == "sequence" and sequence >= 0:
                yield from self._array_files(sequence, "last_token")
                continue
            yield from self._array_files(graph, "hidden_states")
            if view == "graph":
                of_edges = ("edge_ptr", "edge_index", "edge_weight")
                for name in of_edges if layout == schema.LAYOUT_EDGES else ("attention",):
                    yield from self._array_files(graph, name)

    def _array_files(self, segment: int, name: str) -> list[tuple[str, FileEntry]]:
        found = self._array_entries.get((segment, name))
        if found is None:
            prefix, address = f"{paths.segment(segment)}/{name}/", self._files.bucket.address
            files = [f for f in self._index.segment_files(segment) if f.path.startswith(prefix)]
            found = self._array_entries[segment, name] = [(DiskCache.name_of(address, f), f) for f in files]
        return found


class Prefetcher(Prefetch):
    """Fetches the files of coming batches in the order in which they are needed, as many as the
    cache has room for, and tells the cache which are needed again."""

    def __init__(
        self, store: RemoteStore, traces: Callable[[int], np.ndarray], start: int, total: int, view: str
    ) -> None:
        self._store, self._traces, self._view, self._total = store, traces, view, total
        self._files = store._files
        # The ranks of a machine share the cache, and each fetches ahead for itself.
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        ranks_here = max(1, int(ranks)) if ranks.isdecimal() else 1
        self._room = _SHARE_AHEAD * self._files.cache.max_bytes / ranks_here
        self._lock = threading.Condition()
        self._position = self._planned = start
        self._batches: deque[list[str]] = deque()  # names in the cache, of batches position .. planned - 1
        self._uses: dict[str, deque[int]] = {}  # batches that need it, of those
        self._entries: dict[str, FileEntry] = {}
        self._bytes = 0
        self._queue: deque[str] = deque()
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self._files.bucket.is_forked:
            return self
        self._files.next_use = self._needed_at
        for k in range(_FETCHERS):
            thread = threading.Thread(target=self._run, name=f"tracestore-fetch-{k}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))  # what waits for a server ends with its answer
        self._files.next_use = lambda name: None

    def at(self, batch: int) -> None:
        with self._lock:
            while self._position < batch and self._batches:
                for name in self._batches.popleft():
                    uses = self._uses[name]
                    uses.popleft()
                    if not uses:
                        del self._uses[name]
                        self._bytes -= self._entries.pop(name).size
                self._position += 1
            self._position = max(self._position, batch)
            self._planned = max(self._planned, batch)
            self._lock.notify_all()

    def _needed_at(self, name: str) -> int | None:
        with self._lock:
            uses = self._uses.get(name)
            return uses[0] if uses else None

    def _plan(self) -> None:
        """Looks through batches until there is something to fetch, or no room for more."""
        while (
            not self._queue
            and self._planned < self._total
            and self._planned - self._position < _BATCHES_AHEAD
            and (self._bytes < self._room or self._planned == self._position)
        ):
            names = []
            for name, entry in dict(self._store.files_of(self._traces(self._planned), self._view)).items():
                names.append(name)
                if name not in self._uses:
                    self._uses[name], self._entries[name] = deque(), entry
                    self._bytes += entry.size
                    self._queue.append(name)
                self._uses[name].append(self._planned)
            self._batches.append(names)
            self._planned += 1

    def _run(self) -> None:
        # Whatever fails here fails again for who needs the file, and is said there.
        with contextlib.suppress(TracestoreError, OSError, _FetchCancelledError):
            self._fetch_all()

    def _fetch_all(self) -> None:
        while True:
            with self._lock:
                self._plan()
                while not self._queue and not self._stopped:
                    self._lock.wait()
                    self._plan()
                if self._stopped:
                    return
                entry = self._entries.get(self._queue.popleft())
            if entry is None:
                continue  # its batch was gathered before it was its turn
            with contextlib.suppress(CorruptStoreError):
                self._files.cache.get(self._files.bucket, entry, self._needed_at, self._check)

    def _check(self) -> None:
        if self._stopped:
            raise _FetchCancelledError


class _FetchCancelledError(Exception):
    """Nobody waits for it any more."""
