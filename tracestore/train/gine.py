"""GINE over a batch of graphs: the fused aggregation on the CPU, PyG's elsewhere.

x_i' = MLP(x_i + sum over edges j -> i of relu(x_j + W a_ij + b)): Hu et al. 2020,
"Strategies for Pre-training Graph Neural Networks", as PyG's GINEConv with eps = 0.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import GINEConv

from tracestore._core.gine import Graphs
from tracestore.store import schema

_CODES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def _raw(tensor: torch.Tensor) -> Any:
    """A numpy array over the tensor's bytes, which C reads by the dtype's code."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@dataclass
class GraphInputs:
    """The graphs of B traces x L layers, G = B L in all, as the models read them.

    x (N, D) in the stored dtype; node_ptr (G + 1,). Packed: weight (sum A,) with
    weight_ptr (G + 1,), pairs above `threshold` are edges. Otherwise edge_index
    (2, E), weight (E,) and weight_ptr the edges of each graph.
    """

    x: torch.Tensor
    node_ptr: torch.Tensor
    weight: torch.Tensor
    weight_ptr: torch.Tensor
    num_layers: int
    edge_index: torch.Tensor | None = None
    threshold: float = 0.0
    _graphs: Graphs | None = field(default=None, repr=False)

    @classmethod
    def from_batch(cls, batch: Batch, threshold: float = 0.0) -> "GraphInputs":
        """From a batch of TraceLoader, edges "packed" or "coo"."""
        if "attention" in batch:
            return cls(batch.x, batch.ptr, batch.attention, batch.attention_ptr, batch.num_layers, threshold=threshold)
        ptr = batch._slice_dict["edge_index"].to(batch.x.device)
        return cls(batch.x, batch.ptr, batch.edge_attr.reshape(-1), ptr, batch.num_layers, batch.edge_index)

    @property
    def num_traces(self) -> int:
        return (len(self.node_ptr) - 1) // self.num_layers

    def to(self, device: torch.device | str) -> "GraphInputs":
        edge_index = None if self.edge_index is None else self.edge_index.to(device)
        x, node_ptr, weight, weight_ptr = (t.to(device) for t in (self.x, self.node_ptr, self.weight, self.weight_ptr))
        return GraphInputs(x, node_ptr, weight, weight_ptr, self.num_layers, edge_index, self.threshold)

    def traces(self, begin: int, end: int) -> "GraphInputs":
        """The traces begin .. end alone: the micro-batch of a split."""
        first, last = begin * self.num_layers, end * self.num_layers
        nodes, weights = self.node_ptr[first : last + 1], self.weight_ptr[first : last + 1]
        edge_index = None
        if self.edge_index is not None:
            edge_index = self.edge_index[:, int(weights[0]) : int(weights[-1])] - int(nodes[0])
        return GraphInputs(
            self.x[int(nodes[0]) : int(nodes[-1])],
            nodes - nodes[0],
            self.weight[int(weights[0]) : int(weights[-1])],
            weights - weights[0],
            self.num_layers,
            edge_index,
            self.threshold,
        )

    def graphs(self) -> Graphs:
        """The edges as the C core reads them, checked once a batch."""
        if self._graphs is None:
            code = schema.dtype_code(_CODES[self.weight.dtype])
            nodes, weights = self.node_ptr.contiguous().numpy(), self.weight_ptr.contiguous().numpy()
            if self.edge_index is None:
                self._graphs = Graphs(nodes, weights, _raw(self.weight), code, self.threshold)
            else:
                source, target = (row.contiguous().numpy() for row in self.edge_index)
                self._graphs = Graphs(nodes, weights, _raw(self.weight), code, 0.0, source, target)
        return self._graphs

    def has_edges(self) -> bool:
        return self.edge_index is None or self.edge_index.shape[1] > 0

    def coo(self) -> tuple[torch.Tensor, torch.Tensor]:
        """edge_index (2, E) and weight (E,) of all graphs, for PyG."""
        if self.edge_index is not None:
            return self.edge_index, self.weight
        sources, targets, weights = [], [], []
        for g in range(len(self.node_ptr) - 1):
            begin, size = int(self.node_ptr[g]), int(self.node_ptr[g + 1] - self.node_ptr[g])
            i, j = torch.tril_indices(size, size, device=self.x.device)
            a = self.weight[int(self.weight_ptr[g]) : int(self.weight_ptr[g + 1])]
            keep = a.double() > self.threshold
            sources.append(j[keep] + begin)
            targets.append(i[keep] + begin)
            weights.append(a[keep])
        return torch.stack([torch.cat(sources), torch.cat(targets)]), torch.cat(weights)


class _FusedAggregation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, graphs: Graphs) -> torch.Tensor:
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        out = torch.empty_like(x)
        graphs.forward(x.detach().numpy(), w.detach().numpy(), b.detach().numpy(), out.numpy(), torch.get_num_threads())
        ctx.save_for_backward(x, w, b)
        ctx.graphs = graphs
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, None]:
        x, w, b = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w, grad_b = torch.empty_like(w), torch.empty_like(b)
        workspace = x.new_empty((max(1, ctx.graphs.workspace_rows()), 2 * x.shape[1]))
        ctx.graphs.backward(
            x.detach().numpy(),
            w.detach().numpy(),
            b.detach().numpy(),
            grad_out.numpy(),
            None if grad_x is None else grad_x.numpy(),
            grad_w.numpy(),
            grad_b.numpy(),
            workspace.numpy(),
            torch.get_num_threads(),
        )
        return grad_x, grad_w, grad_b, None


class GINE(nn.Module):
    """GINEConv(MLP(in -> hidden -> hidden), edge_dim=1) with PyG's parameter names, so
    that weights go from one to the other. message_passing: "fused" or "pyg"."""

    def __init__(self, in_channels: int, hidden: int, message_passing: str = "fused") -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(in_channels, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.conv = GINEConv(mlp, edge_dim=1)
        self.message_passing = message_passing

    def forward(self, x: torch.Tensor, inputs: GraphInputs) -> torch.Tensor:
        """(N, in) -> (N, hidden)."""
        fused = self.message_passing == "fused" and x.device.type == "cpu"
        if fused and inputs.has_edges():
            lin = self.conv.lin
            summed = _FusedAggregation.apply(x, lin.weight[:, 0], lin.bias, inputs.graphs())
            return self.conv.nn(summed)
        edge_index, weight = inputs.coo()
        return self.conv(x, edge_index, weight.to(x.dtype).unsqueeze(1))
