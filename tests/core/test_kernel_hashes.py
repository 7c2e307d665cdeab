"""Hashes of tests/c/kernel_hashes.c, computed from numpy oracles on the same inputs.

The C program compares the kernels of every processor and level with the committed hashes. These
tests show that the hashes are those of the correct results.
"""

import re
import struct

import google_crc32c
import numpy as np
import pytest

from tests.core.oracles import largest
from tests.helpers import ROOT

SOURCE = (ROOT / "tests/c/kernel_hashes.c").read_text()
EXPECTED = {name: int(value, 16) for name, value in re.findall(r"^    KERNEL\((\w+), (0x\w+)\)", SOURCE, re.M)}
ERR_RANGE = -6


class Draws:
    """The random numbers of one kernel: xorshift64*."""

    def __init__(self, kernel):
        self.state = 0x9E3779B97F4A7C15 + list(EXPECTED).index(kernel)

    def uint32(self, n):
        """Return n numbers as uint32."""
        out, state = np.empty(n, "u4"), self.state
        for i in range(n):
            state ^= state >> 12
            state ^= state << 25 & 0xFFFFFFFFFFFFFFFF
            state ^= state >> 27
            out[i] = state * 0x2545F4914F6CDD1D >> 32 & 0xFFFFFFFF
        self.state = state
        return out

    def uint16(self, n, mask):
        """Return n numbers as uint16, with the bits of a mask."""
        return (self.uint32(n) & mask).astype("u2")

    def signed(self, n):
        """Return n float64 numbers from [-1, 1)."""
        return ((self.uint32(n) >> 7).astype("f8") - 2**24) / 2**24

    def positive(self, n):
        """Return n float64 numbers from [0, 1)."""
        return (self.uint32(n) >> 8).astype("f8") / 2**24


def fnv1a(items):
    """Return the 64-bit FNV-1a hash of arrays and of integers as int64."""
    value = 0xCBF29CE484222325
    for item in items:
        for byte in struct.pack("<q", item) if isinstance(item, int) else item.tobytes():
            value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def widened(halves):
    """Convert the bits of float16 to float32; NaN becomes quiet."""
    wide = halves.view("f2").astype("f4")
    return np.where(np.isnan(wide), wide.view("u4") | 0x400000, wide.view("u4")).view("f4")


def from_bfloat16(bits):
    """Convert the bits of bfloat16 to float32."""
    return (bits.astype("u4") << 16).view("f4")


def narrowed(values):
    """Convert to float16; NaN keeps its sign and the upper bits of its payload and becomes quiet."""
    with np.errstate(over="ignore"):
        halves = values.astype("f2").view("u2")
    bits = values.view("u4") if values.dtype == "f4" else None
    return (
        halves
        if bits is None
        else np.where(np.isnan(values), bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF, halves).astype("u2")
    )


