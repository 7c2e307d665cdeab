"""Inputs of the graph models: the graphs of a batch, in the layout of the store."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch

from tracestore.data.batches.batch import GraphBatch, TensorBatch
from tracestore.data.batches.buffers import copy_together
from tracestore.detectors.graph.edges import Edges
from tracestore.detectors.graph.graph_index import GraphIndex
from tracestore.detectors.layers.model_config import ModelConfig


def expand_ranges(begin: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the integers of the ranges begin[k] .. begin[k] + count[k], one range after the other."""
    ends = count.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    shift = torch.repeat_interleave(begin - (ends - count), count, output_size=total)
    return torch.arange(total, device=begin.device) + shift


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
    answer : torch.Tensor, optional
        ``(B, 2)`` int64, first token of the answer of each trace and the one after its last. None:
        every token counts.
    layers : tuple of int, optional
        ``(L,)``, the layers of the language model that the graphs of each trace belong to. None: the first L.
    in_degree : torch.Tensor, optional
        ``(N,)`` int32, edges into each node, at least 1. Given where the edges that a detector ignores are removed.
    index : GraphIndex, optional
        Of the detector that the inputs are prepared for.
    """

    x: torch.Tensor
    node_ptr: torch.Tensor
    weight: torch.Tensor
    weight_ptr: torch.Tensor
    num_layers: int
    edge_index: torch.Tensor | None = None
    threshold: float = 0.0
    edge_dim: int = 1
    answer: torch.Tensor | None = None
    layers: tuple[int, ...] | None = None
    in_degree: torch.Tensor | None = None
    index: GraphIndex | None = None

    @classmethod
    def from_batch(
        cls,
        batch: GraphBatch,
        threshold: float = 0.0,
        answer: torch.Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> "GraphInputs":
        """Return the inputs for a batch, which holds all layers or those of the loader's option `layers`."""
        weight = batch.edge_attr if batch.attention is None else batch.attention
        assert weight is not None
        edges = weight.view(-1), batch.edge_ptr, batch.num_layers, batch.edge_index, threshold, batch.num_heads or 1
        return cls(batch.x, batch.ptr, *edges, answer, None if layers is None else tuple(layers), batch.in_degree)

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:
        """Return the inputs on a device. From the host to a GPU, all tensors but the large ones are copied at once."""
        device = torch.device(device)
        if device.type == "cpu" or self.x.device.type != "cpu":
            return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if self.index is not None and self.edge_index is not None:
            # Edge lists are checked where they are used.
            return replace(self, index=None).to(device, non_blocking=non_blocking)
        large = {id(self.x), id(self.weight), id(self.edge_index)}
        small = [tensor for tensor in self.tensors() if id(tensor) not in large]
        copies = iter(copy_together(small, device, non_blocking=non_blocking))
        return self._map(
            lambda tensor: tensor.to(device, non_blocking=non_blocking) if id(tensor) in large else next(copies)
        )

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        moved = super()._map(function)
        return moved if self.index is None else replace(moved, index=self.index._map(function))

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, in the order of `_map`."""
        values = (value for part in (self, self.index) if part for value in vars(part).values())
        return [value for value in values if isinstance(value, torch.Tensor)]

    def prepare(self, config: ModelConfig) -> "GraphInputs":
        """Return the inputs with all that the encoder of a detector derives from lengths, layers and masks.

        Prepared inputs are returned unchanged. Pointers and edges are checked here.

        Parameters
        ----------
        config : ModelConfig
            Of the detector.

        Raises
        ------
        ValueError
            The inputs are prepared for another detector, or pointers or edges are out of bounds.
        """
        if self.index is not None:
            if self.index.config != config:
                raise ValueError("the inputs are prepared for another detector")
            return self
        inputs = self
        if config.edges:
            # On a CPU, the C core checks the edges of lists in each call.
            self.edges().check(len(self.x), self.edge_dim, lists=self.x.device.type != "cpu")
            if self.in_degree is None:
                masks = {"diagonal": config.mask_diagonal, "sinks": config.mask_sinks, "neighbors": config.neighbors}
                inputs = self.mask_edges(**masks)  # type: ignore[arg-type]
                if config.aggregation == "mean" and config.message_passing == "fused":
                    inputs = replace(inputs, in_degree=inputs.count_edges())
        ptr = self.node_ptr.cpu().numpy()
        answer = None if self.answer is None else self.answer.cpu().numpy().reshape(-1, 2)
        index = GraphIndex.build(config, ptr - ptr[0], answer, self.held_layers)
        if self.x.device.type != "cpu":
            index = index.to(self.x.device)
        return replace(inputs, index=index)

    @property
    def held_layers(self) -> tuple[int, ...]:
        """The layers of the language model that the graphs of each trace belong to."""
        return tuple(range(self.num_layers)) if self.layers is None else self.layers

    @property
    def num_traces(self) -> int:
        """Number of traces, B."""
        return (len(self.node_ptr) - 1) // self.num_layers

    def nodes_per_graph(self) -> torch.Tensor:
        """Return the number of nodes of each graph, (G,)."""
        return self.node_ptr.diff() if self.index is None else self.index.sizes

    def traces(self, begin: int, end: int) -> "GraphInputs":
        """Return the traces begin .. end: a micro-batch, prepared if these inputs are."""
        first, last = begin * self.num_layers, end * self.num_layers
        nodes, weights = self.node_ptr[first : last + 1], self.weight_ptr[first : last + 1]
        edge_index = None
        if self.edge_index is not None:
            edge_index = self.edge_index[:, int(weights[0]) : int(weights[-1])] - int(nodes[0])
        rows = slice(int(nodes[0]), int(nodes[-1]))
        part = replace(
            self,
            x=self.x[rows],
            node_ptr=nodes - nodes[0],
            weight=self.weight[int(weights[0]) : int(weights[-1])],
            weight_ptr=weights - weights[0],
            edge_index=edge_index,
            answer=None if self.answer is None else self.answer[begin:end],
            in_degree=None if self.in_degree is None else self.in_degree[rows],
            index=None,
        )
        return part if self.index is None else part.prepare(self.index.config)

    def edges(self, *, mean: bool = False) -> Edges:
        """Return the edge arguments of the operators in gine_op, for sums of messages or for their means."""
        source, target = (None, None) if self.edge_index is None else (self.edge_index[0], self.edge_index[1])
        degree = (self.count_edges() if self.in_degree is None else self.in_degree) if mean else None
        graph, ptr = (None, None) if self.index is None else (self.index.graph, self.index.ptr)
        return Edges(self.node_ptr, self.weight, self.weight_ptr, source, target, self.threshold, degree, graph, ptr)

    def coo(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return edge_index (2, E) and weight (E, edge_dim) of all graphs, for PyG."""
        if self.edge_index is not None:
            return self.edge_index, self.weight[:, None]
        pairs = self._pairs()
        keep = pairs.mean > self.threshold
        position, target, spacing = pairs.position[keep], pairs.target[keep], pairs.spacing[keep]
        channels = torch.arange(self.edge_dim, device=self.x.device)
        weight = self.weight[position[:, None] + channels * spacing[:, None]]
        return torch.stack([pairs.source[keep], target]) + self.node_ptr[0], weight

    def graph_of_rows(self) -> torch.Tensor:
        """Return the graph of each row of x, (N,)."""
        if self.index is not None:
            return self.index.graph
        graphs = torch.arange(len(self.node_ptr) - 1, device=self.x.device)
        return torch.repeat_interleave(graphs, self.node_ptr.diff(), output_size=len(self.x))

    def count_edges(self) -> torch.Tensor:
        """Return the number of edges into each node, (N,) int32; 1 for a node without edges."""
        if self.edge_index is not None:
            degree = torch.bincount(self.edge_index[1] - self.node_ptr[0], minlength=len(self.x))
        elif self.edge_dim == 1:
            # The pairs of a node are consecutive, so that their edges are the difference of two running counts.
            begin, count = self._pair_ranges()
            edges = torch.cat([begin.new_zeros(1), (self.weight.double() > self.threshold).cumsum(0)])
            degree = edges[begin + count] - edges[begin]
        else:
            pairs = self._pairs()
            degree = torch.bincount(pairs.target[pairs.mean > self.threshold], minlength=len(self.x))
        return degree.clamp_min(1).int()

    def mask_edges(self, *, diagonal: bool = False, sinks: int = 0, neighbors: int | None = None) -> "GraphInputs":
        """Return the same graphs without some edges. The weights are copied if any are masked.

        Parameters
        ----------
        diagonal : bool
            Remove the edges of a token to itself.
        sinks : int
            Remove the edges from the first tokens of each graph, which are attention sinks (Xiao et
            al. 2024, "Efficient Streaming Language Models with Attention Sinks").
        neighbors : int, optional
            Keep so many of the other edges into each token, those with the largest weights. Ties keep
            the earlier edge.
        """
        if not diagonal and sinks == 0 and neighbors is None:
            return self
        if self.edge_index is None and neighbors is None:
            # The first channel suffices: the mean over channels is NaN then, which is never an edge.
            weight = self.weight.clone()
            begin, count = self._pair_ranges()
            if diagonal:
                weight[begin + count - 1] = torch.nan
            for k in range(sinks):
                weight[begin[count > k] + k] = torch.nan
            return replace(self, weight=weight)
        if self.edge_index is None:
            pairs = self._pairs()
            source, target, value = pairs.source, pairs.target, pairs.mean
            kept = value > self.threshold
        else:
            source, target = self.edge_index - self.node_ptr[0]
            value, kept = self.weight, torch.ones_like(self.weight, dtype=torch.bool)
        first = (self.node_ptr[:-1] - self.node_ptr[0])[self.graph_of_rows()]
        if diagonal:
            kept &= source != target
        kept &= source - first[source] >= sinks
        if neighbors is not None:
            kept &= _rank_in_row(target, value.masked_fill(~kept, -torch.inf), len(self.x)) < neighbors
        if self.edge_index is None:
            return replace(self, weight=self.weight.index_fill(0, pairs.position[~kept], torch.nan))
        counts = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
        weight_ptr = counts[self.weight_ptr - self.weight_ptr[0]]
        return replace(
            self, weight=self.weight[kept], weight_ptr=weight_ptr, edge_index=self.edge_index[:, kept].contiguous()
        )

    def _pair_ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the position in `weight` of the first pair of each node, and the number of its pairs."""
        graph = self.graph_of_rows()
        local = torch.arange(len(self.x), device=self.x.device) - (self.node_ptr[:-1] - self.node_ptr[0])[graph]
        return self.weight_ptr[:-1][graph] + local * (local + 1) // 2, local + 1

    def _pairs(self) -> "_Pairs":
        """Return all stored pairs of packed graphs."""
        begin, count = self._pair_ranges()
        position = expand_ranges(begin, count)
        rows = torch.arange(len(self.x), device=self.x.device)
        target = torch.repeat_interleave(rows, count, output_size=len(position))
        source = target - (count + begin - 1)[target] + position
        sizes = self.node_ptr.diff()
        spacing = (sizes * (sizes + 1) // 2)[self.graph_of_rows()[target]]
        mean = self.weight[position].double()
        if self.edge_dim > 1:
            channels = torch.arange(self.edge_dim, device=self.x.device)
            mean = self.weight[position[:, None] + channels * spacing[:, None]].double().mean(1)
        return _Pairs(position, source, target, spacing, mean)


class _Pairs(NamedTuple):
    """The pairs of packed graphs, row after row.

    `position` is the place of the first channel in `weight`, `source` and `target` are rows of x,
    `spacing` is the distance between channels, and `mean` their mean.
    """

    position: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    spacing: torch.Tensor
    mean: torch.Tensor


def _rank_in_row(row: torch.Tensor, value: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the rank of each value among those of the same row, from 0 for the largest."""
    order = torch.argsort(value, descending=True, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    count = torch.bincount(row, minlength=num_rows)
    first = count.cumsum(0) - count
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=row.device) - first[row[order]]
    return rank
