"""Kernels of gine_op on the CPU: the C core, called on the memory of the tensors."""

from typing import Any

import torch

from tracestore._core.gine import GineInputs
from tracestore.detectors.graph.edges import Edges
from tracestore.store.format import schema

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def _raw(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return a numpy view of the tensor and the dtype code of the C core."""
    if tensor.dtype not in _NAMES:
        raise ValueError(f"found a tensor of {tensor.dtype}, expected float16, bfloat16, float32 or float64")
    tensor, code = tensor.contiguous(), schema.dtype_code(_NAMES[tensor.dtype])
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy(), code


def _graphs(x: torch.Tensor, w: torch.Tensor, edges: Edges) -> GineInputs:
    node_ptr, weight, weight_ptr, source, target, threshold, *_ = edges
    nodes, begins = node_ptr.contiguous().numpy(), weight_ptr.contiguous().numpy()
    sources, targets = (None if t is None else t.contiguous().numpy() for t in (source, target))
    rows, rows_dtype = _raw(x)
    weights, weights_dtype = _raw(weight)
    threads = torch.get_num_threads()
    return GineInputs(
        rows, rows_dtype, nodes, weights, weights_dtype, begins, sources, targets, threshold, threads, len(w)
    )


def _workspace(graphs: GineInputs, dtype: torch.dtype, backward: bool) -> Any:
    # A torch tensor rather than a numpy array, so that its memory is accounted as torch's is.
    return torch.empty(graphs.workspace_bytes(dtype.itemsize, backward), dtype=torch.uint8).numpy()


def _scale(edges: Edges, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the factor of the messages of each row, (N, 1)."""
    return None if edges.degree is None else edges.degree.to(dtype).reciprocal_()[:, None]


def aggregate(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, edges: Edges) -> None:
    """Write the sums of gine_op into `out`, which has the dtype of w."""
    graphs = _graphs(x, w, edges)
    graphs.forward(w.view(-1).numpy(), b.numpy(), out.numpy(), _workspace(graphs, out.dtype, False))
    if (scale := _scale(edges, w.dtype)) is not None:
        torch.lerp(x.to(w.dtype), out, scale, out=out)


def aggregate_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    edges: Edges,
    grad_x: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of w and b, and write that of x unless it is None. They have the dtype of w.

    `grad_out` is overwritten.
    """
    graphs = _graphs(x, w, edges)
    grad_w, grad_b = torch.empty_like(w), torch.empty_like(b)
    # The C core knows no degrees: it gets the gradient of the messages, and x_i needs that of the sums.
    kept = None
    if (scale := _scale(edges, w.dtype)) is not None:
        kept = None if grad_x is None else grad_out * (1 - scale)
        grad_out.mul_(scale)
    graphs.backward(
        w.view(-1).numpy(),
        b.numpy(),
        grad_out.numpy(),
        None if grad_x is None else grad_x.numpy(),
        grad_w.view(-1).numpy(),
        grad_b.numpy(),
        _workspace(graphs, w.dtype, True),
    )
    if grad_x is not None and kept is not None:
        grad_x += kept
    return grad_w, grad_b
