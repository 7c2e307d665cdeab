"""What loading costs in memory, and how a budget is divided."""

from dataclasses import dataclass

from tracestore.data.epoch import EpochPlanner, mean_trace_bytes
from tracestore.errors import MemoryBudgetError
from tracestore.store.format import schema

# Threads, index arrays of a batch, Python objects: what is not a batch or a chunk.
_OVERHEAD_BYTES = 4 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of loading, above what the process has after its imports.

    batch_bytes: a batch of mean traces. batches_in_flight: gathered ahead at most, the
    consumer's own comes on top. buffer_bytes: all batches together, 0 for no limit.
    cache_bytes: decoded inner chunks of a compressed store."""

    batch_bytes: int
    batches_in_flight: int
    buffer_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """What loading takes when the consumer holds one batch at a time."""
        return (self.batches_in_flight + 1) * self.batch_bytes + self.cache_bytes + _OVERHEAD_BYTES


def plan_memory(maker: EpochPlanner, num_threads: int, cache_bytes: int, memory_budget: int | None) -> MemoryPlan:
    """Divides a budget over decoded chunks (a quarter of it at most) and batches.
    MemoryBudgetError where not even two batches of mean traces fit: the consumer's and the next."""
    batch = mean_trace_bytes(maker.store, maker.form, maker.indices) * maker.batch_size
    if maker.batch_by == "bytes":
        batch = maker.max_batch_cost or batch
    elif maker.batch_by is not None:
        batch = 0  # not known before an epoch is laid out
    compressed = maker.store.codec != "none"
    in_flight = max(1, num_threads + 1)
    if memory_budget is None:
        return MemoryPlan(batch, in_flight, 0, cache_bytes if compressed else 0)
    cache = 0
    if compressed:
        # One chunk a thread is decoded outside the cache.
        cache = min(cache_bytes, memory_budget // 4)
    ring = memory_budget - cache - _OVERHEAD_BYTES - (num_threads + 1) * schema.INNER_CHUNK_BYTES * compressed
    if ring < 2 * batch or ring <= 0:
        raise MemoryBudgetError(
            f"memory_budget {memory_budget:,} bytes: two batches need about "
            f"{2 * batch + memory_budget - ring:,}; lower batch_size"
        )
    fitting = max(1, ring // max(1, batch) - 1)
    return MemoryPlan(batch, min(in_flight, fitting), ring, cache)
