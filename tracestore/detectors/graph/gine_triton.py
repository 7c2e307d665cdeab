"""Kernels of gine_op on CUDA devices, in Triton, with the interface of gine_cpu.

Each program sums a block of columns over some rows, edge after edge in stored order, without
atomics: results do not vary between runs.
"""

import torch
import triton
import triton.language as tl

from tracestore.detectors.graph.inputs import Edges

BLOCK_COLUMNS = 128
# Rows per partial sum of grad_w and grad_b.
BLOCK_ROWS = 16


@triton.jit
def _add(p, q):
    return p + q


@triton.jit
def _forward(
    out, x, w, b, weight, other, begin, count, first, stride, threshold, D, C,
    LISTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    channels = tl.arange(0, CHANNELS)
    wb = tl.load(
        w + channels[:, None] * D + columns[None, :], mask=(channels[:, None] < C) & inside[None, :], other=0.0
    )
    bb = tl.load(b + columns, mask=inside, other=0.0)
    limit = tl.load(threshold)
    start, base, spacing = tl.load(begin + row), tl.load(first + row), tl.load(stride + row)
    total = tl.full((BLOCK,), 0.0, wb.dtype)
    for e in range(0, tl.load(count + row)):
        a = tl.load(weight + start + e + channels * spacing, mask=channels < C, other=0.0)
        if LISTS:
            node = tl.load(other + start + e)
            is_edge = True
        else:
            node = base + e
            is_edge = tl.reduce(a.to(tl.float64), 0, _add) / C > limit
        if is_edge:
            xj = tl.load(x + node * D + columns, mask=inside, other=0.0).to(wb.dtype)
            message = (xj + bb) + tl.reduce(a.to(wb.dtype)[:, None] * wb, 0, _add)
            total += tl.where(message > 0, message, 0.0)
    own = tl.load(x + row * D + columns, mask=inside, other=0.0).to(wb.dtype)
    tl.store(out + row * D + columns, own + total, mask=inside)


@triton.jit
def _backward(
    grad_out, x, w, b, weight, other, begin, count, first, stride, threshold, grad_x, partial_w, partial_b, N, D, C,
    LISTS: tl.constexpr, NEED_X: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    channels = tl.arange(0, CHANNELS)
    in_w = (channels[:, None] < C) & inside[None, :]
    wb = tl.load(w + channels[:, None] * D + columns[None, :], mask=in_w, other=0.0)
    bb = tl.load(b + columns, mask=inside, other=0.0)
    limit = tl.load(threshold)
    total_w, total_b = tl.full((CHANNELS, BLOCK), 0.0, wb.dtype), tl.full((BLOCK,), 0.0, wb.dtype)
    for row in range(block * ROWS, tl.minimum(block * ROWS + ROWS, N)):
        start, base, spacing = tl.load(begin + row), tl.load(first + row), tl.load(stride + row)
        xj = tl.load(x + row * D + columns, mask=inside, other=0.0).to(wb.dtype) + bb
        total = tl.full((BLOCK,), 0.0, wb.dtype)
        for e in range(0, tl.load(count + row)):
            if LISTS:
                at = start + e
                node = tl.load(other + at)
            else:
                # The pairs (i, j) of column j = row, for i >= j.
                j = row - base
                i = j + e
                at = start + i * (i + 1) // 2 + j
                node = base + i
            a = tl.load(weight + at + channels * spacing, mask=channels < C, other=0.0)
            is_edge = True
            if not LISTS:
                is_edge = tl.reduce(a.to(tl.float64), 0, _add) / C > limit
            if is_edge:
                a_wide = a.to(wb.dtype)
                passes = xj + tl.reduce(a_wide[:, None] * wb, 0, _add) > 0
                through = tl.load(grad_out + node * D + columns, mask=inside & passes, other=0.0)
                total += through
                total_w += a_wide[:, None] * through[None, :]
        total_b += total
        if NEED_X:
            own = tl.load(grad_out + row * D + columns, mask=inside, other=0.0)
            tl.store(grad_x + row * D + columns, own + total, mask=inside)
    at_w = (block * C + channels[:, None]) * D + columns[None, :]
    tl.store(partial_w + at_w, total_w, mask=in_w)
    tl.store(partial_b + block * D + columns, total_b, mask=inside)


def _check(x: torch.Tensor, w: torch.Tensor, edges: Edges) -> None:
    """Raise ValueError where pointers or edges are out of bounds, as the C core does."""
    node_ptr, weight, weight_ptr, source, target, _ = edges
    if (source is None) != (target is None):
        raise ValueError("source and target must be given together")
    if source is not None and len(w) > 1:
        raise ValueError("edge lists have one weight per edge")
    pairs = [t for t in (source, target) if t is not None]
    if any(t.dtype != torch.int64 for t in (node_ptr, weight_ptr, *pairs)) or not weight.is_floating_point():
        raise ValueError("pointers and edges must be int64, weights floating point")
    if node_ptr.ndim != 1 or len(node_ptr) < 1 or node_ptr.shape != weight_ptr.shape or weight.ndim != 1:
        raise ValueError("node_ptr and weight_ptr must be (G + 1,)")
    if any(t.shape != weight.shape for t in pairs):
        raise ValueError("source, target and weights must have one entry per edge")
    sizes, room = node_ptr.diff(), weight_ptr.diff()
    needed = len(w) * (sizes * (sizes + 1) // 2) if source is None else 0 * sizes
    fits = (node_ptr[0] >= 0) & (weight_ptr[0] >= 0) & (sizes >= 0).all() & (room >= needed).all()
    fits &= (node_ptr[-1] - node_ptr[0] == len(x)) & (weight_ptr[-1] <= len(weight))
    if not bool(fits):
        raise ValueError("node_ptr or weight_ptr does not fit x and the weights")
    if pairs:
        begin, end = weight_ptr[[0, -1]].tolist()
        graph = torch.repeat_interleave(room, output_size=end - begin)
        low, high = node_ptr[:-1][graph], node_ptr[1:][graph]
        inside = [((t[begin:end] >= low) & (t[begin:end] < high)).all() for t in pairs]
        if not bool(inside[0] & inside[1]):
            raise ValueError("an edge leaves its graph")


def _rows(x: torch.Tensor, edges: Edges, by_source: bool) -> tuple[torch.Tensor, ...]:
    """Return the edges sorted by row: by source, else by target.

    Returns
    -------
    weight, other : torch.Tensor
        Weight of each edge, and the node at its other end (unused for packed edges).
    begin, count : torch.Tensor
        ``(N,)``, first edge and number of edges of each row.
    first : torch.Tensor
        ``(N,)``, first row of the graph of each row.
    stride : torch.Tensor
        ``(N,)``, distance between the channels of a weight.
    """
    node_ptr, weight, weight_ptr, source, target, _ = edges
    sizes = node_ptr.diff()
    graph = torch.repeat_interleave(sizes, output_size=len(x))
    first = (node_ptr[:-1] - node_ptr[0])[graph]
    if source is None or target is None:
        local = torch.arange(len(x), device=x.device) - first
        begin = weight_ptr[:-1][graph] + (0 if by_source else local * (local + 1) // 2)
        count = sizes[graph] - local if by_source else local + 1
        return weight.contiguous(), weight, begin, count, first, (sizes * (sizes + 1) // 2)[graph]
    span = slice(*weight_ptr[[0, -1]].tolist())
    mine, other = (t[span] - node_ptr[0] for t in ((source, target) if by_source else (target, source)))
    order = torch.argsort(mine, stable=True)
    count = torch.bincount(mine, minlength=len(x))
    return weight[span][order], other[order], count.cumsum(0) - count, count, first, first


def _limit(x: torch.Tensor, edges: Edges) -> torch.Tensor:
    # Passed in memory, because Triton rounds a float argument to float32.
    return torch.full((1,), edges[-1], dtype=torch.float64, device=x.device)


def aggregate(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, edges: Edges) -> None:
    """Write the sums of gine_op into `out`, which has the dtype of w."""
    _check(x, w, edges)
    if x.numel() == 0:
        return
    grid = len(x), triton.cdiv(x.shape[1], BLOCK_COLUMNS)
    rows = _rows(x, edges, False)
    # fmt: off
    _forward[grid](
        out, x, w, b, *rows, _limit(x, edges), x.shape[1], len(w), edges[3] is not None,
        triton.next_power_of_2(len(w)), BLOCK_COLUMNS,
    )
    # fmt: on


def aggregate_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    edges: Edges,
    grad_x: torch.Tensor | None,
    grad_w: torch.Tensor,
    grad_b: torch.Tensor,
) -> None:
    """Write the gradients into the tensors `grad_*`, which have the dtype of w; grad_x may be None."""
    _check(x, w, edges)
    N, D = x.shape
    blocks = triton.cdiv(N, BLOCK_ROWS)
    partial_w, partial_b = w.new_empty((blocks, *w.shape)), w.new_empty((blocks, D))
    if x.numel() > 0:
        # fmt: off
        _backward[blocks, triton.cdiv(D, BLOCK_COLUMNS)](
            grad_out, x, w, b, *_rows(x, edges, True), _limit(x, edges), grad_out if grad_x is None else grad_x,
            partial_w, partial_b, N, D, len(w), edges[3] is not None, grad_x is not None, BLOCK_ROWS,
            triton.next_power_of_2(len(w)), BLOCK_COLUMNS,
        )
        # fmt: on
    torch.sum(partial_w, 0, out=grad_w)
    torch.sum(partial_b, 0, out=grad_b)
