"""Settings of the process: allocator, garbage collector, thread switching, signals, output and environment.

Only a program that owns its process may call `configure_program`, `discard_closed_output`, `reuse_freed_memory`,
`imports_uncollected` and `exit_ignoring_sigint`. The other context managers restore the previous settings and are safe in a library.
"""

import atexit
import ctypes
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# The value of both thresholds when a program starts.
_FIRST_THRESHOLD = 128 << 10
_RARE_COLLECTION = 50_000  # new objects; the 700 of Python take a quarter of the conversion of small traces
_reuses_memory = threading.Event()


def configure_program() -> None:
    """Shorten the spinning of the threads of OpenMP and OpenBLAS, and disable tqdm.

    Call this before NumPy and torch are imported: the libraries read their settings once.
    """
    # Loading a GGUF file draws a progress bar with tqdm, even into logs.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # By default a libgomp thread spins for 300,000 rounds at a barrier. With another program on one of
    # the processors, that made extraction 5.2 times as slow as on an idle machine; 10,000 rounds made it
    # 1.6 times as slow, and cost nothing on an idle machine (docs/decisions.md). Training has more barriers:
    # there, train.devices.torch_threads() shortens the spinning further while other programs are busy.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # By default a thread of OpenBLAS spins for 0.1 s, first when NumPy is imported: a quarter of the processor time of
    # converting a small file. 2**22 cycles are long enough between the calls of a decomposition; 2**16 were not.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "22")


def closed_output() -> list[int]:
    """Return which of standard output and standard error are the ends of pipes without a reader.

    SIGPIPE itself stays ignored: it would also end a process that writes to a worker or server that has ended.
    """
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return [number for number, event in poll.poll(0) if event & select.POLLERR]


def discard_closed_output() -> None:
    """Let output whose reader has gone go nowhere, so that the interpreter does not report it at the end."""
    for number in closed_output():
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


def reuse_freed_memory(max_bytes: int = 1 << 30, *, num_arenas: int | None = None) -> None:
    """Keep up to `max_bytes` of freed memory in the allocator instead of returning it to the system.

    The system clears every page that it returns, which took a tenth of the time of reading .pkl.gz files, and a tenth
    to a fifth of an epoch (docs/decisions.md). No-op where the C library is not glibc.

    Parameters
    ----------
    max_bytes : int
        Bytes to keep, at most 1 GiB.
    num_arenas : int, optional
        Arenas that the threads share. Each keeps freed memory of its own. Default: glibc's, 8 a processor.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        if num_arenas is not None:
            libc.mallopt(_M_ARENA_MAX, num_arenas)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, min(max_bytes, 1 << 30))
        _reuses_memory.set()


def return_freed_memory() -> None:
    """Return what is free to the system, now and from now on: memory has run out.

    No-op without a call of `reuse_freed_memory`.
    """
    if _reuses_memory.is_set():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _FIRST_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _FIRST_THRESHOLD)
        libc.malloc_trim(0)


def exit_ignoring_sigint(code: int) -> NoReturn:
    """End the process with an exit code that a late Ctrl-C does not change.

    Threads, callbacks of atexit and output end as for every process, in the way of multiprocessing. The modules are
    left to the kernel: clearing them takes 8 ms, and with torch half a second. Under a profiler or debugger, which
    have work to do after the program, SystemExit is raised instead.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _is_observed():
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter reports it
    os._exit(code)


def _is_observed() -> bool:
    """Return whether a profiler, debugger or measurement of coverage observes this thread."""
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    return sys.getprofile() is not None or sys.gettrace() is not None or any(tools)


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Set for how long a thread may hold the interpreter while another thread waits for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection, and look for garbage rarely: most new ones are kept."""
    before = gc.get_threshold()
    gc.freeze()
    if before[0]:  # else nothing is looked for
        gc.set_threshold(max(before[0], _RARE_COLLECTION), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no garbage while many objects are made that all are kept: each collection looks at all of them again."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Collect no garbage, and exclude what has been made from the collections that follow.

    Imported modules stay: looking for garbage among them took 3 ms of the start of a command.
    """
    with paused_collection():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def signal_handler(number: signal.Signals, handler: Callable[..., object] | signal.Handlers) -> Iterator[None]:
    """Install a signal handler, and restore the previous one at the end."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def ranks_here() -> int:
    """Return the number of ranks on this machine, which share its cache of remote files."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(ranks)) if ranks.isdecimal() else 1
