"""Prefetchers: they gather batches before the consumer asks for them.

Memory is allocated when a batch is submitted, so that no thread waits for it. Batches behind the
submitted ones have no memory yet; they are looked up to read them from a cold disk or to keep their
chunks in the cache.
"""

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from tracestore._core.gather import PrefetchJob, ThreadPool
from tracestore.data.batches.batch_jobs import BatchGatherer, BatchJob
from tracestore.data.batches.buffers import Allocate, BatchBuffer
from tracestore.errors import MemoryBudgetError

# Threads that wait for the disk, and the bytes and batches that they may be ahead.
_READER_THREADS = 4
_READ_AHEAD_BYTES = 128 << 20
_READ_AHEAD_BATCHES = 64
# The store counts as warm after this many batches in a row that did not wait for the disk.
_WARM_BATCHES = 16
# Bytes of a batch from which its copy takes longer than it takes to wake a thread.
_SHARED_BYTES = 4 << 20
# The cache of a compressed store learns of the chunks of this many batches.
_HINTED_BATCHES = 32

# The store indices of a batch, and a callback that withdraws the hint of their chunks to the cache.
_Hinted = tuple[np.ndarray, Callable[[], None]]


def closed_at_exit(iteration: Generator[Any]) -> Generator[Any]:
    """Return the generator, which is closed when the interpreter exits, while the modules that it uses still exist."""
    reference = weakref.ref(iteration)

    def close() -> None:
        # The reference is dead where the generator ended earlier. Another thread may be in the generator.
        if (running := reference()) is not None:
            with contextlib.suppress(ValueError):
                running.close()

    weakref.finalize(iteration, close)
    return iteration


