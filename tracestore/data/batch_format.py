"""The form of a batch, and the bytes that its traces take. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from tracestore.errors import UsageError
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore

View = Literal["sequence", "graph"]
EdgeFormat = Literal["coo", "packed", "heads"]

# Upper bound of the gaps that align the tensors of a batch.
_ALIGNMENT_BYTES = 1024


@dataclass(frozen=True)
class BatchFormat:
    """The form of a batch.

    Parameters
    ----------
    view : {"sequence", "graph"}
        The last token of each layer, or the graphs of all layers.
    attention_threshold : float
        Keep the pairs whose head-averaged attention is above this value as edges. 0 keeps the
        positive ones.
    top_k : float, optional
        A fraction in (0, 1], not a number: keep this fraction of each layer's stored pairs, those
        with the largest weights. Replaces the threshold.
    edge_format : {"coo", "packed", "heads"}
        "coo": an edge list, PyG's `edge_index`. "packed": causal triangles of head-averaged
        attention. "heads": causal triangles of each stored head; excludes `top_k`.
    dtype : str, optional
        Dtype of sequences, x and edge weights: None keeps the stored one, "float32" converts while
        gathering.
    as_pyg : bool
        For view "graph", yield PyG batches instead of `GraphBatch`.

    Raises
    ------
    UsageError
        For a value outside these ranges.
    """

    view: View = "sequence"
    attention_threshold: float = 0.0
    top_k: float | None = None
    edge_format: EdgeFormat = "coo"
    dtype: str | None = None
    as_pyg: bool = True

    def __post_init__(self) -> None:
        if self.top_k is not None and not 0 < self.top_k <= 1:
            raise UsageError(f"found top_k {self.top_k}, expected a fraction above 0 and at most 1")
        if self.edge_format not in get_args(EdgeFormat):
            raise UsageError(f"found edge_format {self.edge_format!r}, expected 'coo', 'packed' or 'heads'")
        if self.edge_format == "heads" and self.top_k is not None:
            raise UsageError("attention of every head excludes top_k (--top-k), which ranks by head-averaged attention")

    def check(self, store: TraceStore, indices: np.ndarray | None = None) -> None:
        """Raise UsageError or MissingFieldError if the traces, by default all, cannot give such batches."""
        store.require_view(self.view, indices)
        stored = {store.hidden_dtype} | ({self._gathered_dtype(store)} if self.view == "graph" else set())
        if self.dtype not in (None, "float32") and stored != {self.dtype}:
            raise UsageError(
                f"found dtype {self.dtype!r}, expected 'float32' or as stored, {' and '.join(sorted(stored))}"
            )

    def describe(self, store: TraceStore, num_traces: int) -> str:
        """Return the view and the sizes in words, for the representation of a loader."""
        sizes = f"{num_traces} traces, {store.num_layers} layers, hidden size {store.hidden_dim}"
        return f"{str(store.path)!r}, {self.view!r}, {sizes}, {self.hidden_dtype(store)}"

    def num_heads(self, store: TraceStore) -> int:
        """Return the number of weights that a batch holds for each pair of tokens."""
        return store.num_stored_heads if self.edge_format == "heads" else 1

    def _gathered_dtype(self, store: TraceStore) -> str:
        """Return the dtype of the weights before any conversion. A mean made while gathering is float16."""
        is_averaged = store.attention_mode == "heads" and self.edge_format != "heads"
        return "float16" if is_averaged else store.attention_dtype

    def hidden_dtype(self, store: TraceStore) -> str:
        """Return the dtype of sequences and x in the batch."""
        return self.dtype or store.hidden_dtype

    def weight_dtype(self, store: TraceStore) -> str:
        """Return the dtype of edge weights in the batch."""
        return self.dtype or self._gathered_dtype(store)

    def bytes_per_trace(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the largest number of bytes that each trace can take in a batch.

        Parameters
        ----------
        store : TraceStore
            The store.
        indices : ndarray of int64, shape (n,)
            Store indices.

        Returns
        -------
        ndarray of int64, shape (n,)
            Bytes. Edges are counted as if the threshold kept all stored pairs.
        """
        item = schema.storage_dtype(self.hidden_dtype(store)).itemsize
        if self.view == "sequence":
            return np.full(len(indices), store.num_layers * store.hidden_dim * item, np.int64)
        tokens, pairs = store.token_and_pair_counts(indices)
        weight = schema.storage_dtype(self.weight_dtype(store)).itemsize * self.num_heads(store)
        per_edge = 16 + weight if self.edge_format == "coo" else weight
        # A node has its x and its graph's number, a graph the offsets of its first node and edge.
        sizes: np.ndarray = store.num_layers * (tokens * (store.hidden_dim * item + 8) + 16) + pairs * per_edge
        return sizes

    def max_batch_bytes(self, store: TraceStore, indices: np.ndarray) -> int:
        """Return the largest number of bytes that a batch of some traces can take, gaps included."""
        return int(self.bytes_per_trace(store, indices).sum()) + _ALIGNMENT_BYTES
