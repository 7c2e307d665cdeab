"""Host memory as something that raises instead of something that kills.

On a CPU the kernel's out-of-memory killer comes before torch can raise. A soft limit on
the data segment makes allocations fail in this process, where the guard sees it.
"""

import resource
from pathlib import Path

import numpy as np
import psutil
import torch

from tracestore.console import format_size
from tracestore.errors import UsageError

_RESERVE_BYTES = 48 << 20
# Threads, plans and library workspaces that come up during the first steps.
_SLACK_BYTES = 256 << 20


def _data_bytes() -> int:
    """VmData of this process: what RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().vms)


def warm_up() -> None:
    """Starts the thread pools now: libgomp ends the process when it cannot make a thread."""
    a = torch.ones(256, 256)
    (a @ a).sum().item()
    torch.nn.functional.relu(a.requires_grad_()).sum().backward()


class MemoryBudget:
    """A soft RLIMIT_DATA of what the process has now plus `budget` bytes, and a reserve
    that `release` gives back so that a last checkpoint can be written."""

    def __init__(self, budget: int, trace_bytes: int) -> None:
        floor = _SLACK_BYTES + _RESERVE_BYTES + 4 * trace_bytes
        if budget < floor:
            raise UsageError(
                f"--memory-budget {format_size(budget)} is below {format_size(floor)}, what one trace of this store needs"
            )
        warm_up()
        self._reserve: np.ndarray | None = np.ones(_RESERVE_BYTES, np.uint8)
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _data_bytes() + budget
        hard = self._before[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def release(self) -> None:
        self._reserve = None
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
