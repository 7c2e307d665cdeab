"""GINE's message passing as PyTorch operators, in the namespace `tracestore`.

    gine_aggregate   out_i = x_i + sum over edges j -> i of relu(x_j + w a_ij + b)
    gine_linear      out W^T + bias: the aggregate, multiplied by the first linear layer

Arguments of both:

    x (N, D)            float16, bfloat16, float32 or float64; converted while it is read
    w (C, D), b (D,)    edge layer Linear(C -> D); sums are float64 where w is, else float32
    node_ptr (G + 1,)   int64: graph g has the rows node_ptr[g] .. node_ptr[g + 1], relative to node_ptr[0]
    weight, weight_ptr  without source and target: packed lower triangles. Those of graph g begin at
                        weight_ptr[g], C channels one after the other. A pair is an edge where the
                        mean over its channels is above `threshold`; NaN never is.
                        With source and target (int64, numbered like node_ptr; C = 1): graph g has
                        the edges weight_ptr[g] .. weight_ptr[g + 1], in any order.

No tensor of E x D values is created, and none is kept for backward, which reads the edges again.
Gradients are computed for x, w, b and the linear layer, not for the attention weights. On a CPU
each sum has a fixed order for any number of threads. The operators raise ValueError where
pointers or edges are out of bounds.

References
----------
Hu et al. 2020, "Strategies for Pre-training Graph Neural Networks", as PyG's GINEConv, eps = 0.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tracestore.detectors.graph import gine_cpu
from tracestore.detectors.graph.inputs import Edges

# Bytes of the aggregate that gine_linear holds at a time. Chunks that fit into the CPU's caches are
# slower: after each product its threads spin for a while and delay the threads of the next sums.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


def _kernels(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        return gine_cpu
    from tracestore.detectors.graph import gine_triton

    return gine_triton


def _sum_dtype(w: Tensor) -> torch.dtype:
    return torch.float64 if w.dtype == torch.float64 else torch.float32


def _check(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if x.ndim != 2 or w.ndim != 2 or len(w) < 1 or w.shape[1:] != x.shape[1:] or b.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and b {tuple(b.shape)} have shapes that do not match")
    dtype = _sum_dtype(w)
    return x.contiguous(), w.to(dtype).contiguous(), b.to(dtype).contiguous()


def _operator(function: Callable[..., Any]) -> Any:
    """Register a function as the operator of the same name.

    torch.library.custom_op does the same, but its first call imports torch._dynamo, which takes seconds.
    """
    name = f"tracestore::{function.__name__}"
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    return getattr(torch.ops.tracestore, function.__name__).default


@_operator
def gine_aggregate(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    node_ptr: Tensor,
    weight: Tensor,
    weight_ptr: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    threshold: float,
) -> Tensor:
    """Return the aggregate (N, D) in the dtype of the sums."""
    x, w, b = _check(x, w, b)
    out = torch.empty(x.shape, dtype=w.dtype, device=x.device)
    _kernels(x.device).aggregate(out, x, w, b, (node_ptr, weight, weight_ptr, source, target, threshold))
    return out


@torch.library.register_fake("tracestore::gine_aggregate")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    node_ptr: Tensor,
    weight: Tensor,
    weight_ptr: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    threshold: float,
) -> Tensor:
    return torch.empty(x.shape, dtype=_sum_dtype(w), device=x.device)


@_operator
def gine_aggregate_backward(
    grad_out: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor,
    node_ptr: Tensor,
    weight: Tensor,
    weight_ptr: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    threshold: float,
    need_grad_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, w and b in their dtypes; that of x is empty where it is not needed."""
    dtypes = x.dtype, w.dtype, b.dtype
    x, w, b = _check(x, w, b)
    grad_x = torch.empty((len(x) if need_grad_x else 0, x.shape[1]), dtype=w.dtype, device=x.device)
    grad_w, grad_b = torch.empty_like(w), torch.empty_like(b)
    _kernels(x.device).aggregate_backward(
        grad_out.to(w.dtype).contiguous(),
        x,
        w,
        b,
        (node_ptr, weight, weight_ptr, source, target, threshold),
        grad_x if need_grad_x else None,
        grad_w,
        grad_b,
    )
    return grad_x.to(dtypes[0]), grad_w.to(dtypes[1]), grad_b.to(dtypes[2])


