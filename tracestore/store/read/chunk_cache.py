"""Decoded chunks of compressed arrays, bounded in bytes."""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np

ChunkKey = tuple[str, int]  # the array's name in the store, the number of the inner chunk


class ChunkCache:
    """Decoded inner chunks of compressed shards, bounded in bytes.

    Who knows the order of what is to come announces it: then what is not announced goes
    first, least recently used, and after that what is needed last (Belady 1966). Safe to
    use from threads; a forked child starts with a lock of its own."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_decoded = 0
        self._chunks: OrderedDict[ChunkKey, np.ndarray] = OrderedDict()
        self._announced: dict[ChunkKey, deque[int]] = {}  # when it will be asked for, in announcements
        self._clock = 0
        self._lock, self._pid = threading.Lock(), os.getpid()

    def get(self, key: ChunkKey, decode: Callable[[], np.ndarray]) -> np.ndarray:
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

    def announce(self, keys: Sequence[ChunkKey]) -> None:
        """These will be asked for, after all that were announced before."""
        with self._lock:
            self._clock += 1
            for key in keys:
                self._announced.setdefault(key, deque()).append(self._clock)

    def done(self, keys: Sequence[ChunkKey]) -> None:
        """Takes the oldest announcement of each back: it was asked for, or will not be."""
        with self._lock:
            for key in keys:
                self._announced[key].popleft()
                if not self._announced[key]:
                    del self._announced[key]

    def _trim(self) -> None:
        while self.num_bytes > self.max_bytes and len(self._chunks) > 1:
            newest = next(reversed(self._chunks))
            found = next((k for k in self._chunks if k not in self._announced and k != newest), None)
            if found is None:
                found = max((k for k in self._chunks if k != newest), key=lambda k: self._announced[k][0])
            self.num_bytes -= self._chunks.pop(found).nbytes

    def limit(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        with self._lock:
            self._trim()
