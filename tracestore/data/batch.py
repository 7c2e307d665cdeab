"""Batches built from a store: one gather a batch, into one piece of memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data

from tracestore._core import gather
from tracestore.data.memory import Allocate, Piece, allocate_here, dtype_bytes, padded
from tracestore.errors import UsageError
from tracestore.store import schema
from tracestore.store.places import graph_sources, sequence_sources
from tracestore.store.reader import TraceStore


@dataclass(frozen=True)
class GraphOptions:
    """How attention becomes edges: all pairs with weight > threshold (0 keeps what is
    positive), or, where top_k is given, that fraction of each layer's stored pairs with
    the largest weights. edges: "coo" (PyG's edge_index) or "packed" (causal triangles)."""

    attention_threshold: float = 0.0
    top_k: float | None = None
    edges: str = "coo"

    def __post_init__(self) -> None:
        if self.top_k is not None and not 0 < self.top_k <= 1:
            raise UsageError(f"found top_k {self.top_k}, expected a fraction above 0 and at most 1")
        if self.edges not in ("coo", "packed"):
            raise UsageError(f"found edges {self.edges!r}, expected 'coo' or 'packed'")


@dataclass(frozen=True)
class BatchFormat:
    """What a batch looks like: view "sequence" or "graph"; dtype of sequences, x and edge
    weights: the stored one (None) or "float32", converted while gathering."""

    view: str = "sequence"
    graph: GraphOptions = field(default_factory=GraphOptions)
    dtype: str | None = None

    def check(self, store: TraceStore) -> None:
        """UsageError or MissingFieldError where the store cannot give such batches."""
        store.require(self.view)
        stored = {store.hidden_dtype} | ({_weight_dtype(store)} if self.view == "graph" else set())
        if self.dtype not in (None, "float32") and stored != {self.dtype}:
            raise UsageError(
                f"found dtype {self.dtype!r}, expected 'float32' or as stored, {' and '.join(sorted(stored))}"
            )

    def of(self, stored: str) -> str:
        """The dtype that stored values have in the batch."""
        return stored if self.dtype is None else self.dtype

    def bytes(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """(n,) int64: the most bytes each of some traces takes in a batch, edges counted as
        if the threshold kept every stored pair."""
        item = dtype_bytes(self.of(store.hidden_dtype))
        if self.view == "sequence":
            return np.full(len(indices), store.num_layers * store.hidden_dim * item, np.int64)
        tokens, pairs = store.sizes(indices)
        weight = dtype_bytes(self.of(_weight_dtype(store)))
        an_edge = weight if self.graph.edges == "packed" else 16 + weight
        # Of a node x and the number of its graph; of a graph its first node and edge.
        return store.num_layers * (tokens * (store.hidden_dim * item + 8) + 16) + pairs * an_edge

    def piece_bytes(self, store: TraceStore, indices: np.ndarray) -> int:
        """The most memory a batch of some traces takes, gaps between its tensors included."""
        return int(self.bytes(store, indices).sum()) + 1024


@dataclass
class SequenceBatch:
    """B last-token sequences. Also reads as a tuple (sequences, score, question_id) and
    by name, batch["sequences"]."""

    sequences: torch.Tensor  # (B, L, D)
    y: torch.Tensor  # (B,) float32, NaN without a label or score
    score: torch.Tensor  # (B,) float32, NaN where missing
    question_id: list[str]
    trace_index: torch.Tensor  # (B,) int64

    def __len__(self) -> int:
        return len(self.question_id)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.sequences, self.score, self.question_id))

    def __getitem__(self, key: str | int) -> Any:
        return getattr(self, key) if isinstance(key, str) else (self.sequences, self.score, self.question_id)[key]

    def keys(self) -> list[str]:
        return ["sequences", "y", "score", "question_id", "trace_index"]

    def _map(self, move: Any) -> "SequenceBatch":
        tensors = {name: move(getattr(self, name)) for name in ("sequences", "y", "score", "trace_index")}
        return replace(self, **tensors)

    def to(self, *args: Any, **kwargs: Any) -> "SequenceBatch":
        """The batch on a device."""
        return self._map(lambda t: t.to(*args, **kwargs))

    def pin_memory(self) -> "SequenceBatch":
        return self._map(torch.Tensor.pin_memory)


# What Batch(_base_cls=Data) makes an instance of; that call looks at signatures every time.
_BATCH_CLASS: Any = type(Batch(_base_cls=Data))


def _weight_dtype(store: TraceStore) -> str:
    """Of one weight an edge: a mean made while gathering is float16."""
    return "float16" if store.attention == "heads" else store.attention_dtype


def _code(name: str) -> int:
    return schema.dtype_code(name)


