"""Dropout whose masks do not depend on how a batch is split.

torch draws masks row after row, so that other ranks or smaller micro-batches draw other masks.
Here the mask of a trace is a pure function of the batch, the position of the trace in it, the
layer and the device type. A batch that is split gives the same gradients as the whole batch.
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
    """Dropout masks for the traces first .. first + count of the batch with this key."""

    def __init__(self, key: int, first: int, count: int) -> None:
        positions = np.arange(first, first + count, dtype=np.uint64)
        with np.errstate(over="ignore"):
            self._keys = splitmix64(np.uint64(key) + positions * np.uint64(0x9E3779B97F4A7C15))

    def draw(
        self, stream: int, rows: Sequence[int], shape: Sequence[int], keep: float, device: torch.device
    ) -> tuple[torch.Tensor, float]:
        """Draw the masks of one layer.

        Parameters
        ----------
        stream : int
            Number of the layer: layers with different streams draw independent masks.
        rows : sequence of int
            Number of rows of each trace.
        shape : sequence of int
            Shape of a row.
        keep : float
            Probability that an element is kept.
        device : torch.device

        Returns
        -------
        mask : torch.Tensor
            ``(sum(rows), *shape)``, bool, True where an element is kept.
        keep : float
            The exact probability, which differs from the argument by rounding.
        """
        with np.errstate(over="ignore"):
            keys = splitmix64(self._keys + np.uint64(stream + 1))
        columns = int(np.prod(shape))
        draw = _draw_on_cpu if device.type == "cpu" else _draw
        mask, keep = draw(keys.tolist(), [n * columns for n in rows], keep, device)
        return mask.view(sum(rows), *shape), keep


def _draw_on_cpu(keys: list[int], sizes: list[int], keep: float, device: torch.device) -> tuple[torch.Tensor, float]:
    """Draw ten times as fast as torch's Bernoulli."""
    bound = min(max(1, round(keep * _STEPS)), _STEPS)
    mask = np.empty(sum(sizes), np.bool_)
    begin = 0
    for key, size in zip(keys, sizes, strict=True):
        bits = np.random.SFC64(key).random_raw(-(-size // 4)).view(np.uint16)
        # <= with bound - 1, because 2**16 itself does not fit into 16 bits.
        np.less_equal(bits[:size], np.uint16(bound - 1), out=mask[begin : begin + size])
        begin += size
    return torch.from_numpy(mask), bound / _STEPS


def _draw(keys: list[int], sizes: list[int], keep: float, device: torch.device) -> tuple[torch.Tensor, float]:
    generator = torch.Generator(device)
    values = torch.empty(sum(sizes), device=device)
    for key, of_trace in zip(keys, values.split(sizes), strict=True):
        generator.manual_seed(key)
        of_trace.uniform_(generator=generator)
    return values < keep, keep


class TraceDropout(nn.Module):
    """Dropout with masks of `TraceMasks`, or of torch where none are given.

    Parameters
    ----------
    p : float
        Probability that an element is set to zero.
    stream : int
        Number of the layer; see `TraceMasks.draw`.

    References
    ----------
    Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".
    """

    def __init__(self, p: float, stream: int) -> None:
        super().__init__()
        self.p, self.stream = p, stream

    def forward(
        self, x: torch.Tensor, masks: TraceMasks | None = None, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Apply dropout to x ``(R, ...)``, of which ``rows[k]`` rows belong to trace k (default: one each)."""
        if not self.training or self.p == 0:
            return x
        if masks is None:
            return F.dropout(x, self.p)
        if self.p == 1:
            return x * 0
        mask, keep = masks.draw(self.stream, [1] * len(x) if rows is None else rows, x.shape[1:], 1 - self.p, x.device)
        factors = mask.to(x.dtype)
        # A 16-bit factor would round the scale; scaling the product instead is computed in float32.
        return x * factors.mul_(1 / keep) if x.dtype.itemsize >= 4 else x * factors * (1 / keep)
