"""The memory that loading takes, and how a budget is divided."""

from dataclasses import dataclass

from tracestore.data.batch_format import BatchFormat
from tracestore.data.epoch import EpochPlanner, mean_trace_bytes
from tracestore.errors import MemoryBudgetError
from tracestore.store.format import schema
from tracestore.store.read.store import DEFAULT_CACHE_BYTES, TraceStore

# Threads, index arrays of a batch and Python objects: all that is neither a batch nor a chunk.
_OVERHEAD_BYTES = 4 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that loading takes above what the process has after its imports.

    Attributes
    ----------
    batch_bytes : int
        A batch of traces of mean size.
    batches_in_flight : int
        Largest number of batches that are gathered ahead. The consumer's batch comes on top.
    buffer_bytes : int
        Limit for all batches together, 0 for no limit.
    cache_bytes : int
        Limit for the decoded inner chunks of a compressed store.
    """

    batch_bytes: int
    batches_in_flight: int
    buffer_bytes: int
    cache_bytes: int


def plan_memory(planner: EpochPlanner, num_threads: int, cache_bytes: int, memory_budget: int | None) -> MemoryPlan:
    """Divide a budget between decoded chunks (at most a quarter) and batches.

    Parameters
    ----------
    planner : EpochPlanner
        Makes the batches.
    num_threads : int
        Threads that gather.
    cache_bytes : int
        Limit for decoded chunks; has no effect on uncompressed stores.
    memory_budget : int, optional
        Bytes for everything. None sets no limit for batches.

    Returns
    -------
    MemoryPlan
        The division.

    Raises
    ------
    MemoryBudgetError
        If two batches of mean traces, the consumer's and the next, do not fit.
    """
    batch = mean_trace_bytes(planner.store, planner.batch_format, planner.indices) * planner.batch_size
    if planner.batch_by == "bytes":
        batch = planner.max_batch_cost or batch
    elif planner.batch_by is not None:
        batch = 0  # unknown before an epoch is planned
    compressed = planner.store.codec != "none"
    in_flight = max(1, num_threads + 1)
    if memory_budget is None:
        return MemoryPlan(batch, in_flight, 0, cache_bytes if compressed else 0)
    cache = min(cache_bytes, memory_budget // 4) if compressed else 0
    # Each thread decodes one chunk outside the cache.
    decoding = (num_threads + 1) * schema.INNER_CHUNK_BYTES if compressed else 0
    available = memory_budget - cache - _OVERHEAD_BYTES - decoding
    if available < 2 * batch or available <= 0:
        raise MemoryBudgetError(
            f"memory_budget {memory_budget:,} bytes: two batches need about "
            f"{2 * batch + memory_budget - available:,}; lower batch_size"
        )
    fitting = max(1, available // max(1, batch) - 1)
    return MemoryPlan(batch, min(in_flight, fitting), available, cache)


def cache_limit(
    store: TraceStore,
    batch_format: BatchFormat,
    cache_bytes: int | None,
    max_cache_batches: int | None,
    batch_size: int,
) -> int:
    """Return the limit in bytes for decoded chunks: `cache_bytes`, and at most max_cache_batches batches."""
    limit = DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes
    if max_cache_batches is None:
        return limit
    return min(limit, max_cache_batches * batch_size * mean_trace_bytes(store, batch_format))
