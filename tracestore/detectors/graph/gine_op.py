"""GINE's message passing with the linear layer after it, as a PyTorch operator.

    tracestore::gine_linear   out = s W^T + bias, s_i = x_i + scale_i sum over edges j -> i of relu(x_j + w a_ij + b)

Arguments:

    x (N, D)            float16, bfloat16, float32 or float64; converted while it is read
    w (C, D), b (D,)    edge layer Linear(C -> D); the sums s are float64 where w is, else float32
    matrix (H, D), bias (H,)   the linear layer; the product is computed in their dtype
    node_ptr (G + 1,)   int64: graph g has the rows node_ptr[g] .. node_ptr[g + 1], relative to node_ptr[0]
    weight, weight_ptr  without source and target: packed lower triangles. Those of graph g begin at
                        weight_ptr[g], C channels one after the other. A pair is an edge where the
                        mean over its channels is above `threshold`; NaN never is.
                        With source and target (int64, numbered like node_ptr; C = 1): graph g has
                        the edges weight_ptr[g] .. weight_ptr[g + 1], in any order.
    scale (N,)          factor of the messages of each node, by default 1: 1 / degree gives their mean

No tensor of E x D values is created. The sums are held for a few graphs at a time, and backward
computes them again. Gradients are computed for x, w, b and the linear layer, not for the attention
weights and the scale. On a CPU each sum has a fixed order for any number of threads. The operator raises
ValueError where pointers or edges are out of bounds.

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

# Bytes of the sums that are held at a time. Chunks that fit into the CPU's caches are slower: after
# each product its threads spin for a while and delay the threads of the next sums.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}

_INPUTS = (
    "Tensor x, Tensor w, Tensor b, Tensor matrix, Tensor bias, "
    "Tensor node_ptr, Tensor weight, Tensor weight_ptr, Tensor? source, Tensor? target, float threshold"
)


def _kernels(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        return gine_cpu
    from tracestore.detectors.graph import gine_triton

    return gine_triton


def _check(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if x.ndim != 2 or w.ndim != 2 or len(w) < 1 or w.shape[1:] != x.shape[1:] or b.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and b {tuple(b.shape)} have shapes that do not match")
    dtype = torch.float64 if w.dtype == torch.float64 else torch.float32
    return x.contiguous(), w.to(dtype).contiguous(), b.to(dtype).contiguous()


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator of the same name; `fake` returns empty results, for torch.compile.

    torch.library.custom_op does the same, but its first call imports torch._dynamo, which takes seconds.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = f"tracestore::{function.__name__}"
        torch.library.define(name, schema)
        torch.library.impl(name, "default", function)
        torch.library.register_fake(name, fake)
        return getattr(torch.ops.tracestore, function.__name__).default

    return register


def _chunks(node_ptr: Tensor, bytes_per_row: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive graphs as (rows of x, entries of a pointer array).

    Their sums have at most CHUNK_BYTES, or they are a single graph.
    """
    ptr = node_ptr.tolist()
    limit = CHUNK_BYTES[node_ptr.device.type] // max(1, bytes_per_row)
    begin = 0
    for end in range(1, len(ptr)):
        if end == len(ptr) - 1 or ptr[end + 1] - ptr[begin] > limit:
            yield slice(ptr[begin] - ptr[0], ptr[end] - ptr[0]), slice(begin, end + 1)
            begin = end


def _sums(x: Tensor, w: Tensor, b: Tensor, edges: Edges, scale: Tensor | None) -> Iterator[tuple[slice, Edges, Tensor]]:
    """Yield the sums of a few graphs at a time: their rows of x, their edges, and a buffer that is reused."""
    node_ptr, weight, weight_ptr, *rest = edges
    if len(node_ptr) == 0 or int(node_ptr[-1] - node_ptr[0]) != len(x):
        raise ValueError("node_ptr does not fit x")
    if scale is not None and scale.shape != x.shape[:1]:
        raise ValueError(f"scale {tuple(scale.shape)} does not fit x {tuple(x.shape)}")
    chunks = list(_chunks(node_ptr, x.shape[1] * w.itemsize))
    most_rows = max((rows.stop - rows.start for rows, _ in chunks), default=0)
    buffer = w.new_empty((min(most_rows, len(x)), x.shape[1]))
    for rows, pointers in chunks:
        chunk_edges: Any = node_ptr[pointers], weight, weight_ptr[pointers], *rest
        summed = buffer[: rows.stop - rows.start]
        _kernels(x.device).aggregate(summed, x[rows], w, b, chunk_edges)
        if scale is not None:
            torch.lerp(x[rows].to(w.dtype), summed, scale[rows, None].to(w.dtype), out=summed)
        yield rows, chunk_edges, summed


