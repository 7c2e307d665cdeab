"""Decoded chunks of compressed arrays, bounded in bytes."""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

# Identity of the files of the store, path of the array in the store, number of the inner chunk.
ChunkKey = tuple[int, str, int]


class ChunkCache:
    """Decoded inner chunks of compressed shards, bounded in bytes.

    Eviction takes the least recently used chunk without a hint first, then the chunk whose next hinted use is last
    [1]_. Safe to use from threads; a forked child gets a lock of its own.

    References
    ----------
    .. [1] L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
       5(2), 1966.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_decoded = 0
        self._chunks: OrderedDict[ChunkKey, np.ndarray] = OrderedDict()
        self._upcoming: dict[ChunkKey, deque[int]] = {}  # numbers of the hints that name a chunk
        self._clock = 0
        self._lock, self._pid = threading.Lock(), os.getpid()

    def get(self, key: ChunkKey, decode: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the chunk, decoded by `decode` unless the cache has it."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
                return chunk
        # Decoded outside the lock: two threads may do it twice, neither waits.
        chunk = decode()
        with self._lock:
            self.num_decoded += 1
            if key not in self._chunks:
                self._chunks[key] = chunk
                self.num_bytes += chunk.nbytes
            self._trim()
        return chunk

    def hint_upcoming(self, keys: Sequence[ChunkKey]) -> Callable[[], None]:
        """Record that these chunks are read after all that were hinted before.

        Returns
        -------
        Callable
            Call it when the chunks were read, or will not be read: it releases the hint.
        """
        with self._lock:
            self._clock += 1
            for key in keys:
                self._upcoming.setdefault(key, deque()).append(self._clock)
        return partial(self._release, keys)

    def _release(self, keys: Sequence[ChunkKey]) -> None:
        """Drop the oldest hint of each chunk."""
        with self._lock:
            for key in keys:
                self._upcoming[key].popleft()
                if not self._upcoming[key]:
                    del self._upcoming[key]

    def _trim(self) -> None:
        while self.num_bytes > self.max_bytes and len(self._chunks) > 1:
            newest = next(reversed(self._chunks))
            found = next((k for k in self._chunks if k not in self._upcoming and k != newest), None)
            if found is None:
                found = max((k for k in self._chunks if k != newest), key=lambda k: self._upcoming[k][0])
            self.num_bytes -= self._chunks.pop(found).nbytes

    def resize(self, max_bytes: int) -> None:
        """Change the bound, and evict what exceeds it."""
        self.max_bytes = max_bytes
        with self._lock:
            self._trim()