@torch.library.register_fake("tracestore::gine_aggregate_backward")  # type: ignore[untyped-decorator]
def _(
    grad_out: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor,
    node_ptr: Tensor,
    weight: Tensor,
    weight_ptr: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    threshold: float,
    need_grad_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = x.new_empty((x.shape[0] if need_grad_x else 0, x.shape[1]))
    return grad_x, w.new_empty(w.shape), b.new_empty(b.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.threshold = inputs
    ctx.save_for_backward(*tensors)


def _aggregate_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[0]
    grad_x, *rest = gine_aggregate_backward(grad_out, *ctx.saved_tensors, ctx.threshold, need)
    return grad_x if need else None, *rest, None, None, None, None, None, None


torch.library.register_autograd("tracestore::gine_aggregate", _aggregate_gradients, setup_context=_save)


def _chunks(node_ptr: Tensor, bytes_per_row: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive graphs as (rows of x, entries of a pointer array).

    Their aggregate has at most CHUNK_BYTES, or they are a single graph.
    """
    ptr = node_ptr.tolist()
    limit = CHUNK_BYTES[node_ptr.device.type] // max(1, bytes_per_row)
    begin = 0
    for end in range(1, len(ptr)):
        if end == len(ptr) - 1 or ptr[end + 1] - ptr[begin] > limit:
            yield slice(ptr[begin] - ptr[0], ptr[end] - ptr[0]), slice(begin, end + 1)
            begin = end


def _edges_of_chunk(edges: Edges, pointers: slice) -> Edges:
    node_ptr, weight, weight_ptr, *rest = edges
    return node_ptr[pointers], weight, weight_ptr[pointers], *rest  # type: ignore[return-value]


def _buffer(rows: list[tuple[slice, slice]], dim: int, like: Tensor) -> Tensor:
    return like.new_empty((max((r.stop - r.start for r, _ in rows), default=0), dim))


@_operator
def gine_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    matrix: Tensor,
    bias: Tensor,
    node_ptr: Tensor,
    weight: Tensor,
    weight_ptr: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    threshold: float,
) -> Tensor:
    """Return (N, H) in the dtype of matrix, for matrix (H, D) and bias (H,).

    The aggregate is held for a few graphs at a time; backward computes it again.
    """
    x, w, b = _check(x, w, b)
    edges = (node_ptr, weight, weight_ptr, source, target, threshold)
    kernels, chunks = _kernels(x.device), list(_chunks(node_ptr, x.shape[1] * w.itemsize))
    out, buffer = matrix.new_empty((len(x), len(matrix))), _buffer(chunks, x.shape[1], w)
    with torch.autocast(x.device.type, enabled=False):
        for rows, pointers in chunks:
            summed = buffer[: rows.stop - rows.start]
            kernels.aggregate(summed, x[rows], w, b, _edges_of_chunk(edges, pointers))
            torch.addmm(bias, summed.to(matrix.dtype), matrix.t(), out=out[rows])
    return out


@torch.library.register_fake("tracestore::gine_linear")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    matrix: Tensor,
    bias: Tensor,
    node_ptr: Tensor,
    weight: Tensor,
    weight_ptr: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    threshold: float,
) -> Tensor:
    return matrix.new_empty((x.shape[0], matrix.shape[0]))


@_operator
def gine_linear_backward(
    grad_out: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor,
    matrix: Tensor,
    bias: Tensor,
    node_ptr: Tensor,
    weight: Tensor,
    weight_ptr: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    threshold: float,
    need_grad_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty where it is not needed), w, b, matrix and bias in their dtypes."""
    dtypes = x.dtype, w.dtype, b.dtype
    x, w, b = _check(x, w, b)
    grad_out = grad_out.contiguous()
    edges = (node_ptr, weight, weight_ptr, source, target, threshold)
    kernels, chunks = _kernels(x.device), list(_chunks(node_ptr, x.shape[1] * w.itemsize))
    grad_x = torch.empty((len(x) if need_grad_x else 0, x.shape[1]), dtype=w.dtype, device=x.device)
    grad_w, grad_b, grad_matrix = (
        torch.zeros_like(w),
        torch.zeros_like(b),
        matrix.new_zeros(matrix.shape, dtype=w.dtype),
    )
    chunk_w, chunk_b, buffer = torch.empty_like(w), torch.empty_like(b), _buffer(chunks, x.shape[1], w)
    with torch.autocast(x.device.type, enabled=False):
        for rows, pointers in chunks:
            summed, chunk_edges, grad = (
                buffer[: rows.stop - rows.start],
                _edges_of_chunk(edges, pointers),
                grad_out[rows],
            )
            kernels.aggregate(summed, x[rows], w, b, chunk_edges)
            if matrix.dtype == w.dtype:
                grad_matrix.addmm_(grad.t(), summed)
                torch.mm(grad, matrix, out=summed)
            else:
                # Chunks are added in the dtype of the sums, because 16 bits would lose small terms.
                grad_matrix += torch.mm(grad.t(), summed.to(matrix.dtype))
                summed.copy_(torch.mm(grad, matrix))
            grad_rows = grad_x[rows] if need_grad_x else None
            kernels.aggregate_backward(summed, x[rows], w, b, chunk_edges, grad_rows, chunk_w, chunk_b)
            grad_w += chunk_w
            grad_b += chunk_b
    return (
        grad_x.to(dtypes[0]),
        grad_w.to(dtypes[1]),
        grad_b.to(dtypes[2]),
        grad_matrix.to(matrix.dtype),
        grad_out.sum(0),
    )


@torch.library.register_fake("tracestore::gine_linear_backward")  # type: ignore[untyped-decorator]
def _(
    grad_out: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor,
    matrix: Tensor,
    bias: Tensor,
    node_ptr: Tensor,
    weight: Tensor,
    weight_ptr: Tensor,
    source: Tensor | None,
    target: Tensor | None,
    threshold: float,
    need_grad_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_x = x.new_empty((x.shape[0] if need_grad_x else 0, x.shape[1]))
    return (
        grad_x,
        w.new_empty(w.shape),
        b.new_empty(b.shape),
        matrix.new_empty(matrix.shape),
        bias.new_empty(bias.shape),
    )


def _linear_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[0]
    grad_x, *rest = gine_linear_backward(grad_out, *ctx.saved_tensors, ctx.threshold, need)
    return grad_x if need else None, *rest, None, None, None, None, None, None


torch.library.register_autograd("tracestore::gine_linear", _linear_gradients, setup_context=_save)
