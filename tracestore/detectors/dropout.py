"""Dropout whose masks belong to the traces of a batch.

torch draws masks for the rows that it is given, one after the other: other ranks or smaller
micro-batches, other masks. Here the mask of a trace is a pure function of the batch, the trace's
place in it, the layer and the kind of device, so that a batch that is split is the same batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tracestore.data.order import splitmix64

# Masks on a CPU compare 16 random bits: a probability is a multiple of 2**-16.
_STEPS = 1 << 16


class TraceMasks:
    """Masks for the traces first .. first + count of the batch with this key."""

    def __init__(self, key: int, first: int, count: int) -> None:
        places = np.arange(first, first + count, dtype=np.uint64)
        with np.errstate(over="ignore"):
            self._keys = splitmix64(np.uint64(key) + places * np.uint64(0x9E3779B97F4A7C15))

    def draw(
        self, use: int, rows: Sequence[int], shape: Sequence[int], kept: float, device: torch.device
    ) -> tuple[torch.Tensor, float]:
        """A mask (sum of rows, *shape), bool, and the probability that it is true: `kept`, or what
        comes next to it. rows: of each trace. use: of several draws for a trace, which one."""
        with np.errstate(over="ignore"):
            keys = splitmix64(self._keys + np.uint64(use + 1))
        columns = int(np.prod(shape))
        draw = _draw_on_cpu if device.type == "cpu" else _draw
        mask, kept = draw(keys.tolist(), [n * columns for n in rows], kept, device)
        return mask.view(sum(rows), *shape), kept


def _draw_on_cpu(keys: list[int], sizes: list[int], kept: float, device: torch.device) -> tuple[torch.Tensor, float]:
    """In a tenth of the time that torch's Bernoulli takes."""
    below = min(max(1, round(kept * _STEPS)), _STEPS)
    mask = np.empty(sum(sizes), np.bool_)
    at = 0
    for key, size in zip(keys, sizes, strict=True):
        bits = np.random.SFC64(key).random_raw(-(-size // 4)).view(np.uint16)
        # <=: the largest of 16 bits is in where everything is kept.
        np.less_equal(bits[:size], np.uint16(below - 1), out=mask[at : at + size])
        at += size
    return torch.from_numpy(mask), below / _STEPS


def _draw(keys: list[int], sizes: list[int], kept: float, device: torch.device) -> tuple[torch.Tensor, float]:
    generator = torch.Generator(device)
    values = torch.empty(sum(sizes), device=device)
    for key, part in zip(keys, values.split(sizes), strict=True):
        generator.manual_seed(key)
        part.uniform_(generator=generator)
    return values < kept, kept


class TraceDropout(nn.Module):
    """Dropout (Srivastava et al. 2014) of probability p; use: sets its masks apart from those
    of other layers. Without `masks` torch draws them."""

    def __init__(self, p: float, use: int) -> None:
        super().__init__()
        self.p, self.use = p, use

    def forward(
        self, x: torch.Tensor, masks: TraceMasks | None = None, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """x (R, ...), of which rows[k] belong to trace k; None: one each."""
        if not self.training or self.p == 0:
            return x
        if masks is None:
            return F.dropout(x, self.p)
        if self.p == 1:
            return x * 0
        mask, kept = masks.draw(self.use, [1] * len(x) if rows is None else rows, x.shape[1:], 1 - self.p, x.device)
        factors = mask.to(x.dtype)
        # 16 bits would round the scale: there the product is scaled, which is computed in float32.
        return x * factors.mul_(1 / kept) if x.dtype.itemsize >= 4 else x * factors * (1 / kept)

    def extra_repr(self) -> str:
        return f"p={self.p}, use={self.use}"
