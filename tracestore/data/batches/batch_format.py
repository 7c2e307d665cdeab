"""The form of a batch, and the bytes that its traces take. Imports no torch."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tracestore.errors import UsageError
from tracestore.pages.notebook import fragment
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore
from tracestore.words import format_size, plural

View = Literal["sequence", "graph", "tokens"]
EdgeFormat = Literal["coo", "packed", "heads"]
Layers = int | Sequence[int]
# "all", "prompt", "answer" or "last", a position, positions, or a slice of them. Negative ones count from the end.
Positions = str | int | slice | Sequence[int]
NAMED_POSITIONS = ("all", "prompt", "answer", "last")

# Upper bound of the gaps that align the tensors of a batch.
_ALIGNMENT_BYTES = 1024


class EdgeMasks(NamedTuple):
    """Pairs of tokens that are no edges: those of a token with itself, and those from the first tokens of a graph."""

    diagonal: bool = False
    sinks: int = 0


def _integers(values: int | Sequence[int], name: str) -> int | tuple[int, ...]:
    """Return an integer or a tuple of different ones. UsageError for other values."""
    try:
        if isinstance(values, bool):
            raise TypeError
        if not isinstance(values, Iterable):
            return operator.index(values)
        found = tuple(map(operator.index, values))
    except TypeError:
        raise UsageError(f"found {name} {values!r:.80}, expected an integer or a list of integers") from None
    if not found or len(set(found)) < len(found) or any(isinstance(value, bool) for value in values):
        raise UsageError(f"found {name} {list(found)!r:.80}, expected at least one, each once")
    return found


@dataclass(frozen=True)
class BatchFormat:
    """The form of a batch.

    Parameters
    ----------
    view : {"sequence", "graph", "tokens"}
        One token of each layer, the graphs of the layers, or tokens of all traces.
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
    layers : int or sequence of int, optional
        Read these stored layers only, in this order; negative numbers count from the last layer.
        The attribute is a tuple, or None for all layers.
    positions : str, int, slice or sequence of int, optional
        Tokens of a trace. View "sequence" takes "last" (the default) or one position, view "graph"
        "all" only, view "tokens" any, by default "all".
    edge_masks : EdgeMasks, optional
        For edge format "packed": set these pairs to NaN, and count the edges into each node.

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
    layers: Layers | None = None
    positions: Positions | None = None
    edge_masks: EdgeMasks | None = None

    def __post_init__(self) -> None:
        self._check_selection()
        if math.isnan(self.attention_threshold):
            raise UsageError("found attention_threshold nan, expected a number")
        if self.top_k is not None and not 0 < self.top_k <= 1:
            raise UsageError(f"found top_k {self.top_k}, expected a fraction above 0 and at most 1")
        if self.edge_format not in get_args(EdgeFormat):
            raise UsageError(f"found edge_format {self.edge_format!r}, expected 'coo', 'packed' or 'heads'")
        if self.edge_masks is not None and self.edge_format != "packed":
            raise UsageError(f"found edge_format {self.edge_format!r}, expected 'packed' with edge_masks")
        if self.edge_format == "heads" and self.top_k is not None:
            raise UsageError("attention of every head excludes top_k (--top-k), which ranks by head-averaged attention")

    def _check_selection(self) -> None:
        """Check layers and positions, and make tuples of those that are lists."""
        layers, positions = self.layers, self.positions
        if layers is not None:
            chosen = _integers(layers, "layers")
            object.__setattr__(self, "layers", (chosen,) if isinstance(chosen, int) else chosen)
        if isinstance(positions, str):
            if positions not in NAMED_POSITIONS:
                names = ", ".join(NAMED_POSITIONS)
                raise UsageError(f"found positions {positions!r}, expected one of {names}, integers or a slice")
        elif positions is not None and not isinstance(positions, slice):
            positions = _integers(positions, "positions")
            object.__setattr__(self, "positions", positions)
        if self.view == "sequence" and not (positions in (None, "last") or isinstance(positions, int)):
            raise UsageError(f"found positions {positions!r:.80}: view 'sequence' takes 'last' or one integer")
        if self.view == "graph" and positions not in (None, "all"):
            raise UsageError(f"found positions {positions!r:.80}: view 'graph' takes all tokens of a trace")

    def layer_numbers(self, store: TraceStore) -> tuple[int, ...] | None:
        """Return the chosen layers, counted from the first; None for all. UsageError if the store lacks one."""
        if self.layers is None:
            return None
        assert isinstance(self.layers, tuple)
        found = tuple(n + store.num_layers if n < 0 else n for n in self.layers)
        if len(store) and (min(found) < 0 or max(found) >= store.num_layers or len(set(found)) < len(found)):
            raise UsageError(
                f"{store.path}: found layers {list(self.layers)}, expected different ones of {store.num_layers}"
            )
        return found

    def num_layers(self, store: TraceStore) -> int:
        """Return the number of layers that a batch holds of a trace."""
        return store.num_layers if self.layers is None else len(self.layers)  # type: ignore[arg-type]

    @property
    def position(self) -> int:
        """The position that view "sequence" takes; -1 for the last token."""
        return self.positions if isinstance(self.positions, int) else -1

    @property
    def source_view(self) -> View:
        """The view that reads the same arrays of a store."""
        return "tokens" if self.view == "sequence" and self.position != -1 else self.view

    def check(self, store: TraceStore, indices: np.ndarray | None = None) -> None:
        """Raise UsageError or MissingFieldError if the traces, by default all, cannot give such batches."""
        store.require_view(self.source_view, indices)
        self.layer_numbers(store)
        stored = {store.hidden_dtype} | ({self._gathered_dtype(store)} if self.view == "graph" else set())
        if self.dtype not in (None, "float32") and stored != {self.dtype}:
            raise UsageError(
                f"found dtype {self.dtype!r}, expected 'float32' or as stored, {' and '.join(sorted(stored))}"
            )
        is_chosen = self.attention_threshold > 0 or (self.top_k or 1) < 1
        if self.view == "graph" and store.attention_layout == "edges" and is_chosen:
            raise UsageError(
                f"{store.path}: its edges were chosen before it was written, so that batches have all of them; "
                "attention_threshold and top_k (--attention-threshold, --top-k) are for stores of attention"
            )

    def describe(self, store: TraceStore, num_samples: int) -> str:
        """Return the view and the sizes in words, for the representation of a loader."""
        what = "token" if self.view == "tokens" else "trace"
        sizes = (
            f"{plural(num_samples, what)}, {plural(self.num_layers(store), 'layer')}, hidden size {store.hidden_dim}"
        )
        return f"{str(store.path)!r}, {self.view!r}, {sizes}, {self.hidden_dtype(store)}"

    def num_heads(self, store: TraceStore) -> int:
        """Return the number of weights that a batch holds for each pair of tokens."""
        return store.num_stored_heads if self.edge_format == "heads" else 1

    def _gathered_dtype(self, store: TraceStore) -> str:
        """Return the dtype of the weights before any conversion. A mean made while gathering is float16."""
        is_averaged = store.num_stored_heads > 1 and self.edge_format != "heads"
        return "float16" if is_averaged else store.attention_dtype

    def hidden_dtype(self, store: TraceStore) -> str:
        """Return the dtype of sequences and x in the batch."""
        return self.dtype or store.hidden_dtype

    def weight_dtype(self, store: TraceStore) -> str:
        """Return the dtype of edge weights in the batch."""
        return self.dtype or self._gathered_dtype(store)

    def bytes_per_trace(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the largest number of bytes that each trace, or each token in view "tokens", can take in a batch.

        Parameters
        ----------
        store : TraceStore
            The store.
        indices : ndarray of int64, shape (n,)
            Store indices, or numbers of tokens.

        Returns
        -------
        ndarray of int64, shape (n,)
            Bytes. Edges are counted as if the threshold kept all stored pairs.
        """
        item = schema.storage_dtype(self.hidden_dtype(store)).itemsize
        num_layers = self.num_layers(store)
        if self.view != "graph":
            return np.full(len(indices), num_layers * store.hidden_dim * item, np.int64)
        tokens, pairs = store.token_and_pair_counts(indices, self.layer_numbers(store))
        weight = schema.storage_dtype(self.weight_dtype(store)).itemsize * self.num_heads(store)
        per_edge = 16 + weight if self.edge_format == "coo" else weight
        # A node has its x, its graph's number and its edges, a graph the offsets of its first node and edge.
        per_node = store.hidden_dim * item + (8 if self.edge_masks is None else 12)
        sizes: np.ndarray = num_layers * (tokens * per_node + 16) + pairs * per_edge
        return sizes

    def max_batch_bytes(self, store: TraceStore, indices: np.ndarray) -> int:
        """Return the largest number of bytes that a batch of some traces or tokens can take, gaps included."""
        return int(self.bytes_per_trace(store, indices).sum()) + _ALIGNMENT_BYTES


class LoaderHtml:
    """Base of loaders: shows the sizes and options of a loader in a notebook."""

    def _repr_html_(self: Any) -> str:
        planner, memory = self.planner, self.memory
        return fragment(
            type(self).__name__,
            values={
                "store": self.store.path,
                "contents": self.format.describe(self.store, planner.num_samples).partition(", ")[2],
                "batches of an epoch": len(self),
                "batch size": planner.batch_size if planner.batch_by is None else None,
                "largest cost of a batch": None
                if planner.batch_by is None
                else f"{planner.max_batch_cost:,} {planner.batch_by}",
                "shuffle": planner.shuffle,
                "epoch": self.epoch,
                "threads": self.num_threads,
                "rank": f"{self.rank} of {self.world_size}" if self.world_size > 1 else None,
                "memory of a batch": format_size(memory.buffer_bytes),
                "batches in memory": self.max_in_flight + 1,
            },
        )
