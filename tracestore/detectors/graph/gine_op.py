"""GINE's message passing with the linear layer after it, as a PyTorch operator.

    tracestore::gine_linear   out = s W^T + bias, s_i = x_i + 1 / degree_i sum over edges j -> i of relu(x_j + w a_ij + b)

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
    degree (N,)         int32, the divisor of the messages of each node, by default 1: their number gives their mean
    graph (N,)          int64, the graph of each row; by default derived from node_ptr
    ptr (G + 1 numbers) node_ptr - node_ptr[0] where the host knows them and has checked pointers and edges; edge lists
                        then take all of `weight`. A GPU does not have to finish its work before the host continues.

No tensor of E x D values is created. The sums are held for a few graphs at a time, and backward
computes them again. Gradients are computed for x, w, b and the linear layer, not for the attention
weights. On a CPU each sum has a fixed order for any number of threads. The operator raises
ValueError where pointers or edges are out of bounds.

References
----------
Hu et al. 2020, "Strategies for Pre-training Graph Neural Networks", as PyG's GINEConv, eps = 0.
"""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tracestore.detectors.graph import gine_cpu
from tracestore.detectors.graph.edges import Edges

# Bytes of the sums that are held at a time. Chunks that fit into the CPU's caches are slower: after
# each product its threads spin for a while and delay the threads of the next sums.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}

_INPUTS = (
    "Tensor x, Tensor w, Tensor b, Tensor matrix, Tensor bias, "
    "Tensor node_ptr, Tensor weight, Tensor weight_ptr, Tensor? source, Tensor? target, float threshold, "
    "Tensor? degree=None, Tensor? graph=None, int[]? ptr=None"
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


def _chunks(ptr: Sequence[int], limit: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive graphs, of at most `limit` rows or a single one, as (rows of x, entries of a pointer array)."""
    begin = 0
    for end in range(1, len(ptr)):
        if end == len(ptr) - 1 or ptr[end + 1] - ptr[begin] > limit:
            yield slice(ptr[begin] - ptr[0], ptr[end] - ptr[0]), slice(begin, end + 1)
            begin = end


def _part(edges: Edges, rows: slice, pointers: slice) -> Edges:
    """Return the edges of some graphs."""
    degree, graph = (None if t is None else t[rows] for t in (edges.degree, edges.graph))
    return edges._replace(
        node_ptr=edges.node_ptr[pointers],
        weight_ptr=edges.weight_ptr[pointers],
        degree=degree,
        graph=None if graph is None else graph - pointers.start,
        # Edge lists of some graphs do not take all of `weight`.
        ptr=None if edges.ptr is None or edges.source is not None else edges.ptr[pointers],
    )


def _sums(x: Tensor, w: Tensor, b: Tensor, edges: Edges) -> Iterator[tuple[slice, Edges, Tensor]]:
    """Yield the sums of a few graphs at a time: their rows of x, their edges, and a buffer that is reused."""
    ptr = edges.node_ptr.tolist() if edges.ptr is None else edges.ptr
    if len(ptr) == 0 or len(ptr) != len(edges.node_ptr) or ptr[-1] - ptr[0] != len(x):
        raise ValueError("node_ptr does not fit x")
    for name in ("degree", "graph"):
        if (values := getattr(edges, name)) is not None and values.shape != x.shape[:1]:
            raise ValueError(f"{name} {tuple(values.shape)} does not fit x {tuple(x.shape)}")
    chunks = list(_chunks(ptr, CHUNK_BYTES[x.device.type] // max(1, x.shape[1] * w.itemsize)))
    most_rows = max((rows.stop - rows.start for rows, _ in chunks), default=0)
    buffer = w.new_empty((min(most_rows, len(x)), x.shape[1]))
    for rows, pointers in chunks:
        part = edges if len(chunks) == 1 else _part(edges, rows, pointers)
        summed = buffer[: rows.stop - rows.start]
        _kernels(x.device).aggregate(summed, x[rows], w, b, part)
        yield rows, part, summed


def _fake_linear(x: Tensor, w: Tensor, b: Tensor, matrix: Tensor, *_: Any) -> Tensor:
    return matrix.new_empty((x.shape[0], matrix.shape[0]))


@_operator(f"({_INPUTS}) -> Tensor", _fake_linear)
def gine_linear(x: Tensor, w: Tensor, b: Tensor, matrix: Tensor, bias: Tensor, *edges: Any) -> Tensor:
    """Return the product (N, H) in the dtype of matrix."""
    x, w, b = _check(x, w, b)
    out = matrix.new_empty((len(x), len(matrix)))
    with torch.autocast(x.device.type, enabled=False):
        for rows, _, summed in _sums(x, w, b, Edges(*edges)):
            torch.addmm(bias, summed.to(matrix.dtype), matrix.t(), out=out[rows])
    return out


def _fake_gradients(grad_out: Tensor, need_grad_x: bool, x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    grad_x = x.new_empty((x.shape[0] if need_grad_x else 0, x.shape[1]))
    return grad_x, *(parameter.new_empty(parameter.shape) for parameter in inputs[:4])


@_operator(
    f"(Tensor grad_out, bool need_grad_x, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _fake_gradients
)
def gine_linear_backward(
    grad_out: Tensor, need_grad_x: bool, x: Tensor, w: Tensor, b: Tensor, matrix: Tensor, bias: Tensor, *edges: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of x (empty where it is not needed), w, b, matrix and bias in their dtypes."""
    dtypes = x.dtype, w.dtype, b.dtype, matrix.dtype
    x, w, b = _check(x, w, b)
    grad_out = grad_out.contiguous()
    grad_x = torch.empty((len(x) if need_grad_x else 0, x.shape[1]), dtype=w.dtype, device=x.device)
    total: list[Tensor] | None = None
    with torch.autocast(x.device.type, enabled=False):
        for rows, part, summed in _sums(x, w, b, Edges(*edges)):
            grad = grad_out[rows]
            # Chunks are added in the dtype of the sums, because 16 bits would lose small terms.
            grad_matrix = torch.mm(grad.t(), summed.to(matrix.dtype)).to(w.dtype)
            if matrix.dtype == w.dtype:
                torch.mm(grad, matrix, out=summed)
            else:
                summed.copy_(torch.mm(grad, matrix))
            grad_rows = grad_x[rows] if need_grad_x else None
            grad_w, grad_b = _kernels(x.device).aggregate_backward(summed, x[rows], w, b, part, grad_rows)
            found = [grad_w, grad_b, grad_matrix]
            if total is None:
                total = found
            else:
                for tensor, more in zip(total, found, strict=True):
                    tensor += more
    if total is None:
        total = [t.new_zeros(t.shape, dtype=w.dtype) for t in (w, b, matrix)]
    gradients = zip((grad_x, *total), dtypes, strict=True)
    return *(gradient.to(dtype) for gradient, dtype in gradients), grad_out.sum(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Five tensors before the edges, of which the sixth is the threshold and the last the numbers of ptr.
    ctx.threshold, ctx.ptr = inputs[10], inputs[13]
    ctx.save_for_backward(*inputs[:10], *inputs[11:13])


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[0]
    tensors = ctx.saved_tensors
    grad_x, *rest = gine_linear_backward(grad_out, need, *tensors[:10], ctx.threshold, *tensors[10:], ctx.ptr)
    return grad_x if need else None, *rest, *[None] * 9


torch.library.register_autograd("tracestore::gine_linear", _gradients, setup_context=_save)