def mean_of_rows(rows):
    """Return [0, float16 means] over the rows, or [error] if a finite mean overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.zeros(rows.shape[1])
        for row in rows:
            total += row
        mean = total / len(rows)
        half = mean.astype("f2")
    if (np.isinf(half) & np.isfinite(mean)).any():
        return [ERR_RANGE]
    return [0, np.where(np.isnan(mean), np.uint16(0x7E00), half.view("u2"))]


def crc(draws):
    data = draws.uint32(70000).astype("u1").tobytes()
    n = 0
    while n < 70000:
        yield google_crc32c.extend(n, data[n % 17 : n])
        n = n * 3 // 2 + 1
    zeros = bytes(12345)
    yield google_crc32c.extend(1, zeros) ^ google_crc32c.extend(0, zeros) ^ 2


def f16_to_f32(draws):
    every = np.arange(65536, dtype="u2")
    return [widened(every), from_bfloat16(every)]


def f32_to_f16(draws):
    bits = draws.uint32(100003)
    bits[::3] = bits[::3] & 0x8FFFFFFF | 0x30000000
    return [narrowed(bits.view("f4"))]


def to_f16(draws):
    n = 10007
    brain = draws.uint16(n, 0xBFFF)
    signed = draws.signed(3 * n).reshape(n, 3)
    wide = signed[:, 0] + signed[:, 1] * 2.0**-30
    narrow = (signed[:, 2] * np.where(np.arange(n) % 5, 1, 2.0**-16)).astype("f4")
    wide[5], narrow[6] = np.inf, -np.inf
    yield from (0, narrowed(wide), 0, narrowed(narrow), 0, narrowed(from_bfloat16(brain)))
    yield from (ERR_RANGE, 777)


def count_nonfinite(draws):
    bits = draws.uint16(80000, 0xFFFF)
    n = 0
    while n < 80000:
        yield int((~np.isfinite(bits[:n].view("f2"))).sum())
        yield int((~np.isfinite(from_bfloat16(bits[:n]))).sum())
        n = n * 2 + 1
    yield int((~np.isfinite(bits.view("f4"))).sum())
    yield int((~np.isfinite(bits.view("f8"))).sum())


def triangles(draws):
    size = 1
    while size < 70:
        itemsize = 2 << size % 3
        square = draws.uint16(12 * size * size, 0xFFFF).view(f"u{itemsize}")[: 3 * size * size].reshape(3, size, size)
        rows, columns = np.tril_indices(size)
        yield from (np.ascontiguousarray(square[:, rows, columns]), np.tril(square), 1)
        yield int(size == 1)
        size += 1 + size // 3


def head_means(draws):
    n = 1
    while n < 300:
        for heads in (1, 5, 9, 13):
            half, weight = (draws.uint16(heads * n, mask).reshape(heads, n) for mask in (0xFFFF, 0x3BFF))
            numbers = draws.uint32(3 * heads * n).reshape(heads, n, 3)
            narrow = (numbers[..., 0] >> 8).astype("f8") / 2**24
            wide = ((numbers[..., 1:] >> 7).astype("f8") / 2**24 - 1).prod(-1)
            for rows in (half.view("f2"), weight.view("f2"), from_bfloat16(half), narrow, wide):
                yield from mean_of_rows(rows)
        n = n * 2 + 3


def mean_graphs(draws):
    weights = draws.uint16(5 * 6 * 231, 0x3BFF).view("f2").reshape(5, 6, 231)
    yield 0
    for graph in weights:
        yield mean_of_rows(graph)[1]


def select_pairs(draws):
    n = 3001
    is_nan = np.arange(n) % 101 == 3
    weights = np.full(n, np.nan)
    weights[~is_nan] = draws.uint32(int((~is_nan).sum())) % 64 / 64 - 0.25
    for threshold, fraction in ((0, 0), (0.37, 0), (-0.25, 0), (0, 0.1), (0, 1)):
        keep = largest(weights, fraction) if fraction else weights > threshold
        yield from (int(keep.sum()), keep)


def fused(a, b, c):
    """Return a b + c of float32 arrays, rounded once: the product is exact, the sum has 63 bits or more."""
    return (a.astype(np.longdouble) * b + c).astype("f4")


def gine(draws, weight_type="f4", x_type="f4", is_list=False):
    """Forward and backward pass over seven graphs, edge by edge in the documented order."""
    sizes, dim = range(23, 4, -3), 83
    starts = np.cumsum([0, *sizes])
    graphs = [np.tril_indices(size) for size in sizes]  # target, source
    if is_list:
        graphs = [(draws.uint32(6 * size) % size).reshape(-1, 2)[:, ::-1].T for size in sizes]
    num_edges = [len(target) for target, _ in graphs]
    half_weights, half_x = draws.uint16(sum(num_edges), 0x3BFF), draws.uint16(starts[-1] * dim, 0xBBFF)
    weights = (draws.positive(sum(num_edges)) - 0.125).astype("f4")
    x = draws.signed(starts[-1] * dim).astype("f4")
    w, b = draws.signed(2 * dim).astype("f4").reshape(2, dim)
    weights = weights if weight_type == "f4" else widened(half_weights)
    x = {"f4": x, "f2": widened(half_x), "bf16": from_bfloat16(half_x)}[x_type].reshape(-1, dim)
    grad_w, grad_b, outs, grads_x = np.zeros(dim, "f4"), np.zeros(dim, "f4"), [], []
    for k, weight in enumerate(np.split(weights, np.cumsum(num_edges)[:-1])):
        (target, source), own = graphs[k], x[starts[k] : starts[k + 1]]
        kept = np.flatnonzero(np.full(len(weight), True) if is_list else weight > 0)
        target, source, weight = target[kept], source[kept], weight[kept, None]
        messages = fused(weight, w, (own + b)[source])
        total, to_x, part_w, part_b = np.zeros_like(own), np.zeros_like(own), np.zeros(dim, "f4"), np.zeros(dim, "f4")
        for e in range(len(target)):
            total[target[e]] += np.where(messages[e] > 0, messages[e], 0)
        out = own + total
        for e in np.argsort(source, kind="stable"):
            passed = np.where(messages[e] > 0, out[target[e]], np.float32(0))
            to_x[source[e]] += passed
            part_w = fused(weight[e], passed, part_w)
        for row in to_x:
            part_b += row
        grad_w += part_w
        grad_b += part_b
        outs.append(out)
        grads_x.append(out + to_x)  # the gradient of the output is the output
    results = [0, 0, np.concatenate(outs), np.concatenate(grads_x), grad_w, grad_b]
    return [0, *results, *results]  # with one thread and with three


def gine_f32(draws):
    return gine(draws)


def gine_f32_of_halves(draws):
    return gine(draws, "f2", "bf16")


def gine_f32_list(draws):
    return gine(draws, "f4", "f2", is_list=True)


GINE = [gine_f32, gine_f32_of_halves, gine_f32_list] if np.finfo(np.longdouble).nmant >= 63 else []


@pytest.mark.parametrize(
    "oracle",
    [crc, f16_to_f32, f32_to_f16, to_f16, count_nonfinite, triangles, head_means, mean_graphs, select_pairs, *GINE],
    ids=lambda oracle: oracle.__name__,
)
def test_hash_of_the_kernel_is_that_of_numpy(oracle):
    assert fnv1a(oracle(Draws(oracle.__name__))) == EXPECTED[oracle.__name__]
