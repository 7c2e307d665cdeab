"""GINE over a batch of graphs: the fused operators, or PyG's layer as the reference.

x_i' = MLP(x_i + sum over edges j -> i of relu(x_j + W a_ij + b)): Hu et al. 2020,
"Strategies for Pre-training Graph Neural Networks", as PyG's GINEConv with eps = 0.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tracestore.detectors.config import FUSED_DEVICES
from tracestore.detectors.graph.gine_op import gine_linear
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.extras import needs


def mean_pool(x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
    """(N, C) -> (G, C): the mean over each graph's nodes."""
    lengths = inputs.node_ptr[1:] - inputs.node_ptr[:-1]
    # It sums in the dtype of x: in bfloat16 a sum of like numbers stops growing at 256 of them.
    wide = x.float() if x.dtype.itemsize < 4 else x
    return torch.segment_reduce(wide, "mean", lengths=lengths, axis=0, unsafe=True).to(x.dtype)


class PlainGINEConv(nn.Module):
    """PyG's GINEConv without the import of PyG, which takes seconds: the same parameter names, and
    the same values drawn for a seed. Its forward is for devices that have no fused operators."""

    def __init__(self, mlp: nn.Sequential, in_channels: int, edge_dim: int) -> None:
        super().__init__()
        self.nn = mlp
        self.register_buffer("eps", torch.zeros(1))
        self.lin = nn.Linear(edge_dim, in_channels)
        # GINEConv draws all of them again when it is whole.
        for layer in mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        self.lin.reset_parameters()

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        source, target = edge_index
        out: torch.Tensor = self.nn(x.index_add(0, target, F.relu(x[source] + self.lin(edge_attr))))
        return out


class GINE(nn.Module):
    """GINEConv(MLP(in -> hidden -> hidden), edge_dim) with PyG's parameter names, so
    that weights go from one to the other. message_passing: "fused" or "pyg"; edge_dim:
    weights of an edge, 1 or every head's."""

    def __init__(self, in_channels: int, hidden: int, message_passing: str = "fused", edge_dim: int = 1) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(in_channels, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.conv: Any
        if message_passing == "pyg":
            with needs("train"):
                from torch_geometric.nn import GINEConv

            self.conv = GINEConv(mlp, edge_dim=edge_dim)
        else:
            self.conv = PlainGINEConv(mlp, in_channels, edge_dim)
        self.message_passing = message_passing

    def _is_fused(self, x: torch.Tensor) -> bool:
        return self.message_passing == "fused" and x.device.type in FUSED_DEVICES

    def _hidden(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """(N, hidden): the MLP up to its ReLU."""
        first, edge = self.conv.nn[0], self.conv.lin
        matrix, bias = first.weight, first.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            matrix, bias = matrix.to(dtype), bias.to(dtype)
        return F.relu_(gine_linear(x, edge.weight.t(), edge.bias, matrix, bias, *inputs.edges()))

    def _reference(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        edge_index, weight = inputs.coo()
        dtype = self.conv.lin.weight.dtype
        out: torch.Tensor = self.conv(x.to(dtype), edge_index, weight.to(dtype))
        return out

    def forward(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """(N, in), any float dtype -> (N, hidden)."""
        if not self._is_fused(x):
            return self._reference(x, inputs)
        return self._last(self._hidden(x, inputs))

    def pooled(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """The mean of forward over each graph's nodes: (N, in) -> (G, hidden).

        The mean and the MLP's last layer are both linear: fused, the mean comes first, and
        the layer works on G rows instead of N."""
        if not self._is_fused(x):
            return mean_pool(self._reference(x, inputs), inputs)
        return self._last(mean_pool(self._hidden(x, inputs), inputs))

    def _last(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer of the MLP."""
        out: torch.Tensor = self.conv.nn[2](hidden)
        return out
