"""What a batch is to look like, and the bytes its traces take. Imports no torch."""

from dataclasses import dataclass, field

import numpy as np

from tracestore.errors import UsageError
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore


@dataclass(frozen=True)
class EdgeOptions:
    """How attention becomes edges: all pairs with weight > threshold (0 keeps what is
    positive), or, where top_k is given, that fraction of each layer's stored pairs with
    the largest weights. edges: "coo" (PyG's edge_index), "packed" (causal triangles) or
    "heads" (those of every stored head, without top_k)."""

    attention_threshold: float = 0.0
    top_k: float | None = None
    edge_format: str = "coo"

    def __post_init__(self) -> None:
        if self.top_k is not None and not 0 < self.top_k <= 1:
            raise UsageError(f"found top_k {self.top_k}, expected a fraction above 0 and at most 1")
        if self.edge_format not in ("coo", "packed", "heads"):
            raise UsageError(f"found edges {self.edge_format!r}, expected 'coo', 'packed' or 'heads'")
        if self.edge_format == "heads" and self.top_k is not None:
            raise UsageError("top-k chooses among head means; with weights of every head use a threshold")

    def num_heads(self, store: TraceStore) -> int:
        """Weights of one pair in a batch."""
        return store.num_stored_heads if self.edge_format == "heads" else 1


@dataclass(frozen=True)
class BatchFormat:
    """What a batch looks like: view "sequence" or "graph"; dtype of sequences, x and edge
    weights: the stored one (None) or "float32", converted while gathering. as_pyg: graphs as
    PyG's Batch, else as a GraphBatch."""

    view: str = "sequence"
    graph: EdgeOptions = field(default_factory=EdgeOptions)
    dtype: str | None = None
    as_pyg: bool = True

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

    def bytes_per_trace(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """(n,) int64: the most bytes each of some traces takes in a batch, edges counted as
        if the threshold kept every stored pair."""
        if self.view == "sequence":
            return np.full(len(indices), self._sequence_bytes(store), np.int64)
        return self.bytes_per_trace_of_sizes(store, *store.sizes(indices))

    def _sequence_bytes(self, store: TraceStore) -> int:
        return store.num_layers * store.hidden_dim * schema.storage_dtype(self.of(store.hidden_dtype)).itemsize

    def bytes_per_trace_of_sizes(self, store: TraceStore, tokens: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """The same, for what store.sizes gives."""
        if self.view == "sequence":
            return np.full(len(tokens), self._sequence_bytes(store), np.int64)
        item = schema.storage_dtype(self.of(store.hidden_dtype)).itemsize
        weight = schema.storage_dtype(self.of(weight_dtype(store, self.graph))).itemsize
        weight *= self.graph.num_heads(store)
        an_edge = 16 + weight if self.graph.edge_format == "coo" else weight
        # Of a node x and the number of its graph; of a graph its first node and edge.
        sizes: np.ndarray = store.num_layers * (tokens * (store.hidden_dim * item + 8) + 16) + pairs * an_edge
        return sizes

    def max_batch_bytes(self, store: TraceStore, indices: np.ndarray) -> int:
        """The most memory a batch of some traces takes, gaps between its tensors included."""
        return int(self.bytes_per_trace(store, indices).sum()) + 1024


def weight_dtype(store: TraceStore, graph: EdgeOptions) -> str:
    """Of one weight: a mean made while gathering is float16."""
    return "float16" if store.attention == "heads" and graph.edge_format != "heads" else store.attention_dtype
