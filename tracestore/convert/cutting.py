"""Cut the sources of a conversion into runs, whose traces have segments of their own."""

import math
from collections.abc import Sequence

MIN_BYTES, MAX_BYTES, _NUM_RUNS = 256 << 20, 4 << 30, 64
_MAX_COMMITS = 256  # of a conversion


def cut(sizes: Sequence[int], shared: Sequence[object], total: int) -> list[range]:
    """Return runs of sources of at least `total` / 64, within limits; a larger source begins a run.

    Parameters
    ----------
    sizes : sequence of int
        Sizes of the sources in bytes.
    shared : sequence of object
        What a source has in common with others, None for nothing: sources with an equal value, and those between them,
        are in one run.
    total : int
        Size of all sources of the conversion, also of those that the store has: a conversion that was interrupted behind
        a run has the same runs later.
    """
    if not sizes:
        return []
    least = min(max(math.ceil(total / _NUM_RUNS), MIN_BYTES), MAX_BYTES)
    last = {id(value): k for k, value in enumerate(shared) if value is not None}
    begins, pending, until = list[int](), 0, -1
    for k, size in enumerate(sizes):
        if k > until and (not begins or pending >= least or size >= least):
            begins.append(k)
            pending = 0
        until = max(until, last.get(id(shared[k]), -1))
        pending += size
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(sizes)], strict=True)]


def commits_after(number: int, num_runs: int) -> bool:
    """Return whether a conversion commits when the run of that number ends; it does so in any case after the last one."""
    return (number + 1) % math.ceil(num_runs / _MAX_COMMITS) == 0
