"""Normalization of node features. Each class normalizes x (N, C), the nodes of the graphs of `GraphInputs`.

`LayerNorm` and `GraphNorm` compute statistics of one node or one graph, so that a batch that is split
gives the same result as the whole batch. `LayerBatchNorm` computes them over the batch.
"""

from typing import Any

import torch
from torch import nn

from tracestore.detectors.graph.inputs import GraphInputs

_EPS = 1e-5
_MOMENTUM = 0.1


def group_mean(x: torch.Tensor, group: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows of each group: x (N, C), group (N,), count (K,) -> (K, C)."""
    total = x.new_zeros(len(count), x.shape[1]).index_add(0, group, x)
    return total / count.clamp_min(1)[:, None].to(x.dtype)


class NoNorm(nn.Module):
    """The identity."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """Return x."""
        return x


class LayerNorm(nn.LayerNorm):
    """Normalize each node over its columns.

    References
    ----------
    Ba, Kiros and Hinton 2016, "Layer Normalization", arXiv:1607.06450, equation 3.
    """

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__(channels, _EPS)

    def forward(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:  # type: ignore[override]
        """Return the normalized x (N, C)."""
        return super().forward(x)


class GraphNorm(nn.Module):
    """Normalize each column over the nodes of a graph: gamma (x - alpha mean) / std + beta.

    References
    ----------
    Cai et al. 2021, "GraphNorm: A Principled Approach to Accelerating Graph Neural Network
    Training", arXiv:2009.03294, section 4.1. The names of the parameters are those of PyG.
    """

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.mean_scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """Return the normalized x (N, C)."""
        graph, count = inputs.graph_of_rows(), inputs.nodes_per_graph()
        centered = x - group_mean(x, graph, count)[graph] * self.mean_scale
        deviation = (group_mean(centered.square(), graph, count) + _EPS).sqrt()
        return self.weight * centered / deviation[graph] + self.bias


class LayerBatchNorm(nn.Module):
    """Normalize each column over the nodes of the batch, layer of the language model by layer.

    The statistics are those of the batch in training and running means in evaluation, as in
    ``torch.nn.BatchNorm1d``, but separate for each layer. A batch that is split has other
    statistics than the whole batch.

    References
    ----------
    Ioffe and Szegedy 2015, "Batch Normalization", arXiv:1502.03167, algorithm 1.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(num_layers, channels))
        self.register_buffer("running_var", torch.ones(num_layers, channels))

    def forward(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """Return the normalized x (N, C)."""
        layer = inputs.graph_of_rows() % inputs.num_layers
        mean, variance = self.running_mean, self.running_var
        if self.training:
            # On a GPU, the host would wait for bincount.
            count = torch.zeros_like(layer[:1]).repeat(len(mean)).index_add_(0, layer, torch.ones_like(layer))
            mean = group_mean(x, layer, count)
            variance = group_mean((x - mean[layer]).square(), layer, count)
            unbiased = variance * (count / (count - 1).clamp_min(1))[:, None].to(x.dtype)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), _MOMENTUM)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), _MOMENTUM)
        factor = self.weight / (variance + _EPS).sqrt()
        return (x - mean[layer]) * factor[layer] + self.bias


NORMALIZATIONS: dict[str, Any] = {"layer": LayerNorm, "graph": GraphNorm, "batch": LayerBatchNorm, "none": NoNorm}
