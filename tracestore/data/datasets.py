"""Datasets and a sampler for torch.utils.data.DataLoader."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tracestore._core.blocks import MemoryPool
from tracestore.data.batches import shared_memory
from tracestore.data.batches.batch import BatchT, layer_graph_class
from tracestore.data.batches.batch_format import BatchFormat, Layers, Positions, View
from tracestore.data.batches.batch_jobs import BatchGatherer
from tracestore.data.batches.buffers import BatchBuffer, TorchBuffer
from tracestore.data.collate import GraphItem, SequenceItem
from tracestore.data.epoch import EpochPlanner, rank_and_world_size
from tracestore.data.memory_plan import cache_limit
from tracestore.data.order import Shuffle, shuffle_name, whole_number
from tracestore.data.tokens.job import OpenArrays, TokenGatherer
from tracestore.data.tokens.token_table import TokenTable
from tracestore.errors import UsageError
from tracestore.store.read.store import StorePath, TraceStore, open_store
from tracestore.store.read.subset import TraceSubset

StoreLike = TraceStore | TraceSubset | StorePath
# Items whose order is computed at once.
_ORDER_CHUNK = 1024


def open_for_batches(
    store: StoreLike,
    batch_format: BatchFormat,
    score_threshold: float | None,
    indices: Sequence[int] | np.ndarray | None = None,
    targets: np.ndarray | None = None,
) -> tuple[BatchGatherer, np.ndarray | None, TokenTable | None]:
    """Open a store with a cache of its own and check that its traces can give such batches.

    Returns
    -------
    BatchGatherer
        Gathers batches of the whole store.
    ndarray of int64, shape (n,), or None
        The store indices of a subset, or those given. None: all traces.
    TokenTable or None
        The tokens of view "tokens".

    Raises
    ------
    UsageError
        For both a subset and indices, indices that `TraceStore.select` refuses, labels of another number of traces, or
        scores that the default threshold does not fit.
    """
    whole, subset = (store.store, store.indices) if isinstance(store, TraceSubset) else (store, None)
    if subset is not None and indices is not None:
        raise UsageError("found a subset and indices, expected one of them: select from the subset, subset[...]")
    opened = whole.reopen() if isinstance(whole, TraceStore) else open_store(whole)
    chosen = subset
    if indices is not None:
        try:
            chosen = opened.select(indices).indices
        except (IndexError, KeyError, TypeError) as error:
            raise UsageError(f"indices: {error}") from None
    batch_format.check(opened, chosen)
    if batch_format.view == "graph" and batch_format.as_pyg:
        layer_graph_class()  # imported now, so that workers forked from this process need not import PyG
    targets = opened.targets(score_threshold) if targets is None else np.array(targets)
    if targets.shape != (len(opened),):
        raise UsageError(f"found targets of shape {targets.shape}, expected ({len(opened)},): one label for each trace")
    if batch_format.view != "tokens":
        return BatchGatherer(opened, targets, batch_format), chosen, None
    tokens = TokenTable(opened, batch_format, chosen)
    return TokenGatherer(opened, targets, batch_format, tokens, OpenArrays(opened)), chosen, tokens


class TraceDataset(Dataset[Any]):
    """Map-style dataset: item i is trace i of the store or subset, or its i-th chosen token, read on access.

    View "sequence" gives the tuple ``(sequence (L, D), score, question_id)``. View "graph" gives a
    list of L PyG Data with x (S, D), edge_index (2, E) from source j to target i, and edge_attr
    (E, 1), and with y (1,), score (1,), question_id and trace_index of the trace: a DataLoader of PyG
    makes a list of L Batches, each with those of B traces. Items have the attributes `y`,
    `trace_index`, which is a store index, and, as graphs, `score` and `question_id`. View "tokens" gives the tuple ``(hidden state (D,) or (K, D), trace
    index, position)``. Traces without a label or score are included. A DataLoader collates the items of the
    views "sequence" and "graph" into a `SequenceBatch` or a PyG Batch without a `collate_fn`.

    Parameters
    ----------
    store : TraceStore, TraceSubset, str, PathLike or sequence of paths
        A store, a subset of one, the path of a store, or those of several stores that are opened as one.
    view : {"sequence", "graph", "tokens"}
        The form of the items.
    layers, positions
        The layers, and tokens of each trace, see `TraceLoader`.
    score_threshold : float, optional
        Score below which a trace counts as a hallucination, or from which on in a store of
        hallucination scores. A stored label takes precedence. Default: 0.5, for scores in [0, 1];
        others need a threshold.
    attention_threshold : float
        Keep the pairs of tokens whose head-averaged attention is above this value as edges.
    top_k : float, optional
        A fraction in (0, 1], not a number: keep this fraction of each layer's stored pairs, those
        with the largest attention. Replaces the threshold.
    dtype : str, optional
        "float32" converts while reading: for models with float32 weights. None keeps the stored
        dtype, usually float16.
    cache_bytes : int, optional
        Limit for the decoded chunks of a compressed store, 256 MiB by default.
    max_cache_batches : int, optional
        Further limit for decoded chunks, in batches of `batch_size` mean traces.
    batch_size : int
        Used only by `max_cache_batches`.

    Raises
    ------
    MissingFieldError
        If the store lacks what the view needs.
    UsageError
        For an option outside its range, or if there is no such store.

    Examples
    --------
    >>> import tracestore
    >>> from torch.utils.data import DataLoader
    >>> dataset = tracestore.TraceDataset("store.zarr", dtype="float32")
    >>> dataset
    TraceDataset('store.zarr', 'sequence', 12 traces, 3 layers, hidden size 8, float32)
    >>> sequence, score, question_id = dataset[4]
    >>> sequence.shape, question_id
    (torch.Size([3, 8]), 'q4')
    >>> [batch.sequences.shape for batch in DataLoader(dataset, batch_size=8, shuffle=True)]
    [torch.Size([8, 3, 8]), torch.Size([4, 3, 8])]
    """

    def __init__(
        self,
        store: StoreLike,
        view: View = "sequence",
        *,
        layers: Layers | None = None,
        positions: Positions | None = None,
        score_threshold: float | None = None,
        attention_threshold: float = 0.0,
        top_k: float | None = None,
        dtype: str | None = None,
        cache_bytes: int | None = None,
        max_cache_batches: int | None = None,
        batch_size: int = 16,
    ) -> None:
        self.format = BatchFormat(
            view, attention_threshold=attention_threshold, top_k=top_k, dtype=dtype, layers=layers, positions=positions
        )
        self.gatherer, self.indices, self.tokens = open_for_batches(store, self.format, score_threshold)
        self.store = self.gatherer.store
        self.store.set_cache_limit(cache_limit(self.store, self.format, cache_bytes, max_cache_batches, batch_size))
        self.view = view
        self._plain_gatherer = replace(self.gatherer, batch_format=replace(self.format, as_pyg=False))

    def __len__(self) -> int:
        if self.tokens is not None:
            return len(self.tokens)
        # The labels are of the traces that the store had; a pickled copy may open it with further ones.
        return len(self.gatherer.targets if self.indices is None else self.indices)

    def __repr__(self) -> str:
        return f"TraceDataset({self.format.describe(self.store, len(self))})"

    def __getitem__(self, index: int) -> Any:
        position = range(len(self))[operator.index(index)]
        is_whole = self.indices is None or self.tokens is not None
        return self.item(position if is_whole else int(self.indices[position]))  # type: ignore[index]

    def item(self, index: int) -> Any:
        """Return the item of a trace or token.

        Parameters
        ----------
        index : int
            Store index, also in a subset; in view "tokens" the position among the chosen tokens.
        """
        if self.tokens is not None:
            batch = self.gatherer.gather([index], TorchBuffer)
            return batch.hidden_states[0], int(batch.trace_index[0]), int(batch.position[0])
        trace = self.store.private_trace(index)
        y, score = float(self.gatherer.targets[trace.index]), trace.score
        if self.view == "sequence":
            if self.format.layers is None and self.format.position == -1:
                dtype = "float32" if self.format.dtype == "float32" else None
                sequence = trace.to_torch("last_token", dtype=dtype)["last_token"]
            else:
                sequence = self.gatherer.gather([index], TorchBuffer).sequences[0]
            vector = SequenceItem((sequence, score, trace.question_id))
            vector.y, vector.trace_index = y, trace.index
            return vector
        batch = self._plain_gatherer.gather([trace.index], TorchBuffer)
        graph_class = layer_graph_class()
        known = {
            "y": torch.tensor([y], dtype=torch.float32),
            "score": torch.tensor([score], dtype=torch.float32),
            "question_id": trace.question_id,
            "trace_index": trace.index,
        }
        nodes, edges = batch.ptr.diff().tolist(), batch.edge_ptr.diff().tolist()
        parts = batch.x.split(nodes), batch.edge_index.split(edges, 1), batch.edge_attr.split(edges)
        graphs = GraphItem(
            graph_class(x=x, edge_index=edge_index - first, edge_attr=edge_attr, num_nodes=len(x), **known)
            for x, edge_index, edge_attr, first in zip(*parts, batch.ptr.tolist(), strict=False)
        )
        graphs.y, graphs.score, graphs.question_id, graphs.trace_index = y, score, trace.question_id, trace.index
        return graphs


class TraceIterableDataset(IterableDataset[BatchT]):
    """Iterable dataset: an epoch has each trace, or chosen token, exactly once over all ranks and workers.

    The order is a function of (seed, epoch) alone. Without `batch_size` it yields the items of
    `TraceDataset`: rank r of R takes the positions r, r + R, ... and worker w of W every W-th of
    them. With `batch_size` it yields collated batches, for ``DataLoader(batch_size=None)``: worker
    w takes the batches w, w + W, ... and of each the slice of its rank.

    Parameters
    ----------
    store : TraceStore, TraceSubset, str, PathLike or sequence of paths
        A store, a subset of one, the path of a store, or those of several stores that are opened as one.
    view : {"sequence", "graph", "tokens"}
        The form of the items or batches.
    shuffle : {"buffer", "global", "block", "none"} or bool
        The order. "buffer": a shuffle buffer of `buffer_size` ids, not traces. "global" or True: a
        keyed permutation of all traces. "block": blocks of `block_bytes` of neighboring traces in
        random order, each permuted. "none" or False: the order of the store or subset.
    buffer_size : int
        Ids of the window of shuffle "buffer".
    block_bytes : int
        Bytes of a block of shuffle "block".
    seed : int
        Seed of the order.
    batch_size : int, optional
        Traces, or tokens in view "tokens", of a batch over all ranks. None yields single items.
    drop_last : bool
        Leave out a last batch that is short.
    rank, world_size : int, optional
        This rank and the number of ranks. By default from torch.distributed if it is initialized,
        else from the environment variables RANK and WORLD_SIZE. Libraries that divide an iterable dataset among
        ranks themselves, such as accelerate and the Trainer of transformers, need 0 and 1.
    layers, positions, score_threshold, attention_threshold, top_k, dtype, cache_bytes
        See `TraceDataset`; `top_k` is a fraction in (0, 1].

    Raises
    ------
    MissingFieldError
        If the store lacks what the view needs.
    UsageError
        For an option outside its range, or if there is no such store.

    Examples
    --------
    >>> import tracestore
    >>> from torch.utils.data import DataLoader
    >>> dataset = tracestore.TraceIterableDataset("store.zarr", batch_size=4, dtype="float32")
    >>> [batch.sequences.shape for batch in DataLoader(dataset, batch_size=None)]
    [torch.Size([4, 3, 8]), torch.Size([4, 3, 8]), torch.Size([4, 3, 8])]
    """

    def __init__(
        self,
        store: StoreLike,
        view: View = "sequence",
        *,
        layers: Layers | None = None,
        positions: Positions | None = None,
        shuffle: Shuffle | bool = "buffer",
        buffer_size: int = 1000,
        block_bytes: int = 256 << 20,
        seed: int = 0,
        batch_size: int | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        score_threshold: float | None = None,
        attention_threshold: float = 0.0,
        top_k: float | None = None,
        dtype: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.items = TraceDataset(
            store,
            view,
            layers=layers,
            positions=positions,
            score_threshold=score_threshold,
            attention_threshold=attention_threshold,
            top_k=top_k,
            dtype=dtype,
            cache_bytes=cache_bytes,
        )
        self._epochs, self.batch_size = shared_memory.SharedEpoch(), batch_size
        self._pool = MemoryPool()
        self._planner = EpochPlanner(
            self.items.store,
            self.items.format,
            batch_size=1 if batch_size is None else batch_size,
            shuffle=shuffle_name(shuffle),
            seed=seed,
            indices=self.items.indices,
            buffer_size=buffer_size,
            block_bytes=block_bytes,
            drop_last=drop_last,
            tokens=self.items.tokens,
        )
        self.rank, self.world_size = rank_and_world_size(rank, world_size)

    def __repr__(self) -> str:
        batches = "" if self.batch_size is None else f", batch_size={self.batch_size}"
        sizes = self.items.format.describe(self.items.store, len(self.items))
        return f"TraceIterableDataset({sizes}, shuffle={self._planner.shuffle!r}{batches})"

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epochs.next

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which selects the order. Each iteration also advances it by one, with worker processes too.

        Parameters
        ----------
        epoch : int
        """
        self._epochs.next = whole_number("epoch", epoch)

    def __len__(self) -> int:
        """Return the items, or batches, that this rank gets from all its workers together."""
        if self.batch_size is None:
            return len(range(self.rank, len(self.items), self.world_size))
        return len(self._batches(self.epoch))

    def __iter__(self) -> Iterator[BatchT]:
        return _EpochIterator(self)

    def _iterate_from(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the items or batches of this process in an epoch, from number `start` on."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        chosen = slice(start * num_workers + worker, None, num_workers)
        plan = self._planner.plan(epoch)
        if self.batch_size is None:
            positions = np.arange(self.rank, len(self.items), self.world_size)[chosen]
            for begin in range(0, len(positions), _ORDER_CHUNK):
                for index in plan.indices_at(positions[begin : begin + _ORDER_CHUNK]).tolist():
                    yield self.items.item(index)
            return
        for batch in self._batches(epoch)[chosen]:
            indices = plan.traces(batch, self.rank, self.world_size)
            yield self.items.gatherer.gather(indices, self._allocate if info is None else None)

    def _batches(self, epoch: int) -> list[int]:
        """Return the numbers of the batches in which this rank has a trace."""
        batches = self._planner.plan(epoch).batches
        return [k for k in range(len(batches)) if len(batches.positions(k, self.rank, self.world_size))]

    def _allocate(self, num_bytes: int) -> BatchBuffer:
        lease = self._pool.acquire(num_bytes)
        assert lease is not None  # the pool has no limit
        return BatchBuffer(lease)


class _EpochIterator(Iterator[Any]):
    """One epoch of a TraceIterableDataset in one process.

    torchdata's StatefulDataLoader saves its state and continues from it without reading the earlier
    traces again.
    """

    def __init__(self, dataset: TraceIterableDataset[Any]) -> None:
        self._dataset, self._epoch, self._num_done = dataset, dataset._epochs.begin(), 0
        self._rest = dataset._iterate_from(self._epoch, 0)

    def __next__(self) -> Any:
        item = next(self._rest)
        self._num_done += 1
        return item

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of items that were yielded."""
        return {"epoch": self._epoch, "done": self._num_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where the state was taken."""
        self._epoch, self._num_done = state["epoch"], state["done"]
        self._dataset.set_epoch(self._epoch + 1)
        self._rest = self._dataset._iterate_from(self._epoch, self._num_done)
