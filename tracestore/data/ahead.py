"""Batches gathered before they are asked for, in two ways of one shape: `submit` the
traces of a batch while there is room, `take` the oldest one.

Memory is asked for when a batch is submitted, so that no thread ever waits for it: where
the budget has no room, `submit` says so, or raises if not even one batch is under way.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from tracestore._core.gather import Crew
from tracestore.data.jobs import BatchJob
from tracestore.data.memory import Allocate, Piece
from tracestore.errors import MemoryBudgetError


class AheadByCrew:
    """For uncompressed stores. This thread looks traces up and makes the tensors; a crew
    of C threads, which never wait for the interpreter, moves the bytes."""

    def __init__(
        self, num_threads: int, max_in_flight: int, make_job: Callable[[np.ndarray], BatchJob], allocate: Allocate
    ) -> None:
        self._make_job, self._allocate = make_job, allocate
        at_once = max(1, min(num_threads, max_in_flight))
        self._threads_each = max(1, num_threads // at_once)
        self._crew = Crew(at_once)
        self._queue: deque[BatchJob] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, indices: np.ndarray) -> bool:
        job = self._make_job(indices)
        try:
            job.place(self._allocate(job.num_bytes))
        except MemoryBudgetError:
            if not self._queue:
                raise
            return False
        job.native.submit(self._crew, self._threads_each)
        self._queue.append(job)
        return True

    def take(self) -> Any:
        job = self._queue.popleft()
        job.native.wait()
        return job.batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.close()
        self._queue.clear()


class AheadByThreads:
    """For compressed stores, whose inner chunks are decoded through Python: each thread
    looks up, decodes and moves one batch."""

    def __init__(
        self,
        num_threads: int,
        max_in_flight: int,
        num_bytes: Callable[[np.ndarray], int],
        gather: Callable[[np.ndarray, Allocate], Any],
        allocate: Allocate,
    ) -> None:
        self._num_bytes, self._gather, self._allocate = num_bytes, gather, allocate
        self._pid = os.getpid()
        self._workers = ThreadPoolExecutor(max(1, min(num_threads, max_in_flight)), thread_name_prefix="tracestore")
        self._queue: deque[Future[Any]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, indices: np.ndarray) -> bool:
        try:
            piece = self._allocate(self._num_bytes(indices))
        except MemoryBudgetError:
            if not self._queue:
                raise
            return False
        self._queue.append(self._workers.submit(self._gather, indices, _Given(piece)))
        return True

    def take(self) -> Any:
        return self._queue.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child has no threads of its parent to wait for.
        if os.getpid() == self._pid:
            self._workers.shutdown(wait=True, cancel_futures=True)
        self._queue.clear()


class _Given:
    """An Allocate that gives one piece, once, and keeps nothing of it."""

    def __init__(self, piece: Piece) -> None:
        self._pieces = [piece]

    def __call__(self, num_bytes: int) -> Piece:
        return self._pieces.pop()
