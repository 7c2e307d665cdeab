"""What the graph models read: the graphs of a batch, as the store keeps them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from tracestore.data.batch import GraphBatch

# node_ptr, weight, weight_ptr, source, target, threshold: how the operators of gine_op take edges.
Edges = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, float]


def edge_threshold(attention_threshold: float, top_k: float | None) -> float:
    """Above which packed pairs are edges: with top-k the loader has marked what it drops as
    NaN, which is above nothing."""
    return attention_threshold if top_k is None else -math.inf


@dataclass
class GraphInputs:
    """The graphs of B traces x L layers, G = B L in all, as the models read them.

    x (N, D) in the stored dtype; node_ptr (G + 1,). Packed: weight (sum A,), or with
    edge_dim = H of every head (sum H A,), with weight_ptr (G + 1,); pairs whose weight, or
    mean over the heads, is above `threshold` are edges. Otherwise edge_index (2, E),
    weight (E,) and weight_ptr the edges of each graph.
    """

    x: torch.Tensor
    node_ptr: torch.Tensor
    weight: torch.Tensor
    weight_ptr: torch.Tensor
    num_layers: int
    edge_index: torch.Tensor | None = None
    threshold: float = 0.0
    edge_dim: int = 1

    @classmethod
    def from_batch(cls, batch: Any, threshold: float = 0.0) -> "GraphInputs":
        """From a GraphBatch or PyG Batch of TraceLoader, edges "packed", "heads" or "coo"."""
        is_plain = isinstance(batch, GraphBatch)
        if getattr(batch, "attention", None) is not None:
            return cls(
                batch.x,
                batch.ptr,
                batch.attention,
                batch.edge_ptr if is_plain else batch.attention_ptr,
                batch.num_layers,
                threshold=threshold,
                edge_dim=batch.num_heads,
            )
        ptr = (batch.edge_ptr if is_plain else batch._slice_dict["edge_index"]).to(batch.x.device)
        return cls(batch.x, batch.ptr, batch.edge_attr.reshape(-1), ptr, batch.num_layers, batch.edge_index)

    @property
    def num_traces(self) -> int:
        return (len(self.node_ptr) - 1) // self.num_layers

    def nodes_of_traces(self) -> list[int]:
        """Nodes of each trace, over its layers."""
        return self.node_ptr[:: self.num_layers].diff().tolist()

    def to(self, device: torch.device | str) -> "GraphInputs":
        edge_index = None if self.edge_index is None else self.edge_index.to(device)
        x, node_ptr, weight, weight_ptr = (t.to(device) for t in (self.x, self.node_ptr, self.weight, self.weight_ptr))
        return replace(self, x=x, node_ptr=node_ptr, weight=weight, weight_ptr=weight_ptr, edge_index=edge_index)

    def traces(self, begin: int, end: int) -> "GraphInputs":
        """The traces begin .. end alone: the micro-batch of a split."""
        first, last = begin * self.num_layers, end * self.num_layers
        nodes, weights = self.node_ptr[first : last + 1], self.weight_ptr[first : last + 1]
        edge_index = None
        if self.edge_index is not None:
            edge_index = self.edge_index[:, int(weights[0]) : int(weights[-1])] - int(nodes[0])
        return replace(
            self,
            x=self.x[int(nodes[0]) : int(nodes[-1])],
            node_ptr=nodes - nodes[0],
            weight=self.weight[int(weights[0]) : int(weights[-1])],
            weight_ptr=weights - weights[0],
            edge_index=edge_index,
        )

    def of_layers(self, layers: Sequence[int]) -> "GraphInputs":
        """The graphs of some layers alone, which are copied."""
        graphs = [t * self.num_layers + layer for t in range(self.num_traces) for layer in layers]
        node_ptr, weight_ptr = self.node_ptr.tolist(), self.weight_ptr.tolist()
        nodes, weights = ([slice(ptr[g], ptr[g + 1]) for g in graphs] for ptr in (node_ptr, weight_ptr))

        def pointers(of: list[slice]) -> torch.Tensor:
            ends = accumulate((s.stop - s.start for s in of), initial=0)
            return torch.tensor(list(ends), device=self.x.device)

        edge_index = None
        chosen = pointers(nodes)
        if self.edge_index is not None:
            begins = zip(weights, nodes, chosen.tolist(), strict=False)
            edge_index = torch.cat([self.edge_index[:, w] + (at - n.start) for w, n, at in begins], dim=1)
        return replace(
            self,
            x=torch.cat([self.x[s] for s in nodes]),
            node_ptr=chosen,
            weight=torch.cat([self.weight[s] for s in weights]),
            weight_ptr=pointers(weights),
            num_layers=len(layers),
            edge_index=edge_index,
        )

    def edges(self) -> Edges:
        """The edges as the operators take them."""
        source, target = (None, None) if self.edge_index is None else (self.edge_index[0], self.edge_index[1])
        return self.node_ptr, self.weight, self.weight_ptr, source, target, self.threshold

    def coo(self) -> tuple[torch.Tensor, torch.Tensor]:
        """edge_index (2, E) and weight (E, edge_dim) of all graphs, for PyG."""
        if self.edge_index is not None:
            return self.edge_index, self.weight[:, None]
        sources, targets, weights = [], [], []
        for g in range(len(self.node_ptr) - 1):
            begin, size = int(self.node_ptr[g]), int(self.node_ptr[g + 1] - self.node_ptr[g])
            i, j = torch.tril_indices(size, size, device=self.x.device)
            a = self.weight[int(self.weight_ptr[g]) : int(self.weight_ptr[g + 1])].reshape(self.edge_dim, -1).t()
            keep = a.double().mean(1) > self.threshold
            sources.append(j[keep] + begin)
            targets.append(i[keep] + begin)
            weights.append(a[keep])
        return torch.stack([torch.cat(sources), torch.cat(targets)]), torch.cat(weights)
