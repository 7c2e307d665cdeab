"""Datasets and a sampler for torch.utils.data.DataLoader."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from tracestore._core.blocks import BlockPool
from tracestore.data import order
from tracestore.data.batch import pyg_classes
from tracestore.data.batch_format import BatchFormat, EdgeOptions
from tracestore.data.batch_jobs import gather_batch
from tracestore.data.buffers import PooledBuffer, TorchBuffer, as_tensor
from tracestore.data.collate import GraphItem, SequenceItem
from tracestore.data.epoch import EpochPlanner, mean_trace_bytes, rank_and_world_size
from tracestore.errors import UsageError
from tracestore.store.read.store import DEFAULT_CACHE_BYTES, TraceStore, open_store
from tracestore.store.read.trace import Trace

StoreLike = TraceStore | str | os.PathLike[str]


def _open(
    store: StoreLike, form: BatchFormat, cache_bytes: int | None, max_cache_batches: int | None, batch_size: int
) -> TraceStore:
    """The store with a cache of its own: bounded in bytes, and in batches where that is given."""
    limit = DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes
    opened = store if isinstance(store, TraceStore) else open_store(store)
    form.check(opened)
    if max_cache_batches is not None:
        limit = min(limit, max_cache_batches * batch_size * mean_trace_bytes(opened, form))
    return opened.again(limit)


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
        self.format = BatchFormat(view, EdgeOptions(attention_threshold, top_k))
        self.store = _open(store, self.format, cache_bytes, max_cache_batches, batch_size)
        if view == "graph":
            pyg_classes()  # now, so that workers that are forked from this process have it
        self.view = view
        self.targets = self.store.targets(score_threshold)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Any:
        trace = Trace(self.store, range(len(self.store))[index], private=True)
        y, score = float(self.targets[trace.index]), trace.score
        if self.view == "sequence":
            sequence = as_tensor(trace.last_token, self.store.hidden_dtype)
            return SequenceItem.make(sequence, score, trace.question_id, y, trace.index)
        form = replace(self.format, as_pyg=False)
        batch = gather_batch(self.store, [trace.index], self.targets, form, TorchBuffer)
        nodes, edges = batch.ptr.tolist(), batch.edge_ptr.tolist()
        _, graph = pyg_classes()
        item = GraphItem(
            graph(
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
        return iter(epoch.ids_at(positions).tolist())


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
        self.items = TraceDataset(
            store,
            view,
            score_threshold=score_threshold,
            attention_threshold=attention_threshold,
            top_k=top_k,
            cache_bytes=cache_bytes,
        )
        self.epoch, self.batch_size = 0, batch_size
        self._pool: BlockPool | None = None
        self.epochs = EpochPlanner(
            self.items.store,
            self.items.format,
            batch_size=1 if batch_size is None else batch_size,
            shuffle=shuffle,
            seed=seed,
            buffer_size=buffer_size,
            block_bytes=block_bytes,
            drop_last=drop_last,
        )
        found = rank_and_world_size()
        self.rank = found[0] if rank is None else rank
        self.world_size = found[1] if world_size is None else world_size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def _allocate(self, num_bytes: int) -> PooledBuffer:
        if self._pool is None:
            self._pool = BlockPool()
        lease = self._pool.lease(num_bytes)
        assert lease is not None
        return PooledBuffer(lease)

    def set_epoch(self, epoch: int) -> None:
        """Another order. With persistent workers the epoch goes on by itself, one an iteration."""
        self.epoch = epoch

    def _batches(self, epoch: int) -> list[int]:
        """Numbers of the batches of which this rank has a part."""
        batches = self.epochs.plan(epoch).batches
        return [g for g in range(len(batches)) if len(batches.positions(g, self.rank, self.world_size))]

    def __len__(self) -> int:
        """Items, or batches, that this rank gets from all its workers together."""
        if self.batch_size is None:
            return len(range(self.rank, len(self.items), self.world_size))
        return len(self._batches(self.epoch))

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def _items_of(self, epoch: int, first: int) -> Iterator[Any]:
        """What this process has of an epoch, from its item or batch number `first` on."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        n, plan, mine = len(self.items), self.epochs.plan(epoch), self._batches(epoch)
        if self.batch_size is None:
            positions = np.arange(self.rank, n, self.world_size)[worker::workers][first:]
            for begin in range(0, len(positions), 1024):
                for index in plan.indices_at(positions[begin : begin + 1024]).tolist():
                    yield self.items[index]
            return
        for batch in mine[worker::workers][first:]:
            indices = plan.traces(batch, self.rank, self.world_size)
            allocate = self._allocate if info is None else None
            yield gather_batch(self.items.store, indices, self.items.targets, self.items.format, allocate)


class _Pass(Iterator[Any]):
    """One pass of a process over a TraceIterableDataset; torchdata's StatefulDataLoader keeps its
    state and goes on from there, without reading again what was read."""

    def __init__(self, data: TraceIterableDataset) -> None:
        self._data, self._epoch, self._done = data, data.epoch, 0
        data.epoch += 1
        self._rest = data._items_of(self._epoch, 0)

    def __next__(self) -> Any:
        item = next(self._rest)
        self._done += 1
        return item

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._done = state["epoch"], state["done"]
        self._data.epoch = self._epoch + 1
        self._rest = self._data._items_of(self._epoch, self._done)
