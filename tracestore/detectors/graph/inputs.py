"""Inputs of the graph models: the graphs of a batch, in the layout of the store."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from tracestore.data.batch import GraphBatch, TensorBatch

# node_ptr, weight, weight_ptr, source, target, threshold: the edge arguments of the operators in gine_op.
Edges = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, float]


def edge_threshold(attention_threshold: float, top_k: float | None) -> float:
    """Return the threshold above which a packed pair is an edge.

    With `top_k` the loader has set the other pairs to NaN, which no threshold admits.
    """
    return attention_threshold if top_k is None else -math.inf


@dataclass
class GraphInputs(TensorBatch):
    """The G = B L graphs of B traces and L layers, with N nodes in all.

    The edges are either packed or lists. Packed: the lower triangles of the attention matrices;
    a pair is an edge where its weight, or the mean of its weights, is above `threshold`. Lists:
    `edge_index` holds the edges.

    Parameters
    ----------
    x : torch.Tensor
        ``(N, D)`` hidden states in the stored dtype.
    node_ptr : torch.Tensor
        ``(G + 1,)`` int64, rows of x of each graph.
    weight : torch.Tensor
        Packed: ``(sum A,)``, with `edge_dim` triangles per graph one after the other. Lists: ``(E,)``.
    weight_ptr : torch.Tensor
        ``(G + 1,)`` int64, entries of weight of each graph.
    num_layers : int
        L.
    edge_index : torch.Tensor, optional
        ``(2, E)`` int64, source and target of each edge; None where the edges are packed.
    threshold : float
        For packed edges.
    edge_dim : int
        Weights per edge: 1, or the number of heads.
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
    def from_batch(cls, batch: GraphBatch, threshold: float = 0.0) -> "GraphInputs":
        """Return the inputs for a batch."""
        weight = batch.edge_attr if batch.attention is None else batch.attention
        assert weight is not None
        heads = batch.num_heads or 1
        return cls(
            batch.x, batch.ptr, weight.view(-1), batch.edge_ptr, batch.num_layers, batch.edge_index, threshold, heads
        )

    @property
    def num_traces(self) -> int:
        """Number of traces, B."""
        return (len(self.node_ptr) - 1) // self.num_layers

    def nodes_per_trace(self) -> list[int]:
        """Return the number of nodes of each trace, over all layers."""
        return self.node_ptr[:: self.num_layers].diff().tolist()

    def traces(self, begin: int, end: int) -> "GraphInputs":
        """Return the traces begin .. end: a micro-batch."""
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

    def select_layers(self, layers: Sequence[int]) -> "GraphInputs":
        """Return a copy of the graphs of some layers."""
        graphs = [t * self.num_layers + layer for t in range(self.num_traces) for layer in layers]
        node_ptr, weight_ptr = self.node_ptr.tolist(), self.weight_ptr.tolist()
        nodes, weights = ([slice(ptr[g], ptr[g + 1]) for g in graphs] for ptr in (node_ptr, weight_ptr))

        def pointers(slices: list[slice]) -> torch.Tensor:
            ends = accumulate((s.stop - s.start for s in slices), initial=0)
            return torch.tensor(list(ends), device=self.x.device)

        edge_index = None
        new_node_ptr = pointers(nodes)
        if self.edge_index is not None:
            moved = zip(weights, nodes, new_node_ptr.tolist(), strict=False)
            edge_index = torch.cat([self.edge_index[:, w] + (begin - n.start) for w, n, begin in moved], dim=1)
        return replace(
            self,
            x=torch.cat([self.x[s] for s in nodes]),
            node_ptr=new_node_ptr,
            weight=torch.cat([self.weight[s] for s in weights]),
            weight_ptr=pointers(weights),
            num_layers=len(layers),
            edge_index=edge_index,
        )

    def edges(self) -> Edges:
        """Return the edge arguments of the operators in gine_op."""
        source, target = (None, None) if self.edge_index is None else (self.edge_index[0], self.edge_index[1])
        return self.node_ptr, self.weight, self.weight_ptr, source, target, self.threshold

    def coo(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return edge_index (2, E) and weight (E, edge_dim) of all graphs, for PyG."""
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
