"""A store as a PyTorch Geometric Dataset."""

from collections.abc import Callable
from typing import Any

from tracestore.errors import UsageError
from tracestore.extras import needs

with needs("bridges"):
    from torch_geometric.data import Data, Dataset

    from tracestore.data.datasets import StoreLike, TraceDataset


class TraceGraphs(Dataset):
    """Each layer of each trace as one graph, for code that needs PyG's own Dataset and DataLoader.

    Graph k is layer k % L of trace k // L, or with `layer` that layer of trace k of the store or
    subset. It is a Data with x (S, D), edge_index (2, E) from source j to target i, edge_attr
    (E, 1), y (1,), which is 1 for a hallucination, score (1,), trace_index (a store index), layer
    and question_id. Graphs are read on access;
    `tracestore.TraceLoader` makes the same batches several times as fast.

    Parameters
    ----------
    store : TraceStore, TraceSubset, str or PathLike
        A store, a subset of one, or the path of a store.
    layer : int, optional
        Only this layer. Negative numbers count from the last layer.
    score_threshold : float, optional
        Score below which a trace counts as a hallucination, or from which on in a store of
        hallucination scores. A stored label takes precedence. Default: 0.5, for scores in [0, 1];
        others need a threshold.
    attention_threshold : float
        Keep the pairs of tokens whose head-averaged attention is above this value as edges.
    dtype : str, optional
        "float32" converts x and edge_attr: for models with float32 weights. None keeps the stored
        dtype, usually float16.
    transform : callable, optional
        Applied to each Data on access.

    Raises
    ------
    MissingFieldError
        If the store has no graphs.
    UsageError
        If there is no such layer.

    Examples
    --------
    >>> from torch_geometric.loader import DataLoader
    >>> from tracestore.bridges.pyg import TraceGraphs
    >>> graphs = TraceGraphs("store.zarr", layer=-1, dtype="float32")
    >>> graphs
    TraceGraphs(12)
    >>> graphs[4].question_id
    'q4'
    >>> next(iter(DataLoader(graphs, batch_size=4))).num_graphs
    4
    """

    def __init__(
        self,
        store: "StoreLike",
        *,
        layer: int | None = None,
        score_threshold: float | None = None,
        attention_threshold: float = 0.0,
        dtype: str | None = None,
        transform: Callable[[Data], Any] | None = None,
    ) -> None:
        super().__init__(transform=transform)
        self._traces = TraceDataset(
            store, "graph", score_threshold=score_threshold, attention_threshold=attention_threshold, dtype=dtype
        )
        count = self._traces.store.num_layers
        if layer is not None and count and not -count <= layer < count:
            raise UsageError(f"found layer {layer}, expected {-count} to {count - 1}")
        self._layer = None if layer is None else layer % max(1, count)

    def len(self) -> int:
        """Return the number of graphs."""
        return len(self._traces) * (self._traces.store.num_layers if self._layer is None else 1)

    def get(self, idx: int) -> Data:
        """Return graph `idx`, before the transform."""
        store = self._traces.store
        trace, layer = divmod(idx, store.num_layers) if self._layer is None else (idx, self._layer)
        graph: Data = self._traces[trace][layer]
        graph.layer = layer
        return graph
