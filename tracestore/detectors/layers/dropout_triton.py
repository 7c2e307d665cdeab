"""Dropout and noise of traces on CUDA devices, in Triton: computed where they are used, forward and backward."""

import math

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _mix(z):
    """Return the SplitMix64 finalizer, as tracestore.data.order does."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


# Triton would compile again for other values of these, which change from step to step.
@triton.jit(do_not_specialize=["size", "stream"])
def _apply(
    out, x, row_ptr, state, size, stream, stream_step, B, C, ptr_step,
    BOUND: tl.constexpr, SCALE: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row = at // C
    if SEARCH < 0:
        trace, group, own = row % B, row // B, row - row
    else:
        # The trace of a row is the last one that does not begin after it.
        base = tl.load(row_ptr)
        trace, end, group = row - row, row - row + B, row - row
        for _ in range(SEARCH):
            middle = (trace + end) // 2
            is_after = tl.load(row_ptr + middle * ptr_step, mask=inside, other=0) - base > row
            end = tl.where(is_after, middle, end)
            trace = tl.where(is_after, trace, middle)
        own = row - (tl.load(row_ptr + trace * ptr_step, mask=inside, other=0) - base)
    key, first = tl.load(state), tl.load(state + 1)
    z = _mix(key.to(tl.uint64) + (first + trace).to(tl.uint64) * 0x9E3779B97F4A7C15)
    z = _mix(z + (stream + group * stream_step + 1).to(tl.uint64))
    z = _mix(z + (own * C + at % C + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    value = tl.load(x + at, mask=inside, other=0.0)
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    kept = tl.where((z >> 32) < BOUND, value * tl.full((), SCALE, tl.float64).to(value.dtype), 0.0)
    tl.store(out + at, kept, mask=inside)


@triton.jit(do_not_specialize=["size", "stream"])
def _normal(out, state, size, stream, columns, TWO_PI: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key, first = tl.load(state), tl.load(state + 1)
    z = _mix(key.to(tl.uint64) + (first + at // columns).to(tl.uint64) * 0x9E3779B97F4A7C15)
    z = _mix(z + (stream + 1).to(tl.uint64))
    z = _mix(z + (at % columns + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    radius = tl.sqrt(-2 * tl.log(((z >> 40) + 1).to(tl.float32) * (1 / (1 << 24))))
    angle = ((z >> 8) & 0xFFFFFF).to(tl.float32) * (TWO_PI / (1 << 24))
    tl.store(out + at, radius * tl.cos(angle), mask=at < size)


def normal(state: torch.Tensor, stream: int, count: int, columns: int) -> torch.Tensor:
    """Return standard normal noise ``(count, columns)``, float32, of traces with this state; see `apply`."""
    out = torch.empty(count, columns, device=state.device)
    if out.numel() > 0:
        grid = (triton.cdiv(out.numel(), BLOCK),)
        _normal[grid](out, state, out.numel(), stream, columns, 2 * math.pi, BLOCK)
    return out


def apply(
    x: torch.Tensor,
    row_ptr: torch.Tensor | None,
    count: int,
    state: torch.Tensor,
    stream: int,
    stream_step: int,
    bound: int,
) -> torch.Tensor:
    """Return x without some elements, the others divided by ``bound / 2**32``.

    Parameters
    ----------
    x : torch.Tensor
        ``(R, ...)``, of any float dtype.
    row_ptr : torch.Tensor, optional
        ``(count + 1,)`` int64, rows of x of each trace. Default: row r belongs to trace ``r % count`` and uses
        the stream ``stream + r // count * stream_step``.
    count : int
        Traces.
    state : torch.Tensor
        ``(2,)`` int64, see `TraceMasks.state`.
    stream, stream_step : int
    bound : int
        An element is kept where its 32 random bits are below this number.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel() > 0:
        pointers, step, search = (x, 1, -1) if row_ptr is None else (row_ptr, row_ptr.stride(0), count.bit_length())
        columns = x.numel() // len(x)
        # fmt: off
        _apply[(triton.cdiv(x.numel(), BLOCK),)](
            out, x, pointers, state, x.numel(), stream, stream_step, count, columns, step,
            bound, 2**32 / bound, search, BLOCK,
        )
        # fmt: on
    return out
