"""GINE layers: the fused operators, or PyG's layer as the reference."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tracestore.detectors.graph.gine_op import gine_linear
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.graph.self_check import fused_kernels_work
from tracestore.detectors.layers.model_config import FUSED_DEVICES, Aggregation, MessagePassing
from tracestore.extras import needs


def is_fused(device: torch.device) -> bool:
    """Return whether a device has the fused operator. On a GPU, its kernels are compared with the plain one first."""
    return device.type in FUSED_DEVICES and (device.type == "cpu" or fused_kernels_work(device))


def mean_pool(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the means over consecutive rows: x (N, C), of which lengths (G,) belong together -> (G, C)."""
    # segment_reduce sums in the dtype of x, and a bfloat16 sum of ones stops growing at 256.
    wide = x.float() if x.dtype.itemsize < 4 else x
    return torch.segment_reduce(wide, "mean", lengths=lengths, axis=0, unsafe=True).to(x.dtype)


class PlainGINEConv(nn.Module):
    """GINEConv without the import of PyG, which takes seconds.

    Parameter names, and the initial values for a seed, are those of PyG's class. `forward` is
    used on devices without the fused operators.
    """

    def __init__(self, mlp: nn.Sequential, in_channels: int, edge_dim: int, aggregation: Aggregation) -> None:
        super().__init__()
        self.nn, self.aggregation = mlp, aggregation
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
        messages = F.relu(x[source] + self.lin(edge_attr))
        if self.aggregation == "mean":
            degree = torch.bincount(target, minlength=len(x))
            messages = messages / degree[target, None].to(messages.dtype)
        out: torch.Tensor = self.nn(x.index_add(0, target, messages))
        return out


class GINE(nn.Module):
    """x_i' = MLP(x_i + sum over edges j -> i of relu(x_j + W a_ij + b)), eps = 0; or their mean.

    Parameter names are those of PyG's GINEConv, so that weights can be exchanged.

    Parameters
    ----------
    in_channels, hidden : int
        The MLP is Linear(in_channels -> hidden), ReLU, Linear(hidden -> hidden).
    message_passing : {"fused", "pyg"}
    edge_dim : int
        Weights per edge: 1, or the number of heads. 0: no edges, x_i' = MLP(x_i).
    aggregation : {"sum", "mean"}

    References
    ----------
    Hu et al. 2020, "Strategies for Pre-training Graph Neural Networks", as implemented by
    ``torch_geometric.nn.GINEConv`` with this ``aggr``.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        message_passing: MessagePassing = "fused",
        edge_dim: int = 1,
        aggregation: Aggregation = "sum",
    ) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(in_channels, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.conv: Any
        if edge_dim == 0:
            self.conv = nn.ModuleDict({"nn": mlp})
        elif message_passing == "pyg":
            with needs("train"):
                from torch_geometric.nn import GINEConv

            self.conv = GINEConv(mlp, edge_dim=edge_dim, aggr=aggregation)
        else:
            self.conv = PlainGINEConv(mlp, in_channels, edge_dim, aggregation)
        self.message_passing, self.edge_dim, self.aggregation = message_passing, edge_dim, aggregation

    def _hidden(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """Return the aggregate after the first linear layer and the ReLU of the MLP, (N, hidden)."""
        first, edge = self.conv.nn[0], self.conv.lin
        matrix, bias = first.weight, first.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            matrix, bias = matrix.to(dtype), bias.to(dtype)
        edges = inputs.edges(mean=self.aggregation == "mean")
        return F.relu_(gine_linear(x, edge.weight.t(), edge.bias, matrix, bias, *edges))

    def forward(self, x: torch.Tensor, inputs: GraphInputs, *, pooled: bool = False) -> torch.Tensor:
        """Return x' (N, hidden) for x (N, in) of any float dtype, or its mean over the nodes of each graph (G, hidden).

        The mean and the last layer of the MLP are both linear. The fused path takes the mean
        first, so that the last layer computes G rows instead of N.

        Parameters
        ----------
        x : torch.Tensor
        inputs : GraphInputs
        pooled : bool
        """
        if self.edge_dim == 0:
            mlp = self.conv["nn"]
            out: torch.Tensor = mlp(x.to(mlp[0].weight.dtype))
            return mean_pool(out, inputs.nodes_per_graph()) if pooled else out
        if self.message_passing == "fused" and is_fused(x.device):
            hidden = self._hidden(x, inputs)
            out = self.conv.nn[2](mean_pool(hidden, inputs.nodes_per_graph()) if pooled else hidden)
            return out
        edge_index, weight = inputs.coo()
        dtype = self.conv.lin.weight.dtype
        out = self.conv(x.to(dtype), edge_index, weight.to(dtype))
        return mean_pool(out, inputs.nodes_per_graph()) if pooled else out
