"""GINE layers: the fused operators, or PyG's layer as the reference."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tracestore.detectors.config import FUSED_DEVICES, MessagePassing
from tracestore.detectors.graph.gine_op import gine_linear
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.extras import needs


def mean_pool(x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
    """Return the mean over the nodes of each graph: (N, C) -> (G, C)."""
    lengths = inputs.node_ptr[1:] - inputs.node_ptr[:-1]
    # segment_reduce sums in the dtype of x, and a bfloat16 sum of ones stops growing at 256.
    wide = x.float() if x.dtype.itemsize < 4 else x
    return torch.segment_reduce(wide, "mean", lengths=lengths, axis=0, unsafe=True).to(x.dtype)


class PlainGINEConv(nn.Module):
    """GINEConv without the import of PyG, which takes seconds.

    Parameter names, and the initial values for a seed, are those of PyG's class. `forward` is
    used on devices without the fused operators.
    """

    def __init__(self, mlp: nn.Sequential, in_channels: int, edge_dim: int) -> None:
        super().__init__()
        self.nn = mlp
        self.register_buffer("eps", torch.zeros(1))
        self.lin = nn.Linear(edge_dim, in_channels)
        # GINEConv initializes all parameters a second time at the end of its constructor.
        for layer in mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        self.lin.reset_parameters()

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        """Return x' (N, hidden) for x (N, in), edge_index (2, E) and edge_attr (E, edge_dim)."""
        source, target = edge_index
        out: torch.Tensor = self.nn(x.index_add(0, target, F.relu(x[source] + self.lin(edge_attr))))
        return out


class GINE(nn.Module):
    """x_i' = MLP(x_i + sum over edges j -> i of relu(x_j + W a_ij + b)), eps = 0.

    Parameter names are those of PyG's GINEConv, so that weights can be exchanged.

    Parameters
    ----------
    in_channels, hidden : int
        The MLP is Linear(in_channels -> hidden), ReLU, Linear(hidden -> hidden).
    message_passing : {"fused", "pyg"}
    edge_dim : int
        Weights per edge: 1, or the number of heads.

    References
    ----------
    Hu et al. 2020, "Strategies for Pre-training Graph Neural Networks", as implemented by
    ``torch_geometric.nn.GINEConv``.
    """

    def __init__(
        self, in_channels: int, hidden: int, message_passing: MessagePassing = "fused", edge_dim: int = 1
    ) -> None:
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

    def _hidden(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """Return the aggregate after the first linear layer and the ReLU of the MLP, (N, hidden)."""
        first, edge = self.conv.nn[0], self.conv.lin
        matrix, bias = first.weight, first.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            matrix, bias = matrix.to(dtype), bias.to(dtype)
        return F.relu_(gine_linear(x, edge.weight.t(), edge.bias, matrix, bias, *inputs.edges()))

    def forward(self, x: torch.Tensor, inputs: GraphInputs, *, pooled: bool = False) -> torch.Tensor:
        """Return x' (N, hidden) for x (N, in) of any float dtype, or its mean over the nodes of each graph (G, hidden).

        The mean and the last layer of the MLP are both linear. The fused path takes the mean
        first, so that the last layer computes G rows instead of N.
        """
        if self.message_passing == "fused" and x.device.type in FUSED_DEVICES:
            hidden = self._hidden(x, inputs)
            out: torch.Tensor = self.conv.nn[2](mean_pool(hidden, inputs) if pooled else hidden)
            return out
        edge_index, weight = inputs.coo()
        dtype = self.conv.lin.weight.dtype
        out = self.conv(x.to(dtype), edge_index, weight.to(dtype))
        return mean_pool(out, inputs) if pooled else out
