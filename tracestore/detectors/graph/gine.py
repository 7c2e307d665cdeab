"""GINE layers: the fused operators, which are checked once on each device, or PyG's layer as the reference."""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tracestore.detectors.graph.gine_op import gine_linear
from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.layers.model_config import FUSED_DEVICES, Aggregation, MessagePassing
from tracestore.detectors.layers.precision import kernel_works
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


_TOLERANCE = 1e-3


@functools.cache
def fused_kernels_work(device: torch.device) -> bool:
    """Return whether the fused operator may run on a GPU.

    The kernels of `gine_triton` aggregate small graphs. If they fail, or if sums or gradients differ from
    those of plain indexing, a warning is given, and graph models use the plain operator in this process.

    Raises
    ------
    torch.OutOfMemoryError
        The GPU has no memory for the small graphs. The next call compares again.
    """

    def check() -> str | None:
        from tracestore.detectors.graph import gine_triton

        largest = max(kernel_error(gine_triton, inputs) for inputs in _examples(device))
        is_near = largest <= _TOLERANCE
        return None if is_near else f"differ from the plain operator by {largest:.1e} of the largest value"

    return kernel_works("the fused kernels", device, check, "graph models use the plain operator")


def _examples(device: torch.device) -> list[GraphInputs]:
    """Return three small graphs as triangles, triangles of three heads, and lists; the values are fixed."""
    sizes, dim = torch.tensor([1, 19, 6]), 131
    pairs = sizes * (sizes + 1) // 2
    node_ptr, weight_ptr = (torch.cat([n.new_zeros(1), n.cumsum(0)]) for n in (sizes, pairs))
    x = torch.sin(torch.arange(int(sizes.sum()) * dim).float()).view(-1, dim).half()
    weight = torch.cos(torch.arange(3 * int(pairs.sum())).float()).abs().half()
    one = GraphInputs(x, node_ptr, weight[: int(pairs.sum())], weight_ptr, 1, threshold=0.3)
    heads = GraphInputs(x, node_ptr, weight, weight_ptr * 3, 1, threshold=0.3, edge_dim=3)
    edge_index, attr = one.coo()
    counts = torch.bincount(one.graph_of_rows()[edge_index[1]], minlength=len(sizes))
    list_ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    lists = GraphInputs(x, node_ptr, attr[:, 0], list_ptr, 1, edge_index)
    return [inputs.to(device) for inputs in (one, heads, lists)]


def kernel_error(kernels: Any, inputs: GraphInputs) -> float:
    """Return the largest difference between the sums and gradients of kernels and those of plain indexing.

    It is relative to the largest value of each.

    Parameters
    ----------
    kernels : module
        With `aggregate` and `aggregate_backward`, such as `gine_cpu`.
    inputs : GraphInputs
    """
    x, device, dim = inputs.x, inputs.x.device, inputs.x.shape[1]
    w = torch.cos(torch.arange(inputs.edge_dim * dim, device=device).float()).view(-1, dim)
    b = torch.sin(torch.arange(dim, device=device).float() / 7)
    grad = torch.sin(torch.arange(x.numel(), device=device).float() / 3).view(x.shape)
    out, grad_x = torch.empty_like(grad), torch.empty_like(grad)
    kernels.aggregate(out, x, w, b, inputs.edges())
    found = [out, grad_x, *kernels.aggregate_backward(grad, x, w, b, inputs.edges(), grad_x)]
    with torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_() for t in (x.float(), w, b)]
        (source, target), weight = inputs.coo()
        messages = (leaves[0][source] + weight.float() @ leaves[1] + leaves[2]).relu()
        plain = leaves[0].index_add(0, target, messages)
        expected = [plain.detach(), *torch.autograd.grad(plain, leaves, grad)]
    errors = [(p - q).abs().max() / q.abs().max() for p, q in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())