def _values(store: TraceStore, indices: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    return {
        "y": torch.from_numpy(targets[indices].astype("f4")),
        "score": torch.from_numpy(store.scores[indices].astype("f4")),
        "question_id": store.question_ids.at(indices),
        "trace_index": torch.from_numpy(indices.copy()),
    }


class SequenceJob:
    """A SequenceBatch on its way: looked up, then placed, done, and made into tensors."""

    def __init__(self, store: TraceStore, indices: np.ndarray, targets: np.ndarray, form: BatchFormat) -> None:
        self._store, self._indices, self._targets = store, indices, targets
        self._dtype = form.of(store.hidden_dtype)
        sources = sequence_sources(store, indices)
        self.native = gather.Copies(sources, _code(store.hidden_dtype), _code(self._dtype))

    def count(self) -> None:
        """Nothing to find out: sizes are known."""

    @property
    def num_bytes(self) -> int:
        return padded(self.native.out_bytes)

    def place(self, piece: Piece) -> None:
        """Sets the memory, of num_bytes, that the batch is to lie in."""
        self._piece = piece
        self.native.aim(piece.buffer)

    def batch(self) -> SequenceBatch:
        """Once the native job is done."""
        shape = (len(self._indices), self._store.num_layers, self._store.hidden_dim)
        sequences = self._piece.tensor(0, shape, self._dtype)
        return SequenceBatch(sequences, **_values(self._store, self._indices, self._targets))


class GraphJob:
    """A PyG Batch on its way: looked up, then placed, done, and made into tensors."""

    def __init__(self, store: TraceStore, indices: np.ndarray, targets: np.ndarray, form: BatchFormat) -> None:
        self._store, self._indices, self._targets = store, indices, targets
        sources = graph_sources(store, indices)
        causal = sources.layout == schema.LAYOUT_CAUSAL
        self._packed = form.graph.edges == "packed"
        if self._packed and not causal.all():
            raise UsageError("packed edges need causal attention; use edges='coo'")
        self._dtype, self._weight_dtype = form.of(store.hidden_dtype), form.of(_weight_dtype(store))
        hidden = gather.Copies(sources.hidden, _code(store.hidden_dtype), _code(self._dtype))
        self.native = gather.GraphGather(
            hidden,
            sources.attention,
            _code(store.attention_dtype),
            _code(self._weight_dtype),
            sources.num_tokens,
            causal.view("u1"),
            store.num_layers,
            store.heads_stored,
            form.graph.attention_threshold,
            form.graph.top_k or 0.0,
            self._packed,
            sources.edges,
        )
        self._x_bytes = hidden.out_bytes
        self._lay_out()

    def _lay_out(self) -> None:
        """Where in the piece each tensor begins: x, edge_index, weights, owner, ptr, edge_ptr."""
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
            self.num_bytes += padded(size)

    def count(self) -> None:
        """Finds out the number of edges, so that num_bytes is exact, not a bound."""
        self.native.count()
        self._lay_out()

    def place(self, piece: Piece) -> None:
        """Sets the memory, of num_bytes, that the batch is to lie in."""
        self._piece = piece
        self.native.aim(piece.buffer, *self._offsets)

    def batch(self) -> Batch:
        """Once the native job is done: see gather_batch."""
        native, tensor, store = self.native, self._piece.tensor, self._store
        num_edges, num_graphs = native.num_edges, native.num_graphs
        at_x, at_edges, at_weight, at_owner, at_ptr, at_edge_ptr = self._offsets
        ptr, edge_ptr = (tensor(at, (num_graphs + 1,), "int64") for at in (at_ptr, at_edge_ptr))
        x = tensor(at_x, (native.num_nodes, store.hidden_dim), self._dtype)
        fields: dict[str, Any] = {"x": x}
        slices: dict[str, torch.Tensor] = {"x": ptr}
        incs: dict[str, torch.Tensor | None] = {"x": None}
        if self._packed:
            fields["attention"], fields["attention_ptr"] = tensor(at_weight, (num_edges,), self._weight_dtype), edge_ptr
        else:
            fields["edge_index"] = tensor(at_edges, (2, num_edges), "int64")
            fields["edge_attr"] = tensor(at_weight, (num_edges, 1), self._weight_dtype)
            slices["edge_index"] = slices["edge_attr"] = edge_ptr
            incs["edge_index"], incs["edge_attr"] = ptr[:-1], None
        fields["batch"], fields["ptr"] = tensor(at_owner, (native.num_nodes,), "int64"), ptr
        fields.update(_values(store, self._indices, self._targets))
        fields["num_layers"] = store.num_layers
        batch = _BATCH_CLASS.__new__(_BATCH_CLASS)
        Data.__init__(batch)
        batch._store._mapping.update(fields)
        batch._num_graphs = num_graphs
        batch._slice_dict, batch._inc_dict = slices, incs
        return batch


BatchJob = SequenceJob | GraphJob


def make_job(
    store: TraceStore, indices: Sequence[int] | np.ndarray, targets: np.ndarray, form: BatchFormat
) -> BatchJob:
    """The batch of some traces, looked up and nothing more."""
    kind = SequenceJob if form.view == "sequence" else GraphJob
    return kind(store, np.asarray(indices, np.int64), targets, form)


def gather_batch(
    store: TraceStore,
    indices: Sequence[int] | np.ndarray,
    targets: np.ndarray,
    form: BatchFormat,
    *,
    num_threads: int = 1,
    allocate: Allocate = allocate_here,
) -> Any:
    """The batch of some traces, now, in memory from `allocate`.

    View "sequence": a SequenceBatch. View "graph": one PyG Batch of B * L graphs, trace
    after trace and layer after layer: x (N, D); edge_index (2, E), source j to target i,
    and edge_attr (E, 1), or with edges="packed" attention (sum A,) and attention_ptr
    (B * L + 1,); batch (N,), ptr (B * L + 1,); y, score (B,), question_id, trace_index
    (B,), num_layers.
    """
    job = make_job(store, indices, targets, form)
    job.count()
    job.place(allocate(job.num_bytes))
    job.native.run(num_threads)
    return job.batch()
