"""Datasets and a sampler for torch.utils.data.DataLoader."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info
from torch_geometric.data import Data

from tracestore.data import order
from tracestore.data.batch import GraphOptions, as_tensor, gather_graphs, gather_sequences
from tracestore.data.collate import GraphItem, SequenceItem
from tracestore.errors import UsageError
from tracestore.store.reader import DEFAULT_CACHE_BYTES, TraceStore

StoreLike = TraceStore | str | os.PathLike[str]


def mean_trace_bytes(store: TraceStore, view: str) -> int:
    """Bytes a trace of a view takes in a batch, on average over the store."""
    item = 4 if store.hidden_dtype == "float32" else 2
    if view == "sequence" or len(store) == 0:
        return store.num_layers * store.hidden_dim * item
    tokens = np.asarray(store.num_tokens, np.float64)
    pairs = float((tokens * (tokens + 1) / 2).mean())
    # x, and 16 + 2 bytes an edge of edge_index and edge_attr.
    return int(store.num_layers * (float(tokens.mean()) * store.hidden_dim * item + pairs * 18))


def _open(
    store: StoreLike, view: str, cache_bytes: int | None, max_cache_batches: int | None, batch_size: int
) -> TraceStore:
    """The store with a cache of its own: bounded in bytes, and in batches where that is given."""
    limit = DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes
    opened = store if isinstance(store, TraceStore) else TraceStore(store)
    if max_cache_batches is not None:
        limit = min(limit, max_cache_batches * batch_size * mean_trace_bytes(opened, view))
    own = TraceStore(opened.path, cache_bytes=limit)
    own.require(view)
    return own


def rank_and_world_size() -> tuple[int, int]:
    """From torch.distributed where it is initialised, else from RANK and WORLD_SIZE."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class TraceDataset(Dataset[Any]):
    """Map-style: item i is trace i of the store, read when it is asked for.

    view "sequence": (sequence (L, D), score, question_id). view "graph": list of L PyG
    Data with x (S, D), edge_index (2, E) source j to target i, edge_attr (E, 1). Every
    trace, scored or not. Tensors have the stored dtype. Decoded chunks of compressed
    stores are kept within cache_bytes, and within max_cache_batches batches of
    batch_size where that is given. MissingFieldError where the store lacks the view.
    """

    def __init__(
        self,
        store: StoreLike,
        view: str = "sequence",
        *,
        score_threshold: float = 0.5,
        attention_threshold: float = 0.0,
        top_k: float | None = None,
        cache_bytes: int | None = None,
        max_cache_batches: int | None = None,
        batch_size: int = 16,
    ) -> None:
        self.store = _open(store, view, cache_bytes, max_cache_batches, batch_size)
        self.view = view
        self.options = GraphOptions(attention_threshold, top_k)
        self.targets = self.store.targets(score_threshold)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Any:
        trace = self.store[index]
        y, score = float(self.targets[trace.index]), trace.score
        if self.view == "sequence":
            sequence = as_tensor(trace.last_token, self.store.hidden_dtype)
            return SequenceItem.make(sequence, score, trace.question_id, y, trace.index)
        batch = gather_graphs(self.store, [trace.index], self.targets, self.options)
        nodes, edges = batch.ptr.tolist(), batch._slice_dict["edge_index"].tolist()
        item = GraphItem(
            Data(
                x=batch.x[nodes[k] : nodes[k + 1]],
                edge_index=batch.edge_index[:, edges[k] : edges[k + 1]] - nodes[k],
                edge_attr=batch.edge_attr[edges[k] : edges[k + 1]],
                num_nodes=nodes[k + 1] - nodes[k],
            )
            for k in range(self.store.num_layers)
        )
        item.y, item.score, item.question_id, item.trace_index = y, score, trace.question_id, trace.index
        return item

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[k] for k in indices]


