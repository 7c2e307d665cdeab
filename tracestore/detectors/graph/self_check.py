"""Compare the Triton kernels with the plain operator, once per process and GPU."""

import functools
from typing import Any

import torch

from tracestore.detectors.graph.inputs import GraphInputs
from tracestore.detectors.layers.precision import kernel_works

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
