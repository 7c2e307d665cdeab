"""Batches: what they look like, and how their tensors lie in one piece of memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data

from tracestore.data.memory import Piece, dtype_bytes
from tracestore.errors import UsageError
from tracestore.store.reader import TraceStore


@dataclass(frozen=True)
class GraphOptions:
    """How attention becomes edges: all pairs with weight > threshold (0 keeps what is
    positive), or, where top_k is given, that fraction of each layer's stored pairs with
    the largest weights. edges: "coo" (PyG's edge_index), "packed" (causal triangles) or
    "heads" (those of every stored head, without top_k)."""

    attention_threshold: float = 0.0
    top_k: float | None = None
    edges: str = "coo"

    def __post_init__(self) -> None:
        if self.top_k is not None and not 0 < self.top_k <= 1:
            raise UsageError(f"found top_k {self.top_k}, expected a fraction above 0 and at most 1")
        if self.edges not in ("coo", "packed", "heads"):
            raise UsageError(f"found edges {self.edges!r}, expected 'coo', 'packed' or 'heads'")
        if self.edges == "heads" and self.top_k is not None:
            raise UsageError("top-k chooses among head means; with weights of every head use a threshold")

    def num_heads(self, store: TraceStore) -> int:
        """Weights of one pair in a batch."""
        return store.heads_stored if self.edges == "heads" else 1


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
        stored = {store.hidden_dtype} | ({weight_dtype(store, self.graph)} if self.view == "graph" else set())
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
        weight = dtype_bytes(self.of(weight_dtype(store, self.graph))) * self.graph.num_heads(store)
        an_edge = 16 + weight if self.graph.edges == "coo" else weight
        # Of a node x and the number of its graph; of a graph its first node and edge.
        sizes: np.ndarray = store.num_layers * (tokens * (store.hidden_dim * item + 8) + 16) + pairs * an_edge
        return sizes

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
GRAPH_BATCH: Any = type(Batch(_base_cls=Data))


def weight_dtype(store: TraceStore, graph: GraphOptions) -> str:
    """Of one weight: a mean made while gathering is float16."""
    return "float16" if store.attention == "heads" and graph.edges != "heads" else store.attention_dtype


@dataclass(frozen=True)
class Values:
    """What a batch says of its B traces beside their arrays; y and score NaN where missing."""

    y: np.ndarray  # (B,) float32
    score: np.ndarray  # (B,) float32
    question_id: list[str]
    trace_index: np.ndarray  # (B,) int64

    @classmethod
    def of(cls, store: TraceStore, indices: np.ndarray, targets: np.ndarray) -> "Values":
        y, score = targets[indices].astype("f4"), store.scores[indices].astype("f4")
        return cls(y, score, store.question_ids.at(indices), indices.copy())

    def tensors(self) -> dict[str, Any]:
        y, score, index = (torch.from_numpy(a) for a in (self.y, self.score, self.trace_index))
        return {"y": y, "score": score, "question_id": self.question_id, "trace_index": index}


@dataclass(frozen=True)
class SequenceLayout:
    """A SequenceBatch in a piece of memory."""

    shape: tuple[int, int, int]
    dtype: str

    def batch(self, piece: Piece, values: Values) -> SequenceBatch:
        return SequenceBatch(piece.tensor(0, self.shape, self.dtype), **values.tensors())


@dataclass(frozen=True)
class GraphLayout:
    """A graph Batch in a piece of memory. offsets: where x, edge_index, edge weights,
    batch, ptr and the edges' ptr begin, in bytes."""

    offsets: tuple[int, ...]
    num_layers: int
    num_graphs: int
    num_nodes: int
    num_edges: int
    hidden_dim: int
    dtype: str
    weight_dtype: str
    packed: bool
    num_heads: int

    def batch(self, piece: Piece, values: Values) -> Batch:
        """See jobs.gather_batch; the slices of to_data_list are the ptr tensors themselves."""
        at_x, at_edges, at_weight, at_owner, at_ptr, at_edge_ptr = self.offsets
        ptr, edge_ptr = (piece.tensor(at, (self.num_graphs + 1,), "int64") for at in (at_ptr, at_edge_ptr))
        x = piece.tensor(at_x, (self.num_nodes, self.hidden_dim), self.dtype)
        fields: dict[str, Any] = {"x": x}
        slices: dict[str, torch.Tensor] = {"x": ptr}
        incs: dict[str, torch.Tensor | None] = {"x": None}
        if self.packed:
            fields["attention"] = piece.tensor(at_weight, (self.num_edges,), self.weight_dtype)
            fields["attention_ptr"] = edge_ptr
            fields["num_heads"] = self.num_heads
        else:
            fields["edge_index"] = piece.tensor(at_edges, (2, self.num_edges), "int64")
            fields["edge_attr"] = piece.tensor(at_weight, (self.num_edges, 1), self.weight_dtype)
            slices["edge_index"] = slices["edge_attr"] = edge_ptr
            incs["edge_index"], incs["edge_attr"] = ptr[:-1], None
        fields["batch"], fields["ptr"] = piece.tensor(at_owner, (self.num_nodes,), "int64"), ptr
        fields.update(values.tensors())
        fields["num_layers"] = self.num_layers
        batch = GRAPH_BATCH.__new__(GRAPH_BATCH)
        Data.__init__(batch)
        batch._store._mapping.update(fields)
        batch._num_graphs = self.num_graphs
        batch._slice_dict, batch._inc_dict = slices, incs
        return batch


Layout = SequenceLayout | GraphLayout