class ShuffleBufferSampler(Sampler[int]):
    """Indices of a shuffle buffer: ids in store order enter a window of buffer_size, one
    at random leaves it. Every index once an epoch; O(buffer_size) of it is held by the
    order, no trace. Splits itself over ranks, exactly. set_epoch() changes the order."""

    def __init__(
        self,
        n: int,
        buffer_size: int = 1000,
        seed: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if n < 0 or buffer_size < 1:
            raise UsageError(f"found n {n} and buffer_size {buffer_size}, expected at least 0 and 1")
        self.n, self.buffer_size, self.seed, self.epoch = n, buffer_size, seed, 0
        found = rank_and_world_size()
        self.rank = found[0] if rank is None else rank
        self.world_size = found[1] if world_size is None else world_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, self.n, self.world_size))

    def __iter__(self) -> Iterator[int]:
        epoch = order.EpochOrder(self.n, self.seed, self.epoch, "buffer", self.buffer_size)
        positions = np.arange(self.rank, self.n, self.world_size)
        return iter(epoch.at(positions).tolist())


class TraceIterableDataset(IterableDataset[Any]):
    """Iterable: every trace exactly once an epoch over ranks x workers, in an order that
    is a function of (seed, epoch) alone.

    Without batch_size it yields items as TraceDataset does: rank r of R takes positions
    r, r + R, ..., worker w of W every W-th of them. With batch_size it yields whole
    collated batches (use DataLoader(batch_size=None)): worker w the batches w, w + W,
    ..., of each the rank's slice; batch_size is the global one. `shuffle`: "buffer"
    (a window of buffer_size ids, not traces), "global", "block" or "none".
    """

    def __init__(
        self,
        store: StoreLike,
        view: str = "sequence",
        *,
        shuffle: str = "buffer",
        buffer_size: int = 1000,
        block_bytes: int = 256 << 20,
        seed: int = 0,
        batch_size: int | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        score_threshold: float = 0.5,
        attention_threshold: float = 0.0,
        top_k: float | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if shuffle not in order.MODES:
            raise UsageError(f"found shuffle {shuffle!r}, expected one of {', '.join(order.MODES)}")
        self.items = TraceDataset(
            store,
            view,
            score_threshold=score_threshold,
            attention_threshold=attention_threshold,
            top_k=top_k,
            cache_bytes=cache_bytes,
        )
        self.shuffle, self.buffer_size, self.seed, self.epoch = shuffle, buffer_size, seed, 0
        self.batch_size, self.drop_last = batch_size, drop_last
        self.block_size = max(1, block_bytes // max(1, mean_trace_bytes(self.items.store, view)))
        found = rank_and_world_size()
        self.rank = found[0] if rank is None else rank
        self.world_size = found[1] if world_size is None else world_size

    def set_epoch(self, epoch: int) -> None:
        """Another order. With persistent workers the epoch goes on by itself, one an iteration."""
        self.epoch = epoch

    def _batches(self) -> list[int]:
        assert self.batch_size is not None
        count = order.num_batches(len(self.items), self.batch_size, self.drop_last)
        return [g for g in range(count) if len(self._positions(g))]

    def _positions(self, batch: int) -> np.ndarray:
        assert self.batch_size is not None
        return order.batch_positions(batch, len(self.items), self.batch_size, self.rank, self.world_size)

    def __len__(self) -> int:
        """Items, or batches, that this rank gets from all its workers together."""
        if self.batch_size is None:
            return len(range(self.rank, len(self.items), self.world_size))
        return len(self._batches())

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        n = len(self.items)
        epoch = order.EpochOrder(n, self.seed, self.epoch, self.shuffle, self.buffer_size, self.block_size)
        self.epoch += 1
        if self.batch_size is None:
            positions = np.arange(self.rank, n, self.world_size)[worker::workers]
            for begin in range(0, len(positions), 1024):
                for index in epoch.at(positions[begin : begin + 1024]).tolist():
                    yield self.items[index]
            return
        for batch in self._batches()[worker::workers]:
            indices = epoch.at(self._positions(batch))
            if self.items.view == "sequence":
                yield gather_sequences(self.items.store, indices, self.items.targets)
            else:
                yield gather_graphs(self.items.store, indices, self.items.targets, self.items.options)
