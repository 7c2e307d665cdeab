"""TraceLoader: collated batches from threads of this process, in an exact order.

One module of over 400 lines: the documented parameters of one class.
"""

import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Generic

import numpy as np
from torch.utils.data import get_worker_info

from tracestore._core.blocks import MemoryPool
from tracestore.data.batches.batch import BatchT
from tracestore.data.batches.batch_format import BatchFormat, EdgeFormat, EdgeMasks, Layers, LoaderHtml, Positions, View
from tracestore.data.batches.buffers import BatchBuffer, TorchBuffer
from tracestore.data.datasets import StoreLike, open_for_batches
from tracestore.data.epoch import BatchBy, EpochPlan, EpochPlanner, rank_and_world_size
from tracestore.data.memory_plan import advise_block, cache_limit, plan_memory
from tracestore.data.order import Shuffle, shuffle_name, whole_number
from tracestore.data.prefetch import BatchPrefetcher, NativePrefetcher, ThreadPrefetcher, closed_at_exit
from tracestore.errors import MemoryBudgetError, TracestoreWarning, UsageError

STATE_VERSION = 4
# Samples of a batch by default: traces, or tokens in view "tokens".
DEFAULT_BATCH_SIZE, DEFAULT_TOKENS = 16, 4096


class TraceLoader(LoaderHtml, Generic[BatchT]):
    """Loader of collated batches, which threads of this process gather ahead.

    An iteration is one epoch, and the next one has another order. Batch k is a pure function of store, seed, epoch and
    composition of batches, whatever the number of threads and ranks. Traces without a label or score are included.

    A batch lies in memory that is reused when nothing refers to any of its tensors any more.
    Batches that are kept stay valid.

    Parameters
    ----------
    store : TraceStore, TraceSubset, str, PathLike or sequence of paths
        A store, a subset of one, the path of a store, or those of several stores that are opened as
        one. The `trace_index` of a batch holds store indices, also for a subset.
    view : {"sequence", "graph", "tokens"}
        "sequence" yields `SequenceBatch`, "graph" a PyG Batch of B * L graphs with the fields of
        `GraphBatch`, "tokens" a `TokenBatch` of tokens from any traces.
    layers : int or sequence of int, optional
        Read and yield these stored layers only, in this order; negative ones count from the last. None: all.
    positions : {"all", "prompt", "answer", "last"}, int, slice or sequence of int, optional
        View "tokens": the tokens of each trace, by default "all". "answer" takes the stored
        answer_span, else the tokens that generated_mask marks, else those after the prompt.
        "prompt" takes the first prompt_length tokens, else those that generated_mask does not mark.
        View "sequence": the token, "last" or an int.
    batch_size : int, optional
        Traces, or tokens in view "tokens", of a batch over all ranks; 16 or 4,096 by default. Each
        rank gets a contiguous slice.
    batch_by : {"tokens", "nodes", "edges", "bytes"}, optional
        Bound the cost of a batch in this unit instead of its number of traces.
    max_batch_cost : int, optional
        The bound. A trace above it is a batch by itself. Required by `batch_by`.
    shuffle : {"global", "buffer", "block", "none"} or bool
        The order. "global" or True: a keyed permutation of all traces. A TracestoreWarning recommends
        "block" where that fetches much less of a remote store. "buffer": a shuffle buffer
        of `buffer_size` ids. "block": blocks of `block_bytes` of neighboring traces in random
        order, each permuted. "none" or False: the order of the store or subset.
    seed : int
        Seed of the order.
    num_threads : int
        Threads that gather. 0 gathers in the consumer's thread.
    indices : sequence of int, optional
        Restrict the loader to the traces with these store indices, or to others that `TraceStore.select` takes: a
        mask or question ids. Excludes a subset.
    buffer_size : int
        Ids of the window of shuffle "buffer".
    block_bytes : int
        Bytes of a block of shuffle "block".
    drop_last : bool
        Leave out a last batch that is short.
    pad_last : bool
        Fill a short last batch with the first traces of the epoch; excludes `drop_last` and `batch_by`.
    weights : sequence of int, optional
        The share of each of several stores that are opened as one: with [3, 1], three of four traces are
        from the first store, up to one trace at every point, counted over all epochs. Each store is read in
        an order of its own, which continues in the next epoch, and again in another order when it ends.
    epoch_size : int, optional
        Traces, or tokens in view "tokens", of an epoch, over all ranks; by default as many as there are.
        The next epoch continues where this one ends.
    score_threshold : float, optional
        Score below which a trace counts as a hallucination, or from which on in a store of
        hallucination scores. A stored label takes precedence. Default: 0.5, for scores in [0, 1];
        others need a threshold.
    targets : ndarray, shape (N,), optional
        Labels of all traces of the store, instead of those of its labels and scores.
    attention_threshold : float
        Keep the pairs of tokens whose attention is above this value as edges.
    top_k : float, optional
        A fraction in (0, 1], not a number: keep this fraction of each layer's stored pairs, those
        with the largest attention. Replaces the threshold.
    edge_format : {"coo", "packed", "heads"}
        "coo": `edge_index` and `edge_attr`. "packed": the causal triangles of head-averaged
        `attention`. "heads": those of each stored head. Triangles have every pair, also those that are
        no edges by `attention_threshold`; with `top_k` the other pairs are NaN.
    edge_masks : EdgeMasks, optional
        Edge format "packed" without PyG: set masked pairs to NaN, and count the edges into each node.
    dtype : str, optional
        "float32" converts while gathering: for models with float32 weights. None keeps the stored
        dtype, usually float16.
    rank, world_size : int, optional
        This rank and the number of ranks. By default from torch.distributed if it is initialized,
        else from the environment variables RANK and WORLD_SIZE.
    cache_bytes : int, optional
        Limit for the decoded chunks of a compressed store, 256 MiB by default.
    max_cache_batches : int, optional
        Further limit for decoded chunks, in batches of mean traces.
    memory_budget : int, optional
        Bytes for all batches, those that the consumer holds included, and decoded chunks.
    pin_memory : bool
        Take batches from torch's pinned memory, for copies to a GPU.
    as_pyg : bool
        With False, view "graph" yields `GraphBatch` and never imports PyG.

    Attributes
    ----------
    store : TraceStore
        The store, opened once more with a cache of its own.
    memory : MemoryPlan
        The division of the memory budget.
    targets : ndarray of float64, shape (N,)
        The label of each trace of the store; NaN without a label or score.

    Raises
    ------
    MemoryBudgetError
        If the budget cannot hold two batches, or, while iterating, the batches that are kept and
        the next one.
    MissingFieldError
        If the store lacks what the view needs.
    UsageError
        For an option outside its range, or if there is no such store.

    Examples
    --------
    >>> import tracestore
    >>> loader = tracestore.TraceLoader("store.zarr", batch_size=4, seed=1, dtype="float32")
    >>> loader
    TraceLoader('store.zarr', 'sequence', 12 traces, 3 layers, hidden size 8, float32, batch_size=4, shuffle='global')
    >>> len(loader), [batch.sequences.shape for batch in loader]
    (3, [torch.Size([4, 3, 8]), torch.Size([4, 3, 8]), torch.Size([4, 3, 8])])

    Save the position after a batch and continue with another number of threads:

    >>> batches = iter(loader)
    >>> _ = next(batches)
    >>> state = loader.state_dict()
    >>> other = tracestore.TraceLoader("store.zarr", batch_size=4, seed=1, num_threads=0, dtype="float32")
    >>> other.load_state_dict(state)
    >>> [b.question_id for b in other] == [b.question_id for b in batches]
    True

    Tokens of all traces in one layer, for a sparse autoencoder or a probe:

    >>> tokens = tracestore.TraceLoader("store.zarr", "tokens", layers=1, positions="all", batch_size=5)
    >>> batch = next(iter(tokens))
    >>> batch.hidden_states.shape, batch.trace_index.shape, batch.position.shape
    (torch.Size([5, 8]), torch.Size([5]), torch.Size([5]))

    For type checkers, name the class of the batches:

    >>> from tracestore.data.batches.batch import GraphBatch
    >>> graphs: tracestore.TraceLoader[GraphBatch]
    >>> graphs = tracestore.TraceLoader("store.zarr", "graph", as_pyg=False, dtype="float32")
    """

    def __init__(
        self,
        store: StoreLike,
        view: View = "sequence",
        *,
        layers: Layers | None = None,
        positions: Positions | None = None,
        batch_size: int | None = None,
        batch_by: BatchBy | None = None,
        max_batch_cost: int | None = None,
        shuffle: Shuffle | bool = "global",
        seed: int = 0,
        num_threads: int = 2,
        indices: Sequence[int] | np.ndarray | None = None,
        buffer_size: int = 1000,
        block_bytes: int = 256 << 20,
        drop_last: bool = False,
        pad_last: bool = False,
        weights: Sequence[int] | None = None,
        epoch_size: int | None = None,
        score_threshold: float | None = None,
        targets: np.ndarray | None = None,
        attention_threshold: float = 0.0,
        top_k: float | None = None,
        edge_format: EdgeFormat = "coo",
        edge_masks: EdgeMasks | None = None,
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
        self.format = BatchFormat(
            view,
            attention_threshold=attention_threshold,
            top_k=top_k,
            edge_format=edge_format,
            dtype=dtype,
            as_pyg=as_pyg,
            layers=layers,
            positions=positions,
            edge_masks=edge_masks,
        )
        self._gatherer, chosen, tokens = open_for_batches(store, self.format, score_threshold, indices, targets)
        self.store, self.targets = self._gatherer.store, self._gatherer.targets
        if batch_size is None:
            batch_size = DEFAULT_BATCH_SIZE if tokens is None else DEFAULT_TOKENS
        self.planner = EpochPlanner(
            self.store,
            self.format,
            batch_size=batch_size,
            batch_by=batch_by,
            max_batch_cost=max_batch_cost,
            shuffle=shuffle_name(shuffle),
            seed=seed,
            indices=chosen,
            tokens=tokens,
            buffer_size=buffer_size,
            block_bytes=block_bytes,
            drop_last=drop_last,
            pad_last=pad_last,
            weights=weights,
            epoch_size=epoch_size,
        )
        self.rank, self.world_size = rank_and_world_size(rank, world_size)
        self._gatherer.announce(chosen, self.world_size, is_scattered=self.planner.shuffle == "global")
        advice = advise_block(self.planner, self._gatherer, self.rank, self.world_size)
        if advice is not None and self.rank == 0:
            warnings.warn(advice, TracestoreWarning, stacklevel=2)
        self.num_threads, self.pin_memory = num_threads, pin_memory
        limit = cache_limit(self.store, self.format, cache_bytes, max_cache_batches, batch_size)
        self.memory = plan_memory(self.planner, num_threads, limit, memory_budget)
        self.store.set_cache_limit(self.memory.cache_bytes)
        self.max_in_flight = self.memory.batches_in_flight
        self._pool = MemoryPool(self.memory.buffer_bytes, self.max_in_flight + 1)
        self.epoch = 0
        self._position = 0
        self._resume_at = 0
        self._epoch_done = False

    def __repr__(self) -> str:
        planner = self.planner
        size = f"batch_size={planner.batch_size}"
        if planner.batch_by is not None:
            size = f"batch_by={planner.batch_by!r}, max_batch_cost={planner.max_batch_cost}"
        sizes = self.format.describe(self.store, planner.num_samples)
        return f"TraceLoader({sizes}, {size}, shuffle={planner.shuffle!r})"

    @property
    def batch_size(self) -> int:
        """Traces, or tokens in view "tokens", of a batch over all ranks."""
        return self.planner.batch_size

    def __len__(self) -> int:
        """Return the batches of the epoch, the same on each rank. With `batch_by` epochs differ."""
        return len(self.planner.plan(self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        The epoch of a state that was loaded keeps its position.

        Parameters
        ----------
        epoch : int
        """
        epoch = whole_number("epoch", epoch)
        if epoch != self.epoch or self._epoch_done:
            self._resume_at = 0
        self.epoch, self._position, self._epoch_done = epoch, self._resume_at, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, as a few integers and strings.

        Of several stores that are opened as one it names each by its content, of one some ids.

        Returns
        -------
        dict
            The state. It survives JSON.
        """
        return {"version": STATE_VERSION, "epoch": self.epoch, "batch": self._position, **self.planner.signature()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken.

        Parameters
        ----------
        state : dict
            A result of `state_dict`. The number of threads and ranks may differ.

        Raises
        ------
        UsageError
            If the state belongs to another order or composition of batches.
        """
        for name, mine in {"version": STATE_VERSION, **self.planner.signature()}.items():
            if state.get(name) != mine:
                raise UsageError(f"state of another loader: {name} is {state.get(name)!r}, expected {mine!r}")
        self.epoch, self._resume_at = int(state["epoch"]), int(state["batch"])
        self._position, self._epoch_done = self._resume_at, False

    def batch_indices(self, batch: int, epoch: int | None = None) -> np.ndarray:
        """Return the store indices of this rank's slice of a batch; in view "tokens" numbers of tokens.

        The chosen tokens of all traces are numbered from 0, in the order of the store.

        Parameters
        ----------
        batch : int
            Number of the batch in its epoch.
        epoch : int, optional
            The epoch, by default the current one.

        Returns
        -------
        ndarray of int64, shape (B,)
            Store indices or numbers, possibly none.
        """
        plan = self.planner.plan(self.epoch if epoch is None else epoch)
        return plan.traces(batch, self.rank, self.world_size)

    def reduce_memory(self) -> None:
        """Use less memory from the next iteration on: one batch in flight, no decoded chunks.

        The order stays the same.
        """
        self.max_in_flight = 1
        self._pool.max_idle = 1
        self._pool.trim()
        self.store.set_cache_limit(0)

    def gather(self, indices: Sequence[int] | np.ndarray) -> BatchT:
        """Gather a batch in this thread.

        Parameters
        ----------
        indices : sequence of int
            Store indices of the B traces, or numbers of the B tokens.

        Returns
        -------
        SequenceBatch, torch_geometric.data.Batch, GraphBatch or TokenBatch
            The batch, as iterating yields it.
        """
        in_worker = get_worker_info() is not None
        batch: BatchT = self._gatherer.gather(indices, None if in_worker else self._allocate)
        return batch

    def _allocate(self, num_bytes: int) -> BatchBuffer:
        if self.pin_memory:
            return TorchBuffer(num_bytes, pinned=True)
        lease = self._pool.acquire(num_bytes)
        if lease is None:
            raise MemoryBudgetError(
                f"the next batch needs {num_bytes:,} bytes, and batches that are still referred to hold "
                f"{self._pool.used_bytes:,} of the {self.memory.buffer_bytes:,} that the memory budget leaves for "
                "batches; release earlier batches, or lower batch_size"
            )
        return BatchBuffer(lease)

    def __iter__(self) -> Iterator[BatchT]:
        if self._epoch_done:
            self._start_next_epoch()
        plan = self.planner.plan(self.epoch)
        start, self._resume_at = self._resume_at, 0
        # A state taken after the last batch leaves nothing of its epoch.
        self._position, self._epoch_done = start, start >= len(plan)
        return closed_at_exit(self._iterate(plan, start, self.epoch))

    def _iterate(self, plan: EpochPlan, start: int, epoch: int) -> Generator[BatchT]:
        total = len(plan)

        def traces(batch: int) -> np.ndarray:
            return plan.traces(batch, self.rank, self.world_size)

        with ExitStack() as stack:
            if self.num_threads > 0:
                remote = [stack.enter_context(p) for p in self._gatherer.prefetch(traces, start, total)]
                prefetcher = stack.enter_context(self._new_prefetcher(map(traces, range(start, total))))
            for batch in range(start, total):
                if self.num_threads > 0:
                    for files in remote:
                        files.advance(batch)
                    # Someone waits for the first batch while others are looked up: few at first.
                    prefetcher.fill(min(self.max_in_flight, 4 + 2 * (batch - start)))
                    result: BatchT = prefetcher.next_batch()
                else:
                    result = self.gather(traces(batch))
                # A consumer that counts batches does not ask for one after the last, so the epoch ends here.
                self._position, self._epoch_done = batch + 1, batch + 1 == total
                yield result
                del result  # the consumer alone decides when the memory is reused
        if self.epoch == epoch:  # a consumer that counts batches may have started the next epoch
            self._start_next_epoch()

    def _start_next_epoch(self) -> None:
        self.epoch += 1
        self._position, self._epoch_done = 0, False

    def _new_prefetcher(self, batches: Iterator[np.ndarray]) -> BatchPrefetcher:
        arguments = self._gatherer, batches, self._allocate, self.num_threads, self.max_in_flight
        if self.store.codec == "none":
            return NativePrefetcher(*arguments, drop_behind=self.memory.buffer_bytes > 0)
        return ThreadPrefetcher(*arguments)
