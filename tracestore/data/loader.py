"""TraceLoader: collated batches from threads of this process, in an exact order."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.data import order
from tracestore.data.batch import GraphOptions, gather_graphs, gather_sequences
from tracestore.data.datasets import StoreLike, mean_trace_bytes, rank_and_world_size
from tracestore.errors import UsageError
from tracestore.store.reader import DEFAULT_CACHE_BYTES, TraceStore

STATE_VERSION = 1


class TraceLoader:
    """Collated batches of a store, gathered ahead by threads.

    Yields SequenceBatch (view "sequence") or a PyG Batch (view "graph"; see
    data.batch.gather_graphs). `indices` restricts it to some traces; batch_size is the
    global one, of which each rank gets a slice. Each complete iteration is one epoch;
    the next has another order. `state_dict()`, taken after batch k, lets another loader
    over the same traces continue with batch k + 1, whatever its number of threads.

    At most num_threads + 1 batches are in flight; memory_budget (bytes) lowers that,
    and is refused with UsageError where two batches do not fit.
    """

    def __init__(
        self,
        store: StoreLike,
        view: str = "sequence",
        *,
        batch_size: int = 16,
        shuffle: str = "global",
        seed: int = 0,
        num_threads: int = 2,
        indices: Sequence[int] | np.ndarray | None = None,
        buffer_size: int = 1000,
        block_bytes: int = 256 << 20,
        drop_last: bool = False,
        score_threshold: float = 0.5,
        attention_threshold: float = 0.0,
        top_k: float | None = None,
        edges: str = "coo",
        rank: int | None = None,
        world_size: int | None = None,
        cache_bytes: int | None = None,
        memory_budget: int | None = None,
    ) -> None:
        if batch_size < 1 or num_threads < 0:
            raise UsageError(f"found batch_size {batch_size}, num_threads {num_threads}, expected at least 1 and 0")
        if shuffle not in order.MODES:
            raise UsageError(f"found shuffle {shuffle!r}, expected one of {', '.join(order.MODES)}")
        path = store.path if isinstance(store, TraceStore) else store
        self.store = TraceStore(path, cache_bytes=DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes)
        self.store.require(view)
        self.view, self.batch_size, self.shuffle, self.seed = view, batch_size, shuffle, seed
        self.indices = None if indices is None else np.asarray(indices, np.int64)
        if (
            self.indices is not None
            and self.indices.size
            and not (self.indices.min() >= 0 and self.indices.max() < len(self.store))
        ):
            raise UsageError(f"found indices outside 0 .. {len(self.store) - 1}")
        self.options = GraphOptions(attention_threshold, top_k, edges)
        self.targets = self.store.targets(score_threshold)
        self.buffer_size, self.drop_last = buffer_size, drop_last
        trace_bytes = mean_trace_bytes(self.store, view)
        self.block_size = max(1, block_bytes // max(1, trace_bytes))
        found = rank_and_world_size()
        self.rank = found[0] if rank is None else rank
        self.world_size = found[1] if world_size is None else world_size
        self.num_threads = num_threads
        self.max_in_flight = num_threads + 1
        if memory_budget is not None:
            fitting = memory_budget // max(1, trace_bytes * batch_size)
            if fitting < 2:
                raise UsageError(
                    f"memory_budget {memory_budget:,} bytes: two batches of {batch_size} traces need about "
                    f"{2 * trace_bytes * batch_size:,}; lower batch_size"
                )
            self.max_in_flight = min(self.max_in_flight, fitting)
        self.epoch = 0
        self._position = 0
        self._resume_at = 0

    @property
    def num_samples(self) -> int:
        """Traces an epoch visits, over all ranks."""
        return len(self.store) if self.indices is None else len(self.indices)

    def __len__(self) -> int:
        """Batches an epoch, the same on every rank."""
        return order.num_batches(self.num_samples, self.batch_size, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; the one that a loaded state is in keeps its position."""
        if epoch != self.epoch:
            self._resume_at = self._position = 0
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """A few integers and a word: what the next batch is."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "batch": self._position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
            "window": {"buffer": self.buffer_size, "block": self.block_size}.get(self.shuffle, 0),
            "indices_crc32c": 0 if self.indices is None else crc32c(self.indices),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the state was taken. UsageError where it is of another order."""
        mine = self.state_dict()
        for name in ("version", "seed", "batch_size", "num_samples", "shuffle", "window", "indices_crc32c"):
            if state.get(name) != mine[name]:
                raise UsageError(f"state of another loader: {name} is {state.get(name)!r}, expected {mine[name]!r}")
        self.epoch, self._resume_at = int(state["epoch"]), int(state["batch"])
        self._position = self._resume_at

    def batch_indices(self, batch: int, epoch: int | None = None) -> np.ndarray:
        """Store indices of this rank's slice of a batch: a pure function."""
        plan = self._plan(self.epoch if epoch is None else epoch)
        return self._indices(plan, batch)

    def _plan(self, epoch: int) -> order.EpochOrder:
        return order.EpochOrder(self.num_samples, self.seed, epoch, self.shuffle, self.buffer_size, self.block_size)

    def _indices(self, plan: order.EpochOrder, batch: int) -> np.ndarray:
        positions = order.batch_positions(batch, self.num_samples, self.batch_size, self.rank, self.world_size)
        chosen = plan.at(positions)
        return chosen if self.indices is None else self.indices[chosen]

    def shrink(self) -> None:
        """Takes less memory from the next epoch or continuation on: one batch in flight,
        no decoded chunks kept. The order stays what it is."""
        self.max_in_flight = 1
        self.store.shrink_cache()

    def gather(self, indices: Sequence[int] | np.ndarray) -> Any:
        """The collated batch of some traces, now."""
        if self.view == "sequence":
            return gather_sequences(self.store, indices, self.targets)
        return gather_graphs(self.store, indices, self.targets, self.options)

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan(self.epoch)
        start, self._resume_at = self._resume_at, 0
        self._position = start
        return self._iterate(plan, start)

    def _iterate(self, plan: order.EpochOrder, start: int) -> Iterator[Any]:
        total = len(self)
        if self.num_threads == 0:
            for batch in range(start, total):
                result = self.gather(self._indices(plan, batch))
                self._position = batch + 1
                yield result
            self._end_epoch()
            return
        pid = os.getpid()
        pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="tracestore")
        queue: deque[Future[Any]] = deque()
        try:
            following = start
            for batch in range(start, total):
                while following < total and len(queue) < self.max_in_flight:
                    queue.append(pool.submit(self.gather, self._indices(plan, following)))
                    following += 1
                result = queue.popleft().result()
                self._position = batch + 1
                yield result
                del result
            self._end_epoch()
        finally:
            # A forked child has no threads of its parent to wait for.
            if os.getpid() == pid:
                pool.shutdown(wait=True, cancel_futures=True)

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._position = 0
