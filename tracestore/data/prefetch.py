"""Prefetchers: they gather batches before the consumer asks for them.

Both classes have the same methods. `submit` takes the next batch, in order, while there is room.
`read_ahead` takes a batch behind the submitted ones, to read it from a cold disk or to keep its
chunks in the cache. `next_batch` returns the oldest submitted batch.

Memory is allocated when a batch is submitted, so that no thread waits for it. If the budget has no
room, `submit` returns False, or raises MemoryBudgetError if no batch is in flight.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from tracestore._core.gather import PrefetchJob, ThreadPool
from tracestore.data.batch_jobs import BatchJob
from tracestore.data.buffers import Allocate, BatchBuffer
from tracestore.errors import MemoryBudgetError

# Threads that wait for the disk, and the bytes and batches that they may be ahead.
_READER_THREADS = 4
_READ_AHEAD_BYTES = 128 << 20
_READ_AHEAD_BATCHES = 64
# The store counts as warm after this many batches in a row that did not wait for the disk.
_WARM_BATCHES = 16
# The cache of a compressed store learns of the chunks of this many batches.
_HINTED_BATCHES = 32


class _ReadAhead:
    """Reads the traces of upcoming batches into the page cache while the store is cold.

    It starts with the first batch that waited for the disk and stops after several that did not.
    With `drop_behind`, the pages of a batch are evicted after it, so that a pass over data larger
    than the memory does not evict other programs' files.
    """

    def __init__(self, drop_behind: bool) -> None:
        self.drop_behind = drop_behind
        self._threads: ThreadPool | None = None
        self._warm_batches = 0
        self._jobs: deque[PrefetchJob] = deque()

    @property
    def is_on(self) -> bool:
        """True if batches should be read ahead."""
        return self._threads is not None and self._warm_batches < _WARM_BATCHES

    def on_batch(self, job: BatchJob) -> None:
        """Record whether a batch, which has been gathered, had to wait for the disk."""
        if job.native.major_faults == 0 and not any(pages.major_faults for pages in self._jobs):
            self._warm_batches += 1
        else:
            self._warm_batches = 0
            if self._threads is None:
                self._threads = ThreadPool(_READER_THREADS)
        if self.is_on and self.drop_behind:
            self._submit(PrefetchJob(job.sources, evict=True))

    def request(self, job: BatchJob) -> int:
        """Start to read what a batch needs and return its bytes."""
        pages = PrefetchJob(job.sources)
        self._submit(pages)
        return pages.num_bytes

    def _submit(self, pages: PrefetchJob) -> None:
        assert self._threads is not None
        pages.submit(self._threads)
        self._jobs.append(pages)
        while len(self._jobs) > _READ_AHEAD_BATCHES:
            self._jobs.popleft().wait()

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.close()
        self._jobs.clear()


class NativePrefetcher:
    """Prefetcher for uncompressed stores.

    The consumer's thread looks traces up and makes the tensors. C threads, which never wait for the
    interpreter, copy the bytes.

    Parameters
    ----------
    num_threads : int
        C threads.
    max_in_flight : int
        Largest number of submitted batches.
    make_job : callable
        Returns the job of a batch number.
    allocate : callable
        Returns the buffer of a batch; raises MemoryBudgetError if there is no room.
    drop_behind : bool
        Evict what was read ahead from the page cache after its batch.
    """

    def __init__(
        self,
        num_threads: int,
        max_in_flight: int,
        make_job: Callable[[int], BatchJob],
        allocate: Allocate,
        drop_behind: bool = False,
    ) -> None:
        self._make_job, self._allocate = make_job, allocate
        num_parallel = max(1, min(num_threads, max_in_flight))
        self._threads_per_batch = max(1, num_threads // num_parallel)
        self._threads = ThreadPool(num_parallel)
        self._queue: deque[BatchJob] = deque()
        # Batches that are being read and have no memory yet, with their bytes.
        self._reading: deque[tuple[BatchJob, int]] = deque()
        self._reading_bytes = 0
        self._disk = _ReadAhead(drop_behind)

    def __len__(self) -> int:
        return len(self._queue)

    def read_ahead(self, batch: int) -> bool:
        """Start to read a batch behind those submitted. Return False where it is not read ahead."""
        is_full = self._reading_bytes > _READ_AHEAD_BYTES or len(self._reading) >= _READ_AHEAD_BATCHES
        if is_full or not self._disk.is_on:
            return False
        job = self._make_job(batch)
        num_bytes = self._disk.request(job)
        self._reading.append((job, num_bytes))
        self._reading_bytes += num_bytes
        return True

    def submit(self, batch: int) -> bool:
        """Gather the next batch. Return False if the budget has no room for it yet."""
        job = self._reading[0][0] if self._reading else self._make_job(batch)
        try:
            job.set_buffer(self._allocate(job.num_bytes))
        except MemoryBudgetError:
            if not self._queue:
                raise
            return False
        if self._reading:
            self._reading_bytes -= self._reading.popleft()[1]
        job.native.submit(self._threads, self._threads_per_batch)
        self._queue.append(job)
        return True

    def next_batch(self) -> Any:
        """Wait for the oldest submitted batch and return it."""
        job = self._queue.popleft()
        job.native.wait()
        self._disk.on_batch(job)
        return job.batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()
        self._disk.close()
        self._queue.clear()
        self._reading.clear()


class ThreadPrefetcher:
    """Prefetcher for compressed stores, whose inner chunks are decoded through Python.

    Each thread looks up, decodes and copies one batch.

    Parameters
    ----------
    num_threads, max_in_flight : int
        Python threads, and the largest number of submitted batches.
    traces : callable
        Returns the store indices of a batch number.
    num_bytes : callable
        Returns the largest number of bytes that a batch of some traces can take.
    gather : callable
        Returns the batch of some traces in a buffer from an allocator.
    allocate : callable
        Returns the buffer of a batch; raises MemoryBudgetError if there is no room.
    hint : callable
        Tells the cache which traces come next, so that it keeps their chunks, and returns a
        callback that withdraws the hint.
    """

    def __init__(
        self,
        num_threads: int,
        max_in_flight: int,
        traces: Callable[[int], np.ndarray],
        num_bytes: Callable[[np.ndarray], int],
        gather: Callable[[np.ndarray, Allocate], Any],
        allocate: Allocate,
        hint: Callable[[np.ndarray], Callable[[], None]],
    ) -> None:
        self._traces, self._num_bytes, self._gather, self._allocate = traces, num_bytes, gather, allocate
        self._hint = hint
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(max(1, min(num_threads, max_in_flight)), thread_name_prefix="tracestore")
        self._queue: deque[Future[Any]] = deque()
        self._hinted: deque[np.ndarray] = deque()  # traces of batches that are not submitted yet
        self._release_hint: deque[Callable[[], None]] = deque()  # of submitted batches, then of hinted ones

    def __len__(self) -> int:
        return len(self._queue)

    def read_ahead(self, batch: int) -> bool:
        """Hint a batch behind those submitted to the cache. Return False after enough of them."""
        if len(self._hinted) >= _HINTED_BATCHES:
            return False
        indices = self._traces(batch)
        self._release_hint.append(self._hint(indices))
        self._hinted.append(indices)
        return True

    def submit(self, batch: int) -> bool:
        """Gather the next batch. Return False if the budget has no room for it yet."""
        indices = self._hinted[0] if self._hinted else self._traces(batch)
        try:
            buffer = self._allocate(self._num_bytes(indices))
        except MemoryBudgetError:
            if not self._queue:
                raise
            return False
        if self._hinted:
            self._hinted.popleft()
        else:
            self._release_hint.append(self._hint(indices))
        self._queue.append(self._threads.submit(self._gather, indices, _SingleUse(buffer)))
        return True

    def next_batch(self) -> Any:
        """Wait for the oldest submitted batch and return it."""
        result = self._queue.popleft().result()
        self._release_hint.popleft()()
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child does not have its parent's threads and must not wait for them.
        if os.getpid() == self._pid:
            self._threads.shutdown(wait=True, cancel_futures=True)
            while self._release_hint:
                self._release_hint.popleft()()
        self._queue.clear()
        self._hinted.clear()


class _SingleUse:
    """An allocator that returns one buffer once and keeps no reference to it afterwards."""

    def __init__(self, buffer: BatchBuffer) -> None:
        self._buffers = [buffer]

    def __call__(self, num_bytes: int) -> BatchBuffer:
        return self._buffers.pop()
