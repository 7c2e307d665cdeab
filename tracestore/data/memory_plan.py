"""The memory that loading takes, how a budget is divided, and what an epoch fetches of remote stores."""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from tracestore.data.batches.batch_format import BatchFormat
from tracestore.data.batches.batch_jobs import BatchGatherer
from tracestore.data.epoch import EpochPlan, EpochPlanner, mean_trace_bytes
from tracestore.errors import MemoryBudgetError
from tracestore.process import ranks_here
from tracestore.store.format import schema
from tracestore.store.read.batch_sources import file_bytes
from tracestore.store.read.store import DEFAULT_CACHE_BYTES, TraceStore
from tracestore.words import format_size

# Threads, index arrays of a batch and Python objects: all that is neither a batch nor a chunk.
_OVERHEAD_BYTES = 4 << 20
# Batches of an epoch that an estimate of fetched bytes follows, and what is much more than another order fetches.
_MOST_BATCHES, _MUCH_MORE = 4096, 1.5


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


def advise_block(planner: EpochPlanner, gatherer: BatchGatherer, rank: int, world_size: int) -> str | None:
    """Return advice to use shuffle "block" if a global epoch fetches much more from remote stores; None otherwise."""
    members = [member for member in planner.store.internals.members if member.files.cache_bytes is not None]
    if planner.shuffle != "global" or not members:
        return None
    room = min(member.files.cache_bytes or 0 for member in members)
    if sum(member.manifest.num_bytes for member in members) <= room:
        return None
    form = gatherer.batch_format
    segments, whole, parts = file_bytes(planner.store.internals, form.source_view, form.layer_numbers(planner.store))
    here = min(ranks_here(), world_size)

    def fetched(plan: EpochPlan) -> float:
        """Return the bytes that the ranks of this machine fetch: the cache keeps the files that were used last."""
        held: OrderedDict[int, float] = OrderedDict()
        found, first_half, free, num_followed = 0.0, 0.0, float(room), min(len(plan), _MOST_BATCHES)
        for batch in range(num_followed):
            first_half = found if batch == num_followed // 2 else first_half
            traces = gatherer.traces(plan.traces(batch, rank // here, -(-world_size // here)))
            # Layers that are fetched one by one are used once, but take room: the negative numbers.
            sizes = {-1 - batch: float(parts[traces].sum())}
            sizes |= {number: float(whole[number]) for number in np.unique(segments[traces]).tolist()}
            for number, size in sizes.items():
                if number not in held:
                    found, free = found + size, free - size
                held[number] = size
                held.move_to_end(number)
                while free < 0 and len(held) > 1:
                    free += held.popitem(last=False)[1]
        num_left = len(plan) - num_followed
        return found + (found - first_half) * num_left / max(1, num_followed - num_followed // 2)

    most, least = fetched(planner.plan(0)), fetched(replace(planner, shuffle="block").plan(0))
    if most <= _MUCH_MORE * least:
        return None
    # Files of compressed arrays are evicted before their batch more often than this counts.
    much, less = (
        ("much more", "less") if planner.store.codec != "none" else (f"about {format_size(n)}" for n in (most, least))
    )
    return (
        f"{planner.store.path}: an epoch in global order fetches {much}, because the cache of {format_size(room)} "
        f"keeps too few of its files; with --shuffle block {less}"
    )
