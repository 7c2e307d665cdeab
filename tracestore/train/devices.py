"""The device and the threads that torch computes on.

A thread of libgomp that waits for the others of its team spins, and sleeps after that. Spinning is faster while every
thread has a processor. Next to another busy program it takes time from the very thread that all wait for: training on
two processors took 4 to 10 times as long as alone, and 1.6 to 1.9 times with threads that sleep at once (docs/decisions.md).

libgomp reads its settings once, but spins for 100 rounds only while it manages more threads than there are processors
(GOMP_SPINCOUNT in its manual). While the threads of this process wait for processors, `torch_threads` therefore keeps
a second team, which computes nothing. The threads that compute, and the results, stay the same.
"""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Self

import torch

from tracestore.errors import UsageError
from tracestore.oom.memory_limits import RESERVE_BYTES, allocatable_bytes
from tracestore.platform_support import idle_processor_s, num_processors, run_queue_waits

_INTERVAL_S = 0.1
# Upper bound for the stack of a thread and what the allocator keeps for it.
_THREAD_BYTES = 16 << 20


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads, which spin for a short time only while other programs use the processors.

    The end restores the previous number of threads. None: no change of the number.
    """
    previous = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        with _adapt_spinning(torch.get_num_threads()):
            yield
    finally:
        if count is not None:
            torch.set_num_threads(previous)


@contextmanager
def _adapt_spinning(num_threads: int) -> Iterator[None]:
    """Watch how long threads wait for processors. No-op if the system does not count it, or without libgomp."""
    if num_threads == 1 or not hasattr(ctypes.CDLL(None), "GOMP_parallel") or idle_processor_s() is None:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(num_threads, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(num_threads: int, done: threading.Event) -> None:
    """Keep an idle team while other programs take processors from the threads of this process."""
    contention, then = _Contention(num_threads), _Sample.take()
    release: threading.Event | None = None
    while not done.wait(_INTERVAL_S):
        now = _Sample.take()
        contention.add(then, now)
        then = now
        if release is None and contention.begins:
            release = _start_idle_team(num_threads)
        elif release is not None and contention.ends:
            release.set()
            release = None
    if release is not None:
        release.set()


class _Sample(NamedTuple):
    """Times until now, in seconds, but `waits_ns`: how long each thread was ready to run without a processor."""

    wall: float
    own: float
    idle: float
    waits_ns: dict[str, int]

    @classmethod
    def take(cls) -> Self:
        """Read all clocks."""
        return cls(time.monotonic(), time.process_time(), idle_processor_s() or 0.0, run_queue_waits())


class _Contention:
    """Moving averages that tell whether other programs take processors from the threads of this process.

    Parameters
    ----------
    num_threads : int
        Threads that compute.

    Attributes
    ----------
    waiting : float
        Number of threads of this process that wait for a processor.
    others : float
        Processors that other programs use, above those that `num_threads` threads leave free.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads, self._num_processors = num_threads, num_processors()
        self.waiting = self.others = 0.0

    def add(self, before: _Sample, after: _Sample) -> None:
        """Take the time between two samples into account."""
        seconds = after.wall - before.wall
        waited_ns = sum(max(0, ns - before.waits_ns.get(thread, 0)) for thread, ns in after.waits_ns.items())
        free = (after.own - before.own + after.idle - before.idle) / seconds
        others = self._num_processors - free - max(0, self._num_processors - self._num_threads)
        self.waiting += (waited_ns * 1e-9 / seconds - self.waiting) / 2
        self.others += (others - self.others) / 2

    @property
    def begins(self) -> bool:
        """Return whether the threads of this process wait, and other programs are the reason.

        Of two threads, 0.05 to 0.4 waited on an idle machine, and 0.5 to 1 next to a busy process.
        """
        return self.others > 0.5 and self.waiting > 0.2 + 0.03 * self._num_threads

    @property
    def ends(self) -> bool:
        """Return whether no other program needs processors. Sleeping threads often wait for each other on one processor."""
        return self.others < 0.3


def _start_idle_team(num_threads: int) -> threading.Event | None:
    """Start a team so large that libgomp manages more threads than there are processors.

    Return the event that ends it, or None where memory is short: libgomp ends the process if it cannot start a thread.
    """
    size = max(2, num_processors() - num_threads + 2)
    if allocatable_bytes() < RESERVE_BYTES + size * _THREAD_BYTES:
        return None
    release = threading.Event()
    with suppress(RuntimeError):  # the system refuses the first thread
        threading.Thread(target=_hold_team, args=(size, release), daemon=True).start()
        return release
    return None


def _hold_team(size: int, release: threading.Event) -> None:
    library = ctypes.CDLL(None)
    start = library.GOMP_parallel
    start.restype, start.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    # Each thread of the team calls free(NULL), which does nothing. The team sleeps after that, and ends with this thread.
    start(ctypes.cast(library.free, ctypes.c_void_p), None, size, 0)
    release.wait()


def pick_device(name: str) -> str:
    """Return the torch device for auto, cpu or cuda. Each local rank gets its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name
