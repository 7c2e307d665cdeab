"""Prefetching the files of upcoming batches from a server into the disk cache."""

import contextlib
import threading
import time
from collections import deque
from typing import Self

from tracestore.errors import CorruptStoreError, TracestoreError
from tracestore.process import ranks_here
from tracestore.store.format.entries import FileEntry, FilePart, FilesOf
from tracestore.store.remote.disk_cache import DiskCache
from tracestore.store.remote.layer_file import CachedFiles
from tracestore.store.remote.threads import FetchCancelledError

_THREADS = 6
_BATCHES_AHEAD = 1024
_BATCHES_AT_LEAST = 2  # whatever the cache holds: the loader gathers ahead too
_CACHE_SHARE = 0.9  # of the cache that prefetched files may take
# A file with holes is evicted as a whole: with layers that were used, those go that are not used yet.
_PART_COST = 2
_CLOSE_S = 1.0


class RemoteFilePrefetcher:
    """Fetches the files of upcoming batches in the order of their use, as many as the cache has room for.

    It begins when the reader needs a file that the cache lacks. It also tells the cache which batch uses a file next,
    which decides what is evicted.
    """

    def __init__(self, files: CachedFiles, files_of: FilesOf, start: int, total: int) -> None:
        self._files, self._files_of, self._total = files, files_of, total
        # The ranks of a machine share the cache; each prefetches its own batches.
        self._max_bytes = _CACHE_SHARE * files.cache.max_bytes / ranks_here()
        self._lock = threading.Condition()
        self._position = self._planned = start
        # Names in the cache and cost of parts, for the batches position .. planned - 1.
        self._batches: deque[tuple[list[str], int]] = deque()
        self._uses: dict[str, deque[int]] = {}  # name -> the planned batches that use it
        self._entries: dict[str, FileEntry] = {}
        self._bytes = 0
        self._queue: deque[str | FilePart] = deque()
        self._stopped = self._is_planning = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if not self._files.object_store.is_forked:
            self._files.next_use, self._files.on_miss = self._next_use, self._start
        return self

    def _start(self) -> None:
        with self._lock:
            if not self._threads:
                self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="tracestore-fetch", daemon=True)
        with contextlib.suppress(RuntimeError):  # The interpreter exits.
            thread.start()
            self._threads.append(thread)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))  # A thread that waits for a server ends with its answer.
        self._files.next_use, self._files.on_miss = lambda name: None, lambda: None

    def advance(self, batch: int) -> None:
        """See FilePrefetcher."""
        with self._lock:
            while self._position < batch and self._batches:
                names, part_bytes = self._batches.popleft()
                self._bytes -= part_bytes
                for name in names:
                    uses = self._uses[name]
                    uses.popleft()
                    if not uses:
                        del self._uses[name]
                        self._bytes -= self._entries.pop(name).size if name in self._entries else 0
                self._position += 1
            self._position = max(self._position, batch)
            self._planned = max(self._planned, batch)
            self._lock.notify_all()

    def _next_use(self, name: str) -> int | None:
        with self._lock:
            uses = self._uses.get(name)
            return uses[0] if uses else None

    def _can_plan(self) -> bool:
        return (
            not self._is_planning
            and self._planned < self._total
            and self._planned - self._position < _BATCHES_AHEAD
            and (self._bytes < self._max_bytes or self._planned - self._position < _BATCHES_AT_LEAST)
        )

    def _plan(self, batch: int) -> None:
        """Plan the next batch. The lock is not held: the list of files of a segment may have to be fetched."""
        address = self._files.object_store.address
        try:
            items = list(self._files_of(batch))
            found = {
                DiskCache.name_of(address, item.entry if isinstance(item, FilePart) else item): item for item in items
            }
        finally:
            with self._lock:
                self._is_planning = False
                self._lock.notify_all()
        with self._lock:
            if self._planned != batch:
                return  # The reader has passed it meanwhile.
            parts = [item for item in items if isinstance(item, FilePart)]
            self._queue += parts
            for name, item in found.items():
                if isinstance(item, FileEntry) and name not in self._entries:
                    self._entries[name] = item
                    self._bytes += item.size
                    if not self._files.cache.contains(name):
                        self._queue.append(name)
                self._uses.setdefault(name, deque()).append(batch)
            part_bytes = _PART_COST * sum(part.num_bytes for part in parts)
            self._bytes += part_bytes
            self._batches.append((list(found), part_bytes))
            self._planned += 1

    def _run(self) -> None:
        # The reader of the file meets the same error, and reports it.
        with contextlib.suppress(TracestoreError, OSError, FetchCancelledError):
            self._fetch_all()

    def _fetch_all(self) -> None:
        while True:
            with self._lock:
                while not (self._stopped or self._queue or self._can_plan()):
                    self._lock.wait()
                if self._stopped:
                    return
                item, batch = self._queue.popleft() if self._queue else None, self._planned
                if item is None:
                    self._is_planning = True
                elif len(self._threads) < _THREADS:  # for what else there is to fetch or to plan
                    self._start_thread()
                # None if the batch of the file was gathered first.
                entry = self._entries.get(item) if isinstance(item, str) else None
            if item is None:
                self._plan(batch)
                continue
            with contextlib.suppress(CorruptStoreError):
                if isinstance(item, FilePart):
                    item.fetch(self._check)
                elif entry is not None:
                    self._files.cache.get(self._files.object_store, entry, self._next_use, self._check)

    def _check(self) -> None:
        if self._stopped:
            raise FetchCancelledError
