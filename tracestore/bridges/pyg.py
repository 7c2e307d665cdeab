"""A store as a PyTorch Geometric Dataset."""

import os
from typing import Any

from tracestore.errors import UsageError
from tracestore.extras import needs
from tracestore.store.read.store import TraceStore

with needs("bridges"):
    import torch
    from torch_geometric.data import Data, Dataset

    from tracestore.data.datasets import TraceDataset


class _Graph(Data):
    """PyG adds the number of nodes so far to whatever has "index" in its name."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 0 if key == "trace_index" else super().__inc__(key, value, *args, **kwargs)


class TraceGraphs(Dataset):
    """Each layer of each trace as a graph, for code that wants PyG's own Dataset and DataLoader.

    Graph k is layer k % L of trace k // L, or, where `layer` is given, that layer of trace k: Data
    with x (S, D), edge_index (2, E) from source j to target i, edge_attr (E, 1), y (1,) with 1 for
    hallucinated, score (1,), trace_index, layer and question_id. Read when they are asked for;
    TraceLoader makes the same batches several times as fast. MissingFieldError where the store has
    no graphs, UsageError for a layer that is not there.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | TraceStore,
        *,
        layer: int | None = None,
        score_threshold: float = 0.5,
        attention_threshold: float = 0.0,
        transform: Any = None,
    ) -> None:
        super().__init__(transform=transform)
        self._traces = TraceDataset(
            store, "graph", score_threshold=score_threshold, attention_threshold=attention_threshold
        )
        count = self._traces.store.num_layers
        if layer is not None and count and not -count <= layer < count:
            raise UsageError(f"found layer {layer}, expected {-count} to {count - 1}")
        self._layer = None if layer is None else layer % max(1, count)
        self._targets = self._traces.store.targets(score_threshold)

    def len(self) -> int:
        return len(self._traces) * (self._traces.store.num_layers if self._layer is None else 1)

    def get(self, idx: int) -> Data:
        store = self._traces.store
        trace, layer = divmod(idx, store.num_layers) if self._layer is None else (idx, self._layer)
        graph = _Graph.from_dict(self._traces[trace][layer].to_dict())
        graph.y = torch.tensor([self._targets[trace]], dtype=torch.float32)
        graph.score = torch.tensor([store.scores[trace]], dtype=torch.float32)
        graph.trace_index, graph.layer, graph.question_id = trace, layer, store.question_ids[trace]
        return graph
