"""Jobs that gather a batch from the store into one buffer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from tracestore._core import gather
from tracestore.data import shared_memory
from tracestore.data.batch import BatchMetadata, GraphLayout, Layout, SequenceLayout
from tracestore.data.batch_format import BatchFormat
from tracestore.data.buffers import TORCH_DTYPES, Allocate, BatchBuffer, PooledBuffer, TorchBuffer, align_up
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.format.schema import LAYOUT_CAUSAL, dtype_code
from tracestore.store.read.batch_sources import graph_sources, sequence_sources
from tracestore.store.read.store import TraceStore


class BatchJob(ABC):
    """A batch that is being gathered.

    The constructor looks the traces up. After that, call `set_buffer`, run or submit `native`, and
    call `batch`.

    Attributes
    ----------
    native : gather.Job
        The job of the C core.
    num_bytes : int
        Bytes that the buffer needs, an upper bound before `finalize_size`.
    sources : list
        The stored arrays that the job reads.
    """

    native: gather.Job
    num_bytes: int
    sources: list[Any]
    _buffer: BatchBuffer

    def __init__(self, store: TraceStore, indices: np.ndarray, targets: np.ndarray, batch_format: BatchFormat) -> None:
        self._store, self._indices, self._targets = store, indices, targets
        self._look_up(batch_format)

    @abstractmethod
    def _look_up(self, batch_format: BatchFormat) -> None: ...

    def finalize_size(self) -> None:  # noqa: B027 - most lookups give the exact size
        """Make num_bytes exact. This counts the edges that the threshold keeps."""

    @abstractmethod
    def set_buffer(self, buffer: BatchBuffer) -> None:
        """Set the memory of the batch."""

    @abstractmethod
    def layout(self) -> Layout:
        """Return where the tensors lie in the buffer. Valid after `native` has run."""

    def metadata(self) -> BatchMetadata:
        """Return the fields of the batch that do not lie in its buffer."""
        return BatchMetadata.read(self._store, self._indices, self._targets)

    def batch(self) -> Any:
        """Return a SequenceBatch, PyG Batch or GraphBatch. Valid after `native` has run."""
        return self.layout().batch(self._buffer, self.metadata())


class SequenceJob(BatchJob):
    """The job of a SequenceBatch."""

    native: gather.CopyJob

    def _look_up(self, batch_format: BatchFormat) -> None:
        stored = self._store.hidden_dtype
        self._dtype = batch_format.hidden_dtype(self._store)
        self.sources = sequence_sources(self._store.internals, self._indices)
        self.native = gather.CopyJob(self.sources, dtype_code(stored), dtype_code(self._dtype))
        self.num_bytes = align_up(self.native.out_bytes)

    def set_buffer(self, buffer: BatchBuffer) -> None:
        """Set the memory of the batch."""
        self._buffer = buffer
        self.native.set_output(buffer.memory)

    def layout(self) -> SequenceLayout:
        """Return where the tensors lie in the buffer."""
        return SequenceLayout((len(self._indices), self._store.num_layers, self._store.hidden_dim), self._dtype)


class GraphJob(BatchJob):
    """The job of a GraphBatch."""

    native: gather.GraphBatchJob

    def _look_up(self, batch_format: BatchFormat) -> None:
        store, options = self._store, batch_format.edge_options
        sources = graph_sources(store.internals, self._indices)
        causal = sources.layout == LAYOUT_CAUSAL
        self._as_pyg = batch_format.as_pyg
        self._packed, self._num_heads = options.edge_format != "coo", options.num_heads(store)
        if self._packed and not causal.all():
            raise UsageError("packed edges need causal attention; use edge_format='coo'")
        self._dtype, self._weight_dtype = batch_format.hidden_dtype(store), batch_format.weight_dtype(store)
        hidden = gather.CopyJob(sources.hidden, dtype_code(store.hidden_dtype), dtype_code(self._dtype))
        self.native = gather.GraphBatchJob(
            hidden,
            sources.attention,
            dtype_code(store.attention_dtype),
            dtype_code(self._weight_dtype),
            sources.num_tokens,
            causal.view("u1"),
            store.num_layers,
            store.num_stored_heads,
            options.attention_threshold,
            options.top_k or 0.0,
            self._packed,
            sources.edges,
            self._num_heads > 1,
        )
        self._x_bytes = hidden.out_bytes
        self.sources = sources.hidden + sources.attention
        self._set_offsets()

    def _set_offsets(self) -> None:
        """Set where each tensor begins: x, edge_index, weights, owner, ptr, edge_ptr."""
        room, num_ptr = self.native.max_edges(), 8 * (self.native.num_graphs + 1)
        sizes = (
            self._x_bytes,
            0 if self._packed else 16 * room,
            room * TORCH_DTYPES[self._weight_dtype].itemsize,
            8 * self.native.num_nodes,
            num_ptr,
            num_ptr,
        )
        self._offsets, self.num_bytes = [], 0
        for size in sizes:
            self._offsets.append(self.num_bytes)
            self.num_bytes += align_up(size)

    def finalize_size(self) -> None:
        """Make num_bytes exact. This counts the edges that the threshold keeps."""
        self.native.count_edges()
        self._set_offsets()

    def set_buffer(self, buffer: BatchBuffer) -> None:
        """Set the memory of the batch."""
        self._buffer = buffer
        self.native.set_output(buffer.memory, *self._offsets)

    def layout(self) -> GraphLayout:
        """Return where the tensors lie in the buffer."""
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


def make_job(
    store: TraceStore, indices: Sequence[int] | np.ndarray, targets: np.ndarray, batch_format: BatchFormat
) -> BatchJob:
    """Look up the traces of a batch and return its job. Nothing is read yet."""
    job_class = SequenceJob if batch_format.view == "sequence" else GraphJob
    try:
        return job_class(store, np.asarray(indices, np.int64), targets, batch_format)
    except ValueError as error:  # the core found arrays of the store that do not fit together
        raise CorruptStoreError(f"{store.path}: {error}") from None


def gather_batch(
    store: TraceStore,
    indices: Sequence[int] | np.ndarray,
    targets: np.ndarray,
    batch_format: BatchFormat,
    allocate: Allocate | None = None,
) -> Any:
    """Gather a batch in this thread.

    Parameters
    ----------
    store : TraceStore
        The store.
    indices : sequence of int
        Store indices of the B traces.
    targets : ndarray, shape (len(store),)
        The label of each trace of the store.
    batch_format : BatchFormat
        The form of the batch.
    allocate : callable, optional
        Returns the buffer of the batch. By default the batch has memory of its own, which a worker
        process of a DataLoader shares with its parent.

    Returns
    -------
    SequenceBatch, torch_geometric.data.Batch or GraphBatch
        The batch. A PyG Batch has the fields of `GraphBatch`, where ``attention_ptr`` stands for
        `edge_ptr` and exists only with edge formats "packed" and "heads".
    """
    job = make_job(store, indices, targets, batch_format)
    job.finalize_size()
    if allocate is None and get_worker_info() is not None and shared_memory.is_available():
        slot = shared_memory.acquire_slot(job.num_bytes)
        job.set_buffer(PooledBuffer(slot.lease()))
        job.native.run()
        return shared_memory.shared_batch(slot, job.layout(), job.metadata())
    job.set_buffer(TorchBuffer(job.num_bytes) if allocate is None else allocate(job.num_bytes))
    job.native.run()
    return job.batch()
