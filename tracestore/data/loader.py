"""TraceLoader: collated batches from threads of this process, in an exact order."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from tracestore._core.blocks import BlockPool
from tracestore.data.batch import pyg_classes
from tracestore.data.batch_format import BatchFormat, EdgeOptions
from tracestore.data.batch_jobs import BatchJob, gather_batch, make_job
from tracestore.data.buffers import Allocate, BatchBuffer, PooledBuffer, TorchBuffer
from tracestore.data.datasets import StoreLike
from tracestore.data.epoch import EpochPlan, EpochPlanner, mean_trace_bytes, rank_and_world_size
from tracestore.data.memory_plan import plan_memory
from tracestore.data.prefetch import NativePrefetcher, ThreadPrefetcher
from tracestore.errors import MemoryBudgetError, UsageError
from tracestore.store.read.store import DEFAULT_CACHE_BYTES, TraceStore, open_store

STATE_VERSION = 2


class TraceLoader:
    """Collated batches of a store, gathered ahead by threads.

    Yields SequenceBatch (view "sequence") or a PyG Batch (view "graph"; see
    data.jobs.gather_batch). `indices` restricts it to some traces. batch_size is the
    global one, of which each rank gets a slice (pad: a short last batch is filled with
    the epoch's first traces); batch_by "tokens", "nodes", "edges" or "bytes" makes
    batches of at most max_batch_cost of these instead. dtype "float32" converts while
    gathering; None keeps the stored one. Each complete iteration is one epoch; the next
    has another order. `state_dict()`, taken after batch k, lets another loader over the
    same traces continue with batch k + 1, whatever its number of threads and ranks.

    A batch lies in memory that is used again once nothing refers to any of its tensors;
    batches that are kept stay valid. memory_budget (bytes) bounds batches, those the
    consumer holds included, and decoded chunks; MemoryBudgetError where that cannot be.
    Decoded chunks of a compressed store take at most cache_bytes, and max_cache_batches
    batches where that is given.
    pin_memory takes batches from torch's pinned memory instead, for copies to a GPU.
    as_pyg=False yields a GraphBatch in place of a PyG Batch, and never imports PyG.
    """

    def __init__(
        self,
        store: StoreLike,
        view: str = "sequence",
        *,
        batch_size: int = 16,
        batch_by: str | None = None,
        max_batch_cost: int | None = None,
        shuffle: str = "global",
        seed: int = 0,
        num_threads: int = 2,
        indices: Sequence[int] | np.ndarray | None = None,
        buffer_size: int = 1000,
        block_bytes: int = 256 << 20,
        drop_last: bool = False,
        pad_last: bool = False,
        score_threshold: float = 0.5,
        attention_threshold: float = 0.0,
        top_k: float | None = None,
        edge_format: str = "coo",
        dtype: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        cache_bytes: int | None = None,
        max_cache_batches: int | None = None,
        memory_budget: int | None = None,
        pin_memory: bool = False,
        as_pyg: bool = True,
    ) -> None:
        if num_threads < 0:
            raise UsageError(f"found num_threads {num_threads}, expected at least 0")
        self.store = store.again() if isinstance(store, TraceStore) else open_store(store)
        self.format = BatchFormat(view, EdgeOptions(attention_threshold, top_k, edge_format), dtype, as_pyg)
        self.format.check(self.store)
        if view == "graph" and as_pyg:
            pyg_classes()  # now, so that workers that are forked from this process have it
        self.targets = self.store.targets(score_threshold)
        self.epochs = EpochPlanner(
            self.store,
            self.format,
            batch_size=batch_size,
            batch_by=batch_by,
            max_batch_cost=max_batch_cost,
            shuffle=shuffle,
            seed=seed,
            indices=indices,
            buffer_size=buffer_size,
            block_bytes=block_bytes,
            drop_last=drop_last,
            pad_last=pad_last,
        )
        found = rank_and_world_size()
        self.rank = found[0] if rank is None else rank
        self.world_size = found[1] if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"found rank {self.rank} of {self.world_size}")
        self.num_threads, self.pin_memory = num_threads, pin_memory
        cache_bytes = DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes
        if max_cache_batches is not None:
            cache_bytes = min(cache_bytes, max_cache_batches * batch_size * mean_trace_bytes(self.store, self.format))
        self.memory = plan_memory(self.epochs, num_threads, cache_bytes, memory_budget)
        self.store.set_cache_limit(self.memory.cache_bytes)
        self.max_in_flight = self.memory.batches_in_flight
        self._pool = self._new_pool()
        self.epoch = 0
        self._position = 0
        self._resume_at = 0
        self._epoch_done = False

    def _new_pool(self) -> BlockPool:
        return BlockPool(self.memory.buffer_bytes, self.max_in_flight + 1)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pool = self._new_pool()

    @property
    def view(self) -> str:
        return self.format.view

    @property
    def batch_size(self) -> int:
        return self.epochs.batch_size

    @property
    def num_samples(self) -> int:
        """Traces an epoch visits, over all ranks."""
        return self.epochs.num_samples

    def __len__(self) -> int:
        """Batches of the epoch, the same on every rank; with batch_by another in every epoch."""
        return len(self.epochs.plan(self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; the one that a loaded state is in keeps its position."""
        if epoch != self.epoch or self._epoch_done:
            self._resume_at = self._position = 0
        self.epoch, self._epoch_done = epoch, False

    def state_dict(self) -> dict[str, Any]:
        """A few integers and words: what the next batch is. Survives JSON."""
        return {"version": STATE_VERSION, "epoch": self.epoch, "batch": self._position, **self.epochs.signature()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the state was taken. UsageError where it is of another order."""
        for name, mine in {"version": STATE_VERSION, **self.epochs.signature()}.items():
            if state.get(name) != mine:
                raise UsageError(f"state of another loader: {name} is {state.get(name)!r}, expected {mine!r}")
        self.epoch, self._resume_at = int(state["epoch"]), int(state["batch"])
        self._position, self._epoch_done = self._resume_at, False

    def batch_indices(self, batch: int, epoch: int | None = None) -> np.ndarray:
        """Store indices of this rank's slice of a batch: a pure function."""
        plan = self.epochs.plan(self.epoch if epoch is None else epoch)
        return plan.traces(batch, self.rank, self.world_size)

    def reduce_memory(self) -> None:
        """Takes less memory from the next epoch or continuation on: one batch in flight,
        no decoded chunks kept. The order stays what it is."""
        self.max_in_flight = 1
        self._pool.max_idle = 1
        self._pool.trim()
        self.store.set_cache_limit(0)

    # Gathering

    def gather(self, indices: Sequence[int] | np.ndarray) -> Any:
        """The collated batch of some traces, now."""
        in_worker = get_worker_info() is not None
        return self._gather(np.asarray(indices, np.int64), None if in_worker else self._allocate)

    def _gather(self, indices: np.ndarray, allocate: Allocate | None) -> Any:
        return gather_batch(self.store, indices, self.targets, self.format, allocate)

    def _allocate(self, num_bytes: int) -> BatchBuffer:
        if self.pin_memory:
            return TorchBuffer(num_bytes, pinned=True)
        lease = self._pool.lease(num_bytes)
        if lease is None:
            raise self._over_budget(num_bytes)
        return PooledBuffer(lease)

    def _over_budget(self, num_bytes: int) -> MemoryBudgetError:
        return MemoryBudgetError(
            f"the next batch needs {num_bytes:,} bytes, and batches that are still referred to hold "
            f"{self._pool.leased_bytes:,} of the {self.memory.buffer_bytes:,} that the memory budget leaves for batches; "
            "let go of batches, or lower batch_size"
        )

    def __iter__(self) -> Iterator[Any]:
        if self._epoch_done:
            self._next_epoch()
        plan = self.epochs.plan(self.epoch)
        start, self._resume_at = self._resume_at, 0
        # A state taken after the last batch: nothing is left of its epoch.
        self._position, self._epoch_done = start, start >= len(plan)
        return self._iterate(plan, start, self.epoch)

    def _iterate(self, plan: EpochPlan, start: int, epoch: int) -> Iterator[Any]:
        total = len(plan)
        if self.num_threads == 0:
            for batch in range(start, total):
                result = self.gather(plan.traces(batch, self.rank, self.world_size))
                self._mark_yielded(batch, total)
                yield result
                del result
        else:
            yield from self._iterate_ahead(plan, start, total)
        if self.epoch == epoch:  # not where the next one has begun already
            self._next_epoch()

    def _mark_yielded(self, batch: int, total: int) -> None:
        # Who counts batches does not ask for one after the last: the epoch is over all the same.
        self._position, self._epoch_done = batch + 1, batch + 1 == total

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._position, self._epoch_done = 0, False

    def _iterate_ahead(self, plan: EpochPlan, start: int, total: int) -> Iterator[Any]:
        def traces(batch: int) -> np.ndarray:
            return plan.traces(batch, self.rank, self.world_size)

        def job(batch: int) -> BatchJob:
            return make_job(self.store, traces(batch), self.targets, self.format)

        ahead: NativePrefetcher | ThreadPrefetcher
        threads, in_flight = self.num_threads, self.max_in_flight
        if self.store.codec == "none":
            ahead = NativePrefetcher(threads, in_flight, job, self._allocate, drop_behind=self.memory.buffer_bytes > 0)
        else:
            announce = partial(self.store.announce, view=self.view)
            ahead = ThreadPrefetcher(threads, in_flight, traces, self._bytes, self._gather, self._allocate, announce)
        with self.store.coming(traces, start, total, self.view) as coming, ahead:
            submitted = planned = start
            for batch in range(start, total):
                coming.at(batch)
                while submitted < total and len(ahead) < self.max_in_flight and ahead.submit(submitted):
                    submitted += 1
                planned = max(planned, submitted)
                while planned < total and ahead.plan(planned):
                    planned += 1
                result = ahead.take()
                self._mark_yielded(batch, total)
                yield result
                del result

    def _bytes(self, indices: np.ndarray) -> int:
        return self.format.max_batch_bytes(self.store, indices)
