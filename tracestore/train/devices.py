"""The device and the threads that torch computes on.

A thread of libgomp that waits for the others of its team spins, and sleeps after that. Spinning is faster while every
thread has a processor. Beside another busy program it takes time from the very thread that all wait for: training on
two processors took 4 to 15 times as long as alone, and 1.5 times with threads that sleep at once (bench/RESULTS.md).

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

import torch

from tracestore.errors import UsageError
from tracestore.oom.limits import RESERVE_BYTES, allocatable_bytes
from tracestore.platform_support import num_processors, run_queue_waits

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
    if num_threads == 1 or not hasattr(ctypes.CDLL(None), "GOMP_parallel") or not run_queue_waits():
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
    """Keep an idle team while the threads of this process wait for processors."""
    # Threads wait for some 3 % of the time on an idle machine, and beside one busy process for 50 to 100 % in total.
    busy = 0.2 + 0.03 * num_threads
    waits, then, share = run_queue_waits(), time.monotonic(), 0.0
    release: threading.Event | None = None
    while not done.wait(_INTERVAL_S):
        latest, now = run_queue_waits(), time.monotonic()
        waited_ns = sum(max(0, ns - waits.get(thread, 0)) for thread, ns in latest.items())
        share += 0.5 * (waited_ns * 1e-9 / (now - then) - share)
        waits, then = latest, now
        if release is None and share > busy:
            release = _start_idle_team(num_threads)
        elif release is not None and share < busy / 2:
            release.set()
            release = None
    if release is not None:
        release.set()


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
