"""Batches on their way from the store into memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from tracestore._core import gather
from tracestore.data import shared_memory
from tracestore.data.batch import BatchMetadata, GraphLayout, Layout, SequenceLayout
from tracestore.data.batch_format import BatchFormat, weight_dtype
from tracestore.data.buffers import Allocate, BatchBuffer, PooledBuffer, TorchBuffer, align_up, dtype_bytes
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format import schema
from tracestore.store.read.batch_sources import graph_sources, sequence_sources
from tracestore.store.read.store import TraceStore


def _code(name: str) -> int:
    return schema.dtype_code(name)


class _Job(ABC):
    """A batch on its way: looked up when it is made, then placed, then done by `native`,
    then made into tensors. num_bytes: of its buffer of memory, at most."""

    native: gather.Job
    num_bytes: int
    sources: list[Any]  # what it reads
    _buffer: BatchBuffer

    def __init__(self, store: TraceStore, indices: np.ndarray, targets: np.ndarray, form: BatchFormat) -> None:
        self._store, self._indices, self._targets = store, indices, targets
        self._look_up(form)

    @abstractmethod
    def _look_up(self, form: BatchFormat) -> None: ...

    def finalize_size(self) -> None:  # noqa: B027 - most lookups leave nothing to find out
        """Finds out what the lookup could not, so that num_bytes is exact, not a bound."""

    @abstractmethod
    def set_buffer(self, buffer: BatchBuffer) -> None:
        """Sets the memory that the batch is to lie in."""

    @abstractmethod
    def layout(self) -> Layout:
        """How it lies there; once `native` is done."""

    def values(self) -> BatchMetadata:
        return BatchMetadata.of(self._store, self._indices, self._targets)

    def batch(self) -> Any:
        """A SequenceBatch, PyG Batch or GraphBatch; once `native` is done."""
        return self.layout().batch(self._buffer, self.values())


class SequenceJob(_Job):
    native: gather.Copies

    def _look_up(self, form: BatchFormat) -> None:
        store, indices = self._store, self._indices
        self._dtype = form.of(store.hidden_dtype)
        self.sources = sequence_sources(store, indices)
        self.native = gather.Copies(self.sources, _code(store.hidden_dtype), _code(self._dtype))
        self.num_bytes = align_up(self.native.out_bytes)

    def set_buffer(self, buffer: BatchBuffer) -> None:
        self._buffer = buffer
        self.native.aim(buffer.buffer)

    def layout(self) -> SequenceLayout:
        return SequenceLayout((len(self._indices), self._store.num_layers, self._store.hidden_dim), self._dtype)


class GraphJob(_Job):
    native: gather.GraphGather

    def _look_up(self, form: BatchFormat) -> None:
        store, indices = self._store, self._indices
        sources = graph_sources(store, indices)
        causal = sources.layout == schema.LAYOUT_CAUSAL
        self._as_pyg = form.as_pyg
        self._packed, self._num_heads = form.graph.edge_format != "coo", form.graph.num_heads(store)
        if self._packed and not causal.all():
            raise UsageError("packed edges need causal attention; use edge_format='coo'")
        self._dtype, self._weight_dtype = form.of(store.hidden_dtype), form.of(weight_dtype(store, form.graph))
        hidden = gather.Copies(sources.hidden, _code(store.hidden_dtype), _code(self._dtype))
        self.native = gather.GraphGather(
            hidden,
            sources.attention,
            _code(store.attention_dtype),
            _code(self._weight_dtype),
            sources.num_tokens,
            causal.view("u1"),
            store.num_layers,
            store.num_stored_heads,
            form.graph.attention_threshold,
            form.graph.top_k or 0.0,
            self._packed,
            sources.edges,
            self._num_heads > 1,
        )
        self._x_bytes = hidden.out_bytes
        self.sources = sources.hidden + sources.attention
        self._lay_out()

    def _lay_out(self) -> None:
        """Where in the buffer each tensor begins: x, edge_index, weights, owner, ptr, edge_ptr."""
        room, num_ptr = self.native.room(), 8 * (self.native.num_graphs + 1)
        sizes = (
            self._x_bytes,
            0 if self._packed else 16 * room,
            room * dtype_bytes(self._weight_dtype),
            8 * self.native.num_nodes,
            num_ptr,
            num_ptr,
        )
        self._offsets, self.num_bytes = [], 0
        for size in sizes:
            self._offsets.append(self.num_bytes)
            self.num_bytes += align_up(size)

    def finalize_size(self) -> None:
        self.native.count()
        self._lay_out()

    def set_buffer(self, buffer: BatchBuffer) -> None:
        self._buffer = buffer
        self.native.aim(buffer.buffer, *self._offsets)

    def layout(self) -> GraphLayout:
        native, store = self.native, self._store
        return GraphLayout(
            tuple(self._offsets),
            store.num_layers,
            native.num_graphs,
            native.num_nodes,
            native.num_edges,
            store.hidden_dim,
            self._dtype,
            self._weight_dtype,
            self._packed,
            self._num_heads,
            self._as_pyg,
        )


BatchJob = SequenceJob | GraphJob


def make_job(
    store: TraceStore, indices: Sequence[int] | np.ndarray, targets: np.ndarray, form: BatchFormat
) -> BatchJob:
    """The batch of some traces, looked up and nothing more."""
    kind = SequenceJob if form.view == "sequence" else GraphJob
    try:
        return kind(store, np.asarray(indices, np.int64), targets, form)
    except ValueError as error:  # arrays of the store that do not fit together
        raise CorruptStoreError(f"{store.path}: {error}") from None


def gather_batch(
    store: TraceStore,
    indices: Sequence[int] | np.ndarray,
    targets: np.ndarray,
    form: BatchFormat,
    allocate: Allocate | None = None,
) -> Any:
    """The batch of some traces, now, in memory from `allocate`; without that in memory of
    its own, which in a DataLoader's worker process is shared with the parent.

    View "sequence": a SequenceBatch. View "graph": one PyG Batch of B * L graphs, trace
    after trace and layer after layer: x (N, D); edge_index (2, E), source j to target i,
    and edge_attr (E, 1), or with edges="packed" attention (sum A,) and attention_ptr
    (B * L + 1,), with edges="heads" (sum H A,), the triangles of a graph head after head,
    and num_heads; batch (N,), ptr (B * L + 1,); y, score (B,), question_id, trace_index
    (B,), num_layers. Without form.as_pyg the same as a GraphBatch, whose edge_ptr (B * L + 1,)
    is attention_ptr, or where the edges of each graph begin.
    """
    job = make_job(store, indices, targets, form)
    job.finalize_size()
    if allocate is None and get_worker_info() is not None and shared_memory.is_available():
        slot = shared_memory.free_slot(job.num_bytes)
        job.set_buffer(PooledBuffer(slot.lease()))
        job.native.run()
        return shared_memory.shared_batch(slot, job.layout(), job.values())
    job.set_buffer(TorchBuffer(job.num_bytes) if allocate is None else allocate(job.num_bytes))
    job.native.run()
    return job.batch()
