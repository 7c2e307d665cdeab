"""Host memory as something that raises instead of something that kills.

On a CPU the kernel's out-of-memory killer comes before torch can raise. A soft limit on
the data segment makes allocations fail in this process, where the guard sees it.
"""

import resource
import threading
from dataclasses import dataclass
from typing import Self

import numpy as np

from tracestore.cgroup import cgroup_free, cgroup_limit
from tracestore.platform_support import process_memory

# Let go of before the last checkpoint of a run that cannot go on.
RESERVE_BYTES = 48 << 20
# Of a memory cgroup: page tables, sockets, shared memory, what others in it take, and what
# this process has mapped before but not yet touched.
_CGROUP_MARGIN = 128 << 20


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of this process. anonymous: resident and not reclaimable; file: resident pages
    of libraries and mapped stores; data: VmData, what RLIMIT_DATA counts."""

    anonymous: int
    file: int
    data: int


def memory_use() -> MemoryUse:
    """Return the use of memory of this process; see `platform_support.process_memory`."""
    found = process_memory()
    return MemoryUse(found.resident - found.shared, found.shared, found.data)


class PeakMemoryMonitor:
    """The largest use of memory while it is open, looked at every millisecond."""

    def __enter__(self) -> Self:
        self.peak = memory_use()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        now, peak = memory_use(), self.peak
        self.peak = MemoryUse(max(now.anonymous, peak.anonymous), max(now.file, peak.file), max(now.data, peak.data))

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._look()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()


def start_thread_pools() -> None:
    """Starts the thread pools now: libgomp ends the process when it cannot make a thread."""
    import torch  # here: `tracestore plan` reads what is above without it

    a = torch.ones(256, 256)
    (a @ a).sum().item()
    torch.nn.functional.relu(a.requires_grad_()).sum().backward()


def memory_limit(budget: int | None, start: MemoryUse, processes: int = 1) -> int | None:
    """Bytes above `start` that each of some like processes may take: its part of the budget, less
    where the memory cgroup's limit is nearer; None where there is neither."""
    shares = [] if budget is None else [budget // processes]
    limit = cgroup_limit()
    if limit is not None:
        shares.append(max(0, (limit - _CGROUP_MARGIN) // processes - start.anonymous))
    return min(shares, default=None)


def allocatable_bytes() -> int:
    """Return the bytes that this process can still allocate: what RLIMIT_DATA, RLIMIT_AS, the
    memory cgroup and the machine leave, whichever is least."""
    import psutil  # here: `tracestore plan` reads what is above without it

    free: list[int] = [psutil.virtual_memory().available]
    used = {resource.RLIMIT_DATA: memory_use().data, resource.RLIMIT_AS: psutil.Process().memory_info().vms}
    for kind, bytes_used in used.items():
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            free.append(max(0, soft - bytes_used))
    in_cgroup = cgroup_free()
    return min(free) if in_cgroup is None else min(*free, in_cgroup)


class MemoryBudget:
    """A soft RLIMIT_DATA of `start` (the process after its imports) plus `budget` bytes, and
    a reserve that `release` gives back so that a last checkpoint can be written."""

    def __init__(self, budget: int, start: MemoryUse) -> None:
        start_thread_pools()
        self._reserve: np.ndarray | None = np.ones(RESERVE_BYTES, np.uint8)
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        limit = start.data + budget
        for bound in self._before:
            limit = limit if bound == resource.RLIM_INFINITY else min(limit, bound)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, self._before[1]))

    def release(self) -> None:
        self._reserve = None
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
