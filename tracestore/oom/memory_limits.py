"""Measure and limit the memory of this process.

On a CPU the kernel's out-of-memory killer acts before torch can raise. A soft limit on the
data segment makes allocations fail in this process instead, where the guard can recover.
"""

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np
import torch

from tracestore.platform_support import MemoryUse, cgroup_free, cgroup_limit, memory_use

# Released before the last checkpoint of a run that cannot continue.
RESERVE_BYTES = 48 << 20
# Left free in a memory cgroup for page tables, sockets, shared memory, other processes, and
# pages that this process has mapped but not yet touched.
_CGROUP_MARGIN = 128 << 20


class PeakMemoryMonitor:
    """A context that samples the memory of this process every millisecond and keeps the `peak`."""

    def __enter__(self) -> Self:
        """Start sampling."""
        self.peak = memory_use()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        self.peak = MemoryUse(*map(max, self.peak, memory_use()))

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._sample()

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._done.set()
        self._thread.join()
        self._sample()


def start_thread_pools() -> None:
    """Start torch's thread pools: libgomp ends the process if it cannot start a thread later."""
    a = torch.ones(256, 256)
    (a @ a).sum().item()
    torch.nn.functional.relu(a.requires_grad_()).sum().backward()


def memory_limit(budget: int | None, start: MemoryUse, processes: int = 1) -> int | None:
    """Return the bytes that this process may allocate above `start`, or None without a limit.

    Parameters
    ----------
    budget : int, optional
        Bytes that all processes together may allocate.
    start : MemoryUse
        Memory of this process before training.
    processes : int
        Processes that share the budget and the limit of the memory cgroup equally.
    """
    shares = [] if budget is None else [budget // processes]
    limit = cgroup_limit()
    if limit is not None:
        shares.append(max(0, (limit - _CGROUP_MARGIN) // processes - start.anonymous))
    return min(shares, default=None)


def allocatable_bytes() -> int:
    """Return the bytes that this process can still allocate.

    This is the least of what RLIMIT_DATA, RLIMIT_AS, the memory cgroup and the machine leave.
    """
    import psutil  # on first use: only ambiguous errors need it

    free: list[int] = [psutil.virtual_memory().available]
    used = {resource.RLIMIT_DATA: memory_use().data, resource.RLIMIT_AS: psutil.Process().memory_info().vms}
    for kind, bytes_used in used.items():
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            free.append(max(0, soft - bytes_used))
    in_cgroup = cgroup_free()
    return min(free) if in_cgroup is None else min(*free, in_cgroup)


@contextmanager
def limited_memory(budget: int | None, start: MemoryUse) -> Iterator[Callable[[], None]]:
    """Set a soft RLIMIT_DATA and keep a reserve for a last checkpoint.

    Parameters
    ----------
    budget : int, optional
        Bytes that the process may allocate above `start`. None: no limit.
    start : MemoryUse
        Memory of the process after its imports.

    Yields
    ------
    callable
        Frees the reserve and restores the previous limit, as the end of the context does.
    """
    if budget is None:
        yield lambda: None
        return
    start_thread_pools()
    reserve = [np.ones(RESERVE_BYTES, np.uint8)]
    previous = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [bound for bound in previous if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([start.data + budget, *bounds]), previous[1]))

    def release() -> None:
        reserve.clear()
        resource.setrlimit(resource.RLIMIT_DATA, previous)

    try:
        yield release
    finally:
        release()
