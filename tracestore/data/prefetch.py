"""Batches gathered before they are asked for, in two ways of one shape: `submit` batches
by their numbers, in order, while there is room; `plan` those behind, to be read from a
cold disk; `take` the oldest one.

Memory is asked for when a batch is submitted, so that no thread ever waits for it: where
the budget has no room, `submit` says so, or raises if not even one batch is under way.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from tracestore._core.gather import Pages, ThreadPool
from tracestore.data.batch_jobs import BatchJob
from tracestore.data.buffers import Allocate, BatchBuffer
from tracestore.errors import MemoryBudgetError

# Threads that wait for the disk, and bytes and batches that they may be ahead of the gathering.
_READERS = 4
_READ_AHEAD_BYTES = 128 << 20
_READ_AHEAD_BATCHES = 64
# After so many batches in a row that did not wait for it, the store counts as warm.
_WARM_BATCHES = 16


class _ReadAhead:
    """Brings the traces of coming batches into memory while the store is cold: from the
    first batch that had to wait for the disk until several in a row did not.

    drop_behind: what was brought in so is let go after its batch, so that a pass over
    data larger than the memory leaves the page cache of others as it was."""

    def __init__(self, drop_behind: bool) -> None:
        self.drop_behind = drop_behind
        self._crew: ThreadPool | None = None
        self._warm = 0
        self._under_way: deque[Pages] = deque()

    @property
    def is_on(self) -> bool:
        return self._crew is not None and self._warm < _WARM_BATCHES

    def on_batch(self, job: BatchJob) -> None:
        """A batch was gathered."""
        if job.native.major_faults == 0 and not any(p.major_faults for p in self._under_way):
            self._warm += 1
        else:
            self._warm = 0
            if self._crew is None:
                self._crew = ThreadPool(_READERS)
        if self.is_on and self.drop_behind:
            self._submit(Pages(job.sources, drop=True))

    def request(self, job: BatchJob) -> int:
        """Starts reading what a batch needs; the bytes of it."""
        pages = Pages(job.sources)
        self._submit(pages)
        return pages.num_bytes

    def _submit(self, pages: Pages) -> None:
        assert self._crew is not None
        pages.submit(self._crew)
        self._under_way.append(pages)
        while len(self._under_way) > _READ_AHEAD_BATCHES:
            self._under_way.popleft().wait()

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()
        self._under_way.clear()


class NativePrefetcher:
    """For uncompressed stores. This thread looks traces up and makes the tensors; a crew
    of C threads, which never wait for the interpreter, moves the bytes."""

    def __init__(
        self,
        num_threads: int,
        max_in_flight: int,
        make_job: Callable[[int], BatchJob],
        allocate: Allocate,
        drop_behind: bool = False,
    ) -> None:
        self._make_job, self._allocate = make_job, allocate
        at_once = max(1, min(num_threads, max_in_flight))
        self._threads_each = max(1, num_threads // at_once)
        self._crew = ThreadPool(at_once)
        self._queue: deque[BatchJob] = deque()
        self._planned: deque[tuple[BatchJob, int]] = deque()  # being read, without memory yet; their bytes
        self._planned_bytes = 0
        self._reading = _ReadAhead(drop_behind)

    def __len__(self) -> int:
        return len(self._queue)

    def plan(self, batch: int) -> bool:
        """Offers a batch behind those submitted; False where it is not read ahead."""
        full = self._planned_bytes > _READ_AHEAD_BYTES or len(self._planned) >= _READ_AHEAD_BATCHES
        if full or not self._reading.is_on:
            return False
        job = self._make_job(batch)
        self._planned.append((job, self._reading.request(job)))
        self._planned_bytes += self._planned[-1][1]
        return True

    def submit(self, batch: int) -> bool:
        job = self._planned[0][0] if self._planned else self._make_job(batch)
        try:
            job.set_buffer(self._allocate(job.num_bytes))
        except MemoryBudgetError:
            if not self._queue:
                raise
            return False
        if self._planned:
            self._planned_bytes -= self._planned.popleft()[1]
        job.native.submit(self._crew, self._threads_each)
        self._queue.append(job)
        return True

    def take(self) -> Any:
        job = self._queue.popleft()
        job.native.wait()
        self._reading.on_batch(job)
        return job.batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.close()
        self._reading.close()
        self._queue.clear()
        self._planned.clear()


# Batches whose chunks the cache of a compressed store is told of.
_ANNOUNCED_BATCHES = 32


class ThreadPrefetcher:
    """For compressed stores, whose inner chunks are decoded through Python: each thread
    looks up, decodes and moves one batch. `announce` tells the cache what comes, so that
    it keeps what is needed soonest, and gives what takes that back."""

    def __init__(
        self,
        num_threads: int,
        max_in_flight: int,
        traces: Callable[[int], np.ndarray],
        num_bytes: Callable[[np.ndarray], int],
        gather: Callable[[np.ndarray, Allocate], Any],
        allocate: Allocate,
        announce: Callable[[np.ndarray], Callable[[], None]],
    ) -> None:
        self._traces, self._num_bytes, self._gather, self._allocate = traces, num_bytes, gather, allocate
        self._announce = announce
        self._pid = os.getpid()
        self._workers = ThreadPoolExecutor(max(1, min(num_threads, max_in_flight)), thread_name_prefix="tracestore")
        self._queue: deque[Future[Any]] = deque()
        self._planned: deque[np.ndarray] = deque()
        self._announced: deque[Callable[[], None]] = deque()  # of those in the queue, then of those planned

    def __len__(self) -> int:
        return len(self._queue)

    def plan(self, batch: int) -> bool:
        if len(self._planned) >= _ANNOUNCED_BATCHES:
            return False
        indices = self._traces(batch)
        self._announced.append(self._announce(indices))
        self._planned.append(indices)
        return True

    def submit(self, batch: int) -> bool:
        indices = self._planned[0] if self._planned else self._traces(batch)
        try:
            buffer = self._allocate(self._num_bytes(indices))
        except MemoryBudgetError:
            if not self._queue:
                raise
            return False
        if self._planned:
            self._planned.popleft()
        else:
            self._announced.append(self._announce(indices))
        self._queue.append(self._workers.submit(self._gather, indices, _SingleUse(buffer)))
        return True

    def take(self) -> Any:
        result = self._queue.popleft().result()
        self._announced.popleft()()
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child has no threads of its parent to wait for.
        if os.getpid() == self._pid:
            self._workers.shutdown(wait=True, cancel_futures=True)
            while self._announced:
                self._announced.popleft()()
        self._queue.clear()
        self._planned.clear()


class _SingleUse:
    """An Allocate that gives one buffer, once, and keeps nothing of it."""

    def __init__(self, buffer: BatchBuffer) -> None:
        self._pieces = [buffer]

    def __call__(self, num_bytes: int) -> BatchBuffer:
        return self._pieces.pop()