def _split(arguments: tuple[Any, ...]) -> tuple[Edges, Tensor | None]:
    """Return the edges and the scale."""
    return arguments[:6], arguments[6] if len(arguments) > 6 else None


def _fake_linear(x: Tensor, w: Tensor, b: Tensor, matrix: Tensor, *_: Any) -> Tensor:
    return matrix.new_empty((x.shape[0], matrix.shape[0]))


@_operator(f"({_INPUTS}, Tensor? scale=None) -> Tensor", _fake_linear)
def gine_linear(x: Tensor, w: Tensor, b: Tensor, matrix: Tensor, bias: Tensor, *edges_and_scale: Any) -> Tensor:
    """Return the product (N, H) in the dtype of matrix."""
    edges, scale = _split(edges_and_scale)
    x, w, b = _check(x, w, b)
    out = matrix.new_empty((len(x), len(matrix)))
    with torch.autocast(x.device.type, enabled=False):
        for rows, _, summed in _sums(x, w, b, edges, scale):
            torch.addmm(bias, summed.to(matrix.dtype), matrix.t(), out=out[rows])
    return out


# The place of need_grad_x after x: w, b, matrix, bias and six arguments of the edges come before it.
_NEED = 10


def _fake_gradients(grad_out: Tensor, x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    grad_x = x.new_empty((x.shape[0] if inputs[_NEED] else 0, x.shape[1]))
    return grad_x, *(parameter.new_empty(parameter.shape) for parameter in inputs[:4])


@_operator(
    f"(Tensor grad_out, {_INPUTS}, bool need_grad_x, Tensor? scale=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_gradients,
)
def gine_linear_backward(
    grad_out: Tensor, x: Tensor, w: Tensor, b: Tensor, matrix: Tensor, bias: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of x (empty where it is not needed), w, b, matrix and bias in their dtypes."""
    need_grad_x = rest[6]
    edges, scale = _split((*rest[:6], *rest[7:]))
    dtypes = x.dtype, w.dtype, b.dtype, matrix.dtype
    x, w, b = _check(x, w, b)
    grad_out = grad_out.contiguous()
    grad_x = torch.empty((len(x) if need_grad_x else 0, x.shape[1]), dtype=w.dtype, device=x.device)
    grad_w, grad_b, grad_matrix = (t.new_zeros(t.shape, dtype=w.dtype) for t in (w, b, matrix))
    chunk_w, chunk_b = torch.empty_like(w), torch.empty_like(b)
    with torch.autocast(x.device.type, enabled=False):
        for rows, chunk_edges, summed in _sums(x, w, b, edges, scale):
            grad = grad_out[rows]
            if matrix.dtype == w.dtype:
                grad_matrix.addmm_(grad.t(), summed)
                torch.mm(grad, matrix, out=summed)
            else:
                # Chunks are added in the dtype of the sums, because 16 bits would lose small terms.
                grad_matrix += torch.mm(grad.t(), summed.to(matrix.dtype))
                summed.copy_(torch.mm(grad, matrix))
            grad_rows = grad_x[rows] if need_grad_x else None
            # The kernels know no scale: they get the gradient of the messages, and x_i needs that of the sums.
            kept = None
            if scale is not None:
                factor = scale[rows, None].to(w.dtype)
                kept = summed * (1 - factor) if need_grad_x else None
                summed.mul_(factor)
            _kernels(x.device).aggregate_backward(summed, x[rows], w, b, chunk_edges, grad_rows, chunk_w, chunk_b)
            if grad_rows is not None and kept is not None:
                grad_rows += kept
            grad_w += chunk_w
            grad_b += chunk_b
    gradients = zip((grad_x, grad_w, grad_b, grad_matrix), dtypes, strict=True)
    return *(gradient.to(dtype) for gradient, dtype in gradients), grad_out.sum(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.threshold, scale = inputs
    ctx.save_for_backward(*tensors, scale)


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[0]
    *tensors, scale = ctx.saved_tensors
    grad_x, *rest = gine_linear_backward(grad_out, *tensors, ctx.threshold, need, scale)
    return grad_x if need else None, *rest, None, None, None, None, None, None, None


torch.library.register_autograd("tracestore::gine_linear", _gradients, setup_context=_save)