class BatchPrefetcher(ABC):
    """Gathers batches in order; a context that ends its threads.

    Parameters
    ----------
    gatherer : BatchGatherer
        Makes the batches.
    batches : iterable of ndarray
        The store indices of each batch.
    allocate : callable
        Returns the buffer of a batch; raises MemoryBudgetError if there is no room.
    num_threads, max_in_flight : int
        Threads, and the largest number of submitted batches.
    """

    def __init__(
        self,
        gatherer: BatchGatherer,
        batches: Iterable[np.ndarray],
        allocate: Allocate,
        num_threads: int,
        max_in_flight: int,
    ) -> None:
        self._gatherer, self._upcoming, self._allocate = gatherer, iter(batches), allocate
        self._num_threads, self._num_parallel = num_threads, max(1, min(num_threads, max_in_flight))
        # Batches that are looked up and have no memory yet, and submitted ones.
        self._ahead: deque[Any] = deque()
        self._submitted: deque[Any] = deque()

    def fill(self, max_in_flight: int) -> None:
        """Submit batches while there is room for them, and read others ahead.

        Raises
        ------
        MemoryBudgetError
            If the budget has no room for a batch, and none is in flight.
        """
        while len(self._submitted) < max_in_flight and (self._ahead or self._advance()):
            try:
                buffer = self._allocate(self._num_bytes(self._ahead[0]))
            except MemoryBudgetError:
                if not self._submitted:
                    raise
                break
            self._submitted.append(self._submit(self._ahead.popleft(), buffer))
        while self._has_room_ahead() and self._advance():
            self._read_ahead(self._ahead[-1])

    def _advance(self) -> bool:
        """Look up one more batch. Return False at the end of the epoch."""
        for indices in self._upcoming:
            self._ahead.append(self._look_up(indices))
            return True
        return False

    @abstractmethod
    def next_batch(self) -> Any:
        """Wait for the oldest submitted batch and return it."""

    @abstractmethod
    def _look_up(self, indices: np.ndarray) -> Any: ...

    @abstractmethod
    def _num_bytes(self, ahead: Any) -> int: ...

    @abstractmethod
    def _submit(self, ahead: Any, buffer: BatchBuffer) -> Any: ...

    @abstractmethod
    def _has_room_ahead(self) -> bool:
        """Return whether one more batch behind the submitted ones should be looked up."""

    def _read_ahead(self, ahead: Any) -> None:  # noqa: B027 - a lookup may do all that is needed
        """Start to read a batch behind the submitted ones."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._submitted.clear()
        self._ahead.clear()


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
            self.request(job, evict=True)

    def request(self, job: BatchJob, evict: bool = False) -> int:
        """Start to read, or to evict, what a batch needs and return its bytes."""
        assert self._threads is not None
        pages = PrefetchJob(job.sources, evict)
        pages.submit(self._threads)
        self._jobs.append(pages)
        while len(self._jobs) > _READ_AHEAD_BATCHES:
            self._jobs.popleft().wait()
        return pages.num_bytes

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.close()
        self._jobs.clear()


class NativePrefetcher(BatchPrefetcher):
    """Prefetcher for uncompressed stores.

    The consumer's thread looks traces up and makes the tensors. C threads, which never wait for the
    interpreter, copy the bytes. With `drop_behind`, what was read ahead is evicted from the page
    cache after its batch.
    """

    def __init__(self, *args: Any, drop_behind: bool = False) -> None:
        super().__init__(*args)
        self._threads = ThreadPool(self._num_parallel)
        self._disk = _ReadAhead(drop_behind)

    def _look_up(self, indices: np.ndarray) -> BatchJob:
        return self._gatherer.job(indices)

    def _num_bytes(self, ahead: BatchJob) -> int:
        return ahead.num_bytes

    def _submit(self, ahead: BatchJob, buffer: BatchBuffer) -> BatchJob:
        ahead.set_buffer(buffer)
        # Someone waits for the first batch. Many threads with a batch each would share the bandwidth of the memory,
        # so that it came last: they all gather it, if it is large.
        is_first = not self._submitted and self._num_threads > 2 and ahead.num_bytes >= _SHARED_BYTES
        num_threads = self._num_threads if is_first else self._num_threads // self._num_parallel
        ahead.native.submit(self._threads, max(1, num_threads))
        return ahead

    def _has_room_ahead(self) -> bool:
        if not self._disk.is_on or len(self._ahead) >= _READ_AHEAD_BATCHES:
            return False
        num_bytes: int = sum(job.read_ahead_bytes for job in self._ahead)
        return num_bytes <= _READ_AHEAD_BYTES

    def _read_ahead(self, ahead: BatchJob) -> None:
        ahead.read_ahead_bytes = self._disk.request(ahead)

    def next_batch(self) -> Any:
        """Wait for the oldest submitted batch and return it."""
        job = self._submitted.popleft()
        job.complete(job.native.wait)
        self._disk.on_batch(job)
        return job.batch()

    def __exit__(self, *_: object) -> None:
        self._threads.close()
        self._disk.close()
        super().__exit__()


class ThreadPrefetcher(BatchPrefetcher):
    """Prefetcher for compressed stores, whose inner chunks are decoded through Python.

    Each Python thread looks up, decodes and copies one batch. The cache learns which chunks come
    next, so that it keeps them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(self._num_parallel, thread_name_prefix="tracestore")

    def _look_up(self, indices: np.ndarray) -> _Hinted:
        return indices, self._gatherer.hint_upcoming(indices)

    def _num_bytes(self, ahead: _Hinted) -> int:
        return self._gatherer.batch_format.max_batch_bytes(self._gatherer.store, ahead[0])

    def _submit(self, ahead: _Hinted, buffer: BatchBuffer) -> tuple[Future[Any], Callable[[], None]]:
        self._require_parent()
        indices, release_hint = ahead
        buffers = [buffer]  # popped, so that the thread keeps no reference to the buffer of a batch that is done
        return self._threads.submit(self._gatherer.gather, indices, lambda _: buffers.pop()), release_hint

    def _has_room_ahead(self) -> bool:
        return len(self._ahead) < _HINTED_BATCHES

    def next_batch(self) -> Any:
        """Wait for the oldest submitted batch and return it."""
        self._require_parent()
        future, release_hint = self._submitted.popleft()
        try:
            return future.result()
        finally:
            release_hint()

    def _require_parent(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("the threads belong to the parent process")

    def __exit__(self, *_: object) -> None:
        # A forked child does not have its parent's threads and must not wait for them.
        if os.getpid() == self._pid:
            self._threads.shutdown(wait=True, cancel_futures=True)
            for _, release_hint in (*self._submitted, *self._ahead):
                release_hint()
        super().__exit__()
