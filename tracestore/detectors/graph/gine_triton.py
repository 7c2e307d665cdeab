"""Kernels of gine_op on CUDA devices, in Triton, with the interface of gine_cpu.

Each program sums a block of columns over some rows, edge after edge in stored order, without
atomics: results do not vary between runs.

Three arrays tell the edges of a row. Packed edges: `place` is the graph of each row, `begin` and `extent` are
weight_ptr and node_ptr. Lists, sorted by row: `place` is the node at the other end of each edge, `begin` and `extent`
are the first edge and the number of edges of each row.
"""

import functools

import torch
import triton
import triton.language as tl

from tracestore.detectors.graph.edges import Edges

BLOCK_COLUMNS = 128
# Rows per partial sum of the gradients of w and b.
BLOCK_ROWS = 16


@triton.jit
def _add(p, q):
    return p + q


@triton.jit
def _forward(
    out, x, w, b, weight, place, begin, extent, degree, threshold, D, C,
    LISTS: tl.constexpr, MEAN: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
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
    if LISTS:
        start, count, base, spacing = tl.load(begin + row), tl.load(extent + row), row, row
    else:
        graph = tl.load(place + row)
        node = tl.load(extent + graph)
        size = tl.load(extent + graph + 1) - node
        # Rows are counted from the first graph with rows.
        base = node - tl.load(extent + tl.load(place))
        local = row - base
        start, spacing = tl.load(begin + graph) + local * (local + 1) // 2, size * (size + 1) // 2
        # Rows behind the last graph, which pad the batch, have no edges.
        count = tl.where(local < size, local + 1, 0)
    total = tl.full((BLOCK,), 0.0, wb.dtype)
    for e in range(0, count):
        a = tl.load(weight + start + e + channels * spacing, mask=channels < C, other=0.0)
        if LISTS:
            node = tl.load(place + start + e)
            is_edge = True
        else:
            node = base + e
            is_edge = tl.reduce(a.to(tl.float64), 0, _add) / C > limit
        if is_edge:
            xj = tl.load(x + node * D + columns, mask=inside, other=0.0).to(wb.dtype)
            message = (xj + bb) + tl.reduce(a.to(wb.dtype)[:, None] * wb, 0, _add)
            total += tl.where(message > 0, message, 0.0)
    if MEAN:
        total = total / tl.load(degree + row).to(wb.dtype)
    own = tl.load(x + row * D + columns, mask=inside, other=0.0).to(wb.dtype)
    tl.store(out + row * D + columns, own + total, mask=inside)


@triton.jit
def _backward(
    grad_out, x, w, b, weight, place, begin, extent, degree, threshold, grad_x, partial, N, D, C,
    LISTS: tl.constexpr, MEAN: tl.constexpr, NEED_X: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr
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
        if LISTS:
            start, count, base, spacing = tl.load(begin + row), tl.load(extent + row), row, row
        else:
            graph = tl.load(place + row)
            first = tl.load(extent + graph)
            size = tl.load(extent + graph + 1) - first
            base = first - tl.load(extent + tl.load(place))
            start, count, spacing = tl.load(begin + graph), size - (row - base), size * (size + 1) // 2
        xj = tl.load(x + row * D + columns, mask=inside, other=0.0).to(wb.dtype) + bb
        total = tl.full((BLOCK,), 0.0, wb.dtype)
        for e in range(0, count):
            if LISTS:
                at = start + e
                node = tl.load(place + at)
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
                if MEAN:
                    through = through / tl.load(degree + node).to(wb.dtype)
                total += through
                total_w += a_wide[:, None] * through[None, :]
        total_b += total
        if NEED_X:
            own = tl.load(grad_out + row * D + columns, mask=inside, other=0.0)
            tl.store(grad_x + row * D + columns, own + total, mask=inside)
    at_w = (block * (C + 1) + channels[:, None]) * D + columns[None, :]
    tl.store(partial + at_w, total_w, mask=in_w)
    tl.store(partial + (block * (C + 1) + C) * D + columns, total_b, mask=inside)


def _rows(x: torch.Tensor, edges: Edges, by_source: bool) -> tuple[torch.Tensor, ...]:
    """Return weight, place, begin and extent for the kernels; lists are sorted by source, else by target."""
    node_ptr, weight, weight_ptr, source, target, _, _, graph, ptr = edges
    if source is None or target is None:
        if graph is None:
            graph = torch.repeat_interleave(node_ptr.diff(), output_size=len(x))
        return weight.contiguous(), graph, weight_ptr, node_ptr
    span = slice(None) if ptr is not None else slice(*weight_ptr[[0, -1]].tolist())
    mine, other = (t[span] - node_ptr[0] for t in ((source, target) if by_source else (target, source)))
    mine, order = torch.sort(mine, stable=True)
    rows = torch.arange(len(x), device=x.device)
    begin = torch.searchsorted(mine, rows)
    return weight[span][order], other[order], begin, torch.searchsorted(mine, rows, right=True) - begin


@functools.cache
def _limit(threshold: float, device: torch.device) -> torch.Tensor:
    # Passed in memory, because Triton rounds a float argument to float32.
    return torch.full((1,), threshold, dtype=torch.float64, device=device)


def aggregate(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, edges: Edges) -> None:
    """Write the sums of gine_op into `out`, which has the dtype of w."""
    edges.check(len(x), len(w), lists=True)
    if x.numel() == 0:
        return
    grid = len(x), triton.cdiv(x.shape[1], BLOCK_COLUMNS)
    rows = _rows(x, edges, False)
    degree = rows[1] if edges.degree is None else edges.degree
    # fmt: off
    _forward[grid](
        out, x, w, b, *rows, degree, _limit(edges.threshold, x.device), x.shape[1], len(w), edges.source is not None,
        edges.degree is not None, triton.next_power_of_2(len(w)), BLOCK_COLUMNS,
    )
    # fmt: on


def aggregate_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    edges: Edges,
    grad_x: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of w and b, and write that of x unless it is None. They have the dtype of w."""
    edges.check(len(x), len(w), lists=True)
    N, D = x.shape
    blocks = triton.cdiv(N, BLOCK_ROWS)
    partial = w.new_empty((blocks, len(w) + 1, D))
    if x.numel() > 0:
        rows = _rows(x, edges, True)
        degree = rows[1] if edges.degree is None else edges.degree
        # fmt: off
        _backward[blocks, triton.cdiv(D, BLOCK_COLUMNS)](
            grad_out, x, w, b, *rows, degree, _limit(edges.threshold, x.device),
            grad_out if grad_x is None else grad_x, partial, N, D, len(w), edges.source is not None,
            edges.degree is not None, grad_x is not None, BLOCK_ROWS, triton.next_power_of_2(len(w)), BLOCK_COLUMNS,
        )
        # fmt: on
    total = partial.sum(0)
    return total[:-1], total[-1]
