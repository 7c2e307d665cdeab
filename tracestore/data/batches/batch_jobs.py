"""Jobs that gather a batch from the store into one buffer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from tracestore._core import gather
from tracestore.data.batches import shared_memory
from tracestore.data.batches.batch import BatchLayout, GraphBatch, SequenceBatch
from tracestore.data.batches.batch_format import BatchFormat
from tracestore.data.batches.buffers import Allocate, BatchBuffer, TorchBuffer, align_up
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.platform_support import has_memory_files
from tracestore.store.format.ragged import checked_indices
from tracestore.store.format.schema import LAYOUT_CAUSAL, dtype_code, storage_dtype
from tracestore.store.io.files import FilePrefetcher
from tracestore.store.read.batch_sources import batch_files, chunk_keys, graph_sources, sequence_sources
from tracestore.store.read.chunk_cache import ChunkKey
from tracestore.store.read.store import TraceStore


class BatchJob(ABC):
    """A batch that is being gathered.

    The constructor looks the traces up. After that, call `set_buffer`, run or submit `native`, and
    call `batch`.

    Attributes
    ----------
    native : gather.CopyJob, gather.GraphBatchJob or gather.RowJob
        The job of the C core.
    num_bytes : int
        Bytes that the buffer needs, an upper bound before `finalize_size`.
    read_ahead_bytes : int
        Bytes that are being read from the disk for the job.
    """

    native: Any
    num_bytes: int
    read_ahead_bytes = 0
    _sources: list[Any]

    def __init__(self, gatherer: "BatchGatherer", indices: np.ndarray) -> None:
        self._gatherer, self._indices = gatherer, indices
        self._store, self._targets, self._format = gatherer.store, gatherer.targets, gatherer.batch_format
        # The first byte of each tensor.
        self._offsets: dict[str, int] = {}
        self._look_up()

    @abstractmethod
    def _look_up(self) -> None: ...

    @property
    def sources(self) -> list[Any]:
        """The stored arrays that the job reads."""
        return self._sources

    def _place(self, sizes: dict[str, int]) -> None:
        """Place tensors of these bytes one after the other."""
        self.num_bytes = 0
        for name, size in sizes.items():
            self._offsets[name] = self.num_bytes
            self.num_bytes += align_up(size)

    def complete(self, call: Callable[[], None]) -> None:
        """Run or await `native`. CorruptStoreError names the file that is damaged."""
        try:
            call()
        except CorruptStoreError:
            self._require_intact()
            raise

    def _require_intact(self) -> None:  # noqa: B027 - the core names the files of most jobs
        """Read what the job reads again, by functions that name a damaged file."""

    def finalize_size(self) -> None:  # noqa: B027 - most lookups give the exact size
        """Make num_bytes exact. This counts the edges that the threshold keeps."""

    def set_buffer(self, buffer: BatchBuffer) -> None:
        """Set the memory of the batch."""
        self._buffer = buffer
        self.native.set_output(buffer.memory, *self._offsets.values())

    @abstractmethod
    def layout(self) -> BatchLayout:
        """Return where the tensors lie in the buffer. Valid after `native` has run."""

    def metadata(self) -> dict[str, Any]:
        """Return the fields of the batch that do not lie in its buffer. y and score are NaN where missing."""
        question_ids = self._store.question_ids.take(self._indices)
        return self._scores() | {"question_id": question_ids, "trace_index": self._indices.copy()}

    def _scores(self) -> dict[str, Any]:
        with np.errstate(over="ignore"):  # A score beyond float32 becomes infinite.
            y, score = (values[self._indices].astype("f4") for values in (self._targets, self._store.scores))
        return {"y": y, "score": score}

    def batch(self) -> Any:
        """Return a SequenceBatch, PyG Batch, GraphBatch or TokenBatch. Valid after `native` has run."""
        return self.layout().batch(self._buffer, self.metadata())


class SequenceJob(BatchJob):
    """The job of a SequenceBatch."""

    native: gather.CopyJob

    def _look_up(self) -> None:
        self._dtype = self._format.hidden_dtype(self._store)
        layers = self._format.layer_numbers(self._store)
        self._sources = sequence_sources(self._store.internals, self._indices, layers, self._format.position)
        self.native = gather.CopyJob(self._sources, dtype_code(self._store.hidden_dtype), dtype_code(self._dtype))
        self._place({"sequences": self.native.out_bytes})

    def layout(self) -> BatchLayout:
        """Return where the tensors lie in the buffer."""
        shape = (len(self._indices), self._format.num_layers(self._store), self._store.hidden_dim)
        return BatchLayout(SequenceBatch, {"sequences": (0, shape, self._dtype)}, {})


class GraphJob(BatchJob):
    """The job of a GraphBatch."""

    native: gather.GraphBatchJob

    def _look_up(self) -> None:
        store, form = self._store, self._format
        sources = graph_sources(store.internals, self._indices, form.layer_numbers(store))
        causal = sources.layout == LAYOUT_CAUSAL
        self._packed, self._num_heads = form.edge_format != "coo", form.num_heads(store)
        if self._packed and not causal.all():
            raise UsageError("packed edges need causal attention; use edge_format='coo'")
        self._dtype, self._weight_dtype = form.hidden_dtype(store), form.weight_dtype(store)
        self._hidden = gather.CopyJob(sources.hidden, dtype_code(store.hidden_dtype), dtype_code(self._dtype))
        self.native = gather.GraphBatchJob(
            hidden=self._hidden,
            weights=sources.attention,
            weight_dtype=dtype_code(store.attention_dtype),
            weight_out=dtype_code(self._weight_dtype),
            num_tokens=sources.num_tokens,
            causal=causal.view("u1"),
            num_layers=sources.layers_per_part,
            num_heads=store.num_stored_heads,
            attention_threshold=form.attention_threshold,
            top_k=form.top_k or 0.0,
            packed=self._packed,
            edges=sources.edges,
            every_head=self._num_heads > 1,
            masks=form.edge_masks,
        )
        self._sources = sources.hidden + sources.attention
        self._place_tensors()

    def _place_tensors(self) -> None:
        room, num_ptr = self.native.max_edges(), 8 * (self.native.num_graphs + 1)
        self._place(
            {
                "x": self._hidden.out_bytes,
                "edge_index": 0 if self._packed else 16 * room,
                "weights": room * storage_dtype(self._weight_dtype).itemsize,
                "batch": 8 * self.native.num_nodes,
                "ptr": num_ptr,
                "edge_ptr": num_ptr,
                "in_degree": 0 if self._format.edge_masks is None else 4 * self.native.num_nodes,
            }
        )

    def _require_intact(self) -> None:
        for index in self._indices.tolist():
            _ = self._store.private_trace(index).attention_packed_bits

    def finalize_size(self) -> None:
        """Make num_bytes exact. This counts the edges that the threshold keeps."""
        self.native.count_edges()
        self._place_tensors()

    def layout(self) -> BatchLayout:
        """Return where the tensors lie in the buffer."""
        native, at, values = self.native, self._offsets, {"num_layers": self._format.num_layers(self._store)}
        tensors: dict[str, tuple[int, tuple[int, ...], str]] = {
            "x": (at["x"], (native.num_nodes, self._store.hidden_dim), self._dtype),
            "batch": (at["batch"], (native.num_nodes,), "int64"),
            "ptr": (at["ptr"], (native.num_graphs + 1,), "int64"),
            "edge_ptr": (at["edge_ptr"], (native.num_graphs + 1,), "int64"),
        }
        if self._format.edge_masks is not None:
            tensors["in_degree"] = (at["in_degree"], (native.num_nodes,), "int32")
        if self._packed:
            tensors["attention"] = (at["weights"], (native.num_edges,), self._weight_dtype)
            values["num_heads"] = self._num_heads
        else:
            tensors["edge_index"] = (at["edge_index"], (2, native.num_edges), "int64")
            tensors["edge_attr"] = (at["weights"], (native.num_edges, 1), self._weight_dtype)
        return BatchLayout(GraphBatch, tensors, values, self._format.as_pyg)


@dataclass(frozen=True)
class BatchGatherer:
    """Gathers batches of one form from a store.

    Parameters
    ----------
    store : TraceStore
        The store.
    targets : ndarray, shape (len(store),)
        The label of each trace of the store.
    batch_format : BatchFormat
        The form of the batches.
    """

    store: TraceStore
    targets: np.ndarray
    batch_format: BatchFormat

    def job(self, indices: Sequence[int] | np.ndarray) -> BatchJob:
        """Look up the traces of a batch and return its job. Nothing is read yet."""
        chosen = checked_indices(indices)
        try:
            return self._look_up(chosen)
        except ValueError as error:  # the core found arrays of the store that do not fit together
            found = {self.store.internals.origin(index)[0] for index in self.traces(chosen).tolist()}
            raise CorruptStoreError(f"{' or '.join(sorted(found))}: {error}") from None

    def _look_up(self, indices: np.ndarray) -> BatchJob:
        job_class = SequenceJob if self.batch_format.view == "sequence" else GraphJob
        return job_class(self, indices)

    def hint_upcoming(self, indices: np.ndarray) -> Callable[[], None]:
        """Announce the chunks of a batch to the cache; see `ChunkCache.hint_upcoming`."""
        return self.store.internals.chunk_cache.hint_upcoming(self._chunk_keys(indices))

    def _chunk_keys(self, indices: np.ndarray) -> list[ChunkKey]:
        form = self.batch_format
        return chunk_keys(self.store.internals, indices, form.source_view, form.layer_numbers(self.store))

    def prefetch(self, batches: Callable[[int], np.ndarray], start: int, total: int) -> list[FilePrefetcher]:
        """Return prefetchers of the files of the batches start .. total - 1, one for each remote store.

        `batches` maps the number of a batch to its indices.
        """
        form, layers = self.batch_format, self.batch_format.layer_numbers(self.store)
        return self.store.internals.prefetch(
            lambda store, traces: batch_files(store, traces, form.source_view, layers),
            lambda batch: self.traces(batches(batch)),
            start,
            total,
        )

    def announce(self, chosen: np.ndarray | None, num_ranks: int, *, is_scattered: bool) -> None:
        """Record that this rank is about to read its share of the chosen traces, None for all; see StoreInternals."""
        layers = self.batch_format.layer_numbers(self.store)
        # Batches of tokens have tokens of any trace.
        num_ranks = 1 if self.batch_format.view == "tokens" else num_ranks
        share = 1.0 if layers is None else len(layers) / max(1, self.store.num_layers)
        self.store.internals.announce(chosen, share / num_ranks, is_scattered=is_scattered)

    def traces(self, indices: np.ndarray) -> np.ndarray:
        """Return the traces that the indices of a batch refer to."""
        return indices

    def gather(self, indices: Sequence[int] | np.ndarray, allocate: Allocate | None = None) -> Any:
        """Gather a batch in this thread.

        Parameters
        ----------
        indices : sequence of int
            Store indices of the B traces.
        allocate : callable, optional
            Returns the buffer of the batch. By default the batch has memory of its own, which a
            worker process of a DataLoader shares with its parent.

        Returns
        -------
        SequenceBatch, torch_geometric.data.Batch, GraphBatch or TokenBatch
            The batch. A PyG Batch has the fields of `GraphBatch`, where ``attention_ptr`` stands for
            `edge_ptr` and exists only with edge formats "packed" and "heads".
        """
        job = self.job(indices)
        job.finalize_size()
        # Without such files, torch shares the tensors of a worker in its own way.
        if allocate is None and get_worker_info() is not None and has_memory_files():
            slot = shared_memory.slots.acquire(job.num_bytes)
            job.set_buffer(BatchBuffer(slot.lease()))
            job.complete(job.native.run)
            return shared_memory.shared_batch(slot, job.layout(), job.metadata())
        job.set_buffer(TorchBuffer(job.num_bytes) if allocate is None else allocate(job.num_bytes))
        job.complete(job.native.run)
        return job.batch()
