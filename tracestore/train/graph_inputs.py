"""What the graph models read: the graphs of a batch, as the store keeps them."""

import math
from dataclasses import dataclass, replace

import torch
from torch_geometric.data import Batch

from tracestore.errors import MissingFieldError
from tracestore.store.reader import TraceStore

# node_ptr, weight, weight_ptr, source, target, threshold: how the operators of gine_op take edges.
Edges = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, float]


def edge_form(store: TraceStore, device: torch.device, edge_dim: int = 1) -> str:
    """The form in which TraceLoader brings edges to a model on `device`: "packed" or "coo", or
    "heads" where an edge has edge_dim weights. MissingFieldError where the store has not so many."""
    if edge_dim > 1:
        if store.heads_stored != edge_dim or store.attention_layout != "causal":
            raise MissingFieldError(
                f"{store.path}: the model reads causal attention of {edge_dim} heads, this store has "
                f"{store.attention_layout} attention, attention {store.attention!r}; convert with --attention heads"
            )
        return "heads"
    return "packed" if store.attention_layout == "causal" and device.type == "cpu" else "coo"


def _slices(ptr: torch.Tensor, graphs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ptr[g] .. ptr[g + 1] of the chosen graphs are, one behind the other, and the pointers then."""
    sizes = (ptr[1:] - ptr[:-1])[graphs]
    chosen = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    shift = ptr[:-1][graphs] - chosen[:-1]
    return torch.arange(int(chosen[-1]), device=ptr.device) + torch.repeat_interleave(shift, sizes), chosen


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
    def from_batch(cls, batch: Batch, threshold: float = 0.0) -> "GraphInputs":
        """From a batch of TraceLoader, edges "packed", "heads" or "coo"."""
        if "attention" in batch:
            return cls(
                batch.x,
                batch.ptr,
                batch.attention,
                batch.attention_ptr,
                batch.num_layers,
                threshold=threshold,
                edge_dim=batch.num_heads,
            )
        ptr = batch._slice_dict["edge_index"].to(batch.x.device)
        return cls(batch.x, batch.ptr, batch.edge_attr.reshape(-1), ptr, batch.num_layers, batch.edge_index)

    @property
    def num_traces(self) -> int:
        return (len(self.node_ptr) - 1) // self.num_layers

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

    def of_layers(self, layers: torch.Tensor) -> "GraphInputs":
        """The graphs of some layers (n,) int64 alone, which are copied."""
        of_trace = torch.arange(self.num_traces, device=layers.device) * self.num_layers
        graphs = (of_trace[:, None] + layers).flatten()
        rows, node_ptr = _slices(self.node_ptr, graphs)
        entries, weight_ptr = _slices(self.weight_ptr, graphs)
        edge_index = None
        if self.edge_index is not None:
            moved = self.node_ptr[:-1][graphs] - node_ptr[:-1]
            edge_index = self.edge_index[:, entries] - torch.repeat_interleave(moved, weight_ptr.diff())
        return replace(
            self,
            x=self.x[rows],
            node_ptr=node_ptr,
            weight=self.weight[entries],
            weight_ptr=weight_ptr,
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
