"""Dropout and noise that do not depend on how a batch is split.

torch draws masks row after row, so that other ranks or smaller micro-batches draw other masks.
Here the mask of a trace is a pure function of the batch, the position of the trace in it, the
layer and the device type. Its noise is a function of the same values but the device type: a GPU
draws the noise of a CPU up to rounding. A batch that is split gives the same gradients as the
whole batch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tracestore.data.batches.buffers import copy_together
from tracestore.data.order import splitmix64
from tracestore.detectors.layers.model_config import FUSED_DEVICES
from tracestore.detectors.layers.precision import kernel_works

# Masks on a CPU compare 16 random bits, on a GPU 32: a probability is a multiple of 2**-16 or 2**-32.
_STEPS, _KERNEL_STEPS = 1 << 16, 1 << 32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _bound(keep: float, steps: int) -> int:
    """Return the number of steps below which a random integer keeps an element."""
    return min(max(1, round(keep * steps)), steps)


class TraceMasks:
    """Dropout masks for the traces first .. first + count of the batch with this key.

    Attributes
    ----------
    state : torch.Tensor
        ``(2,)`` int64, the key as a signed number and `first`, from which the kernel of a GPU computes masks.
    """

    def __init__(self, key: int, first: int, count: int) -> None:
        self.key, self.first, self.count = key, first, count
        self.state = torch.tensor([key - (key >> 63 << 64), first])

    @functools.cached_property
    def _of_traces(self) -> np.ndarray:
        positions = np.arange(self.first, self.first + self.count, dtype=np.uint64)
        with np.errstate(over="ignore"):
            return splitmix64(np.uint64(self.key) + positions * _GOLDEN)

    def keys(self, stream: int) -> np.ndarray:
        """Return a key for each trace, ``(count,)``, uint64."""
        with np.errstate(over="ignore"):
            return splitmix64(self._of_traces + np.uint64(stream + 1))

    def draw(self, stream: int, rows: Sequence[int], shape: Sequence[int], keep: float) -> tuple[torch.Tensor, float]:
        """Draw the masks of one layer on the CPU, ten times as fast as torch's Bernoulli.

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

        Returns
        -------
        mask : torch.Tensor
            ``(sum(rows), *shape)``, bool, True where an element is kept.
        keep : float
            The exact probability, which differs from the argument by rounding.
        """
        columns = int(np.prod(shape))
        bound = _bound(keep, _STEPS)
        mask = np.empty(sum(rows) * columns, np.bool_)
        begin = 0
        for key, count in zip(self.keys(stream).tolist(), rows, strict=True):
            size = count * columns
            bits = np.random.SFC64(key).random_raw(-(-size // 4)).view(np.uint16)
            # <= with bound - 1, because 2**16 itself does not fit into 16 bits.
            np.less_equal(bits[:size], np.uint16(bound - 1), out=mask[begin : begin + size])
            begin += size
        return torch.from_numpy(mask).view(sum(rows), *shape), bound / _STEPS


def kernel_mask(keys: np.ndarray, sizes: Sequence[int], bound: int) -> np.ndarray:
    """Return what the Triton kernel keeps: for each trace with a key, so many elements, one after the other."""
    elements = [np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN for size in sizes]
    with np.errstate(over="ignore"):
        bits = [splitmix64(key + own) >> np.uint64(32) for key, own in zip(keys, elements, strict=True)]
    return np.concatenate(bits) < bound


def kernel_noise(keys: np.ndarray, columns: int) -> np.ndarray:
    """Return what the Triton kernel draws: standard normal noise ``(n, columns)``, float32, of traces with a key.

    References
    ----------
    Box and Muller 1958, "A Note on the Generation of Random Normal Deviates".
    """
    with np.errstate(over="ignore"):
        bits = splitmix64(keys[:, None] + np.arange(1, columns + 1, dtype=np.uint64) * _GOLDEN)
    steps = np.float32(1 << 24)
    radius = np.sqrt(-2 * np.log(((bits >> np.uint64(40)) + np.uint64(1)).astype("f4") / steps))
    angle = (bits >> np.uint64(8) & np.uint64(0xFFFFFF)).astype("f4") * (np.float32(2 * np.pi) / steps)
    noise: np.ndarray = radius * np.cos(angle)
    return noise


def draw_noise(masks: TraceMasks, stream: int, like: torch.Tensor) -> torch.Tensor:
    """Draw standard normal noise like a tensor ``(count, ...)``, with 24 random bits in each radius and angle."""
    columns = like[0].numel() if len(like) else 0
    if masks_on_device(like.device):
        noise = _run_noise_kernel(masks, stream, like.device, columns)
    else:
        noise = torch.from_numpy(kernel_noise(masks.keys(stream), columns))
    return noise.to(like.device, like.dtype).view(like.shape)


@functools.cache
def _kernel_works(device: torch.device) -> bool:
    """Return whether the Triton kernel runs on a GPU and computes `kernel_mask`; warn if not."""

    def check() -> str | None:
        masks, sizes = TraceMasks(2**64 - 1, 3, 3), [2, 0, 5]
        row_ptr = torch.tensor([0, *np.cumsum(sizes)]).to(device)
        out = _run_kernel(torch.ones(7, 40, device=device), masks, 1 << 31, 5, 0, row_ptr)
        expected = kernel_mask(masks.keys(5), [n * 40 for n in sizes], 1 << 31)
        noise = _run_noise_kernel(masks, 5, out.device, 40).cpu().numpy()
        is_noise = np.allclose(noise, kernel_noise(masks.keys(5), 40), rtol=1e-4, atol=1e-5)
        is_mask = np.array_equal(out.view(-1).cpu().numpy(), expected * np.float32(2))
        return None if is_mask and is_noise else "computes other masks or noise than expected"

    return kernel_works("the dropout kernel", device, check, "masks are drawn on the CPU")


def masks_on_device(device: torch.device) -> bool:
    """Return whether a GPU computes masks by itself."""
    return device.type != "cpu" and device.type in FUSED_DEVICES and _kernel_works(device)


def _run_kernel(
    x: torch.Tensor, masks: TraceMasks, bound: int, stream: int, stream_step: int, row_ptr: torch.Tensor | None
) -> torch.Tensor:
    from tracestore.detectors.layers import dropout_triton as kernels

    return kernels.apply(x, row_ptr, masks.count, _state_on(masks, x.device), stream, stream_step, bound)


def _run_noise_kernel(masks: TraceMasks, stream: int, device: torch.device, columns: int) -> torch.Tensor:
    from tracestore.detectors.layers import dropout_triton as kernels

    return kernels.normal(_state_on(masks, device), stream, masks.count, columns)


def _state_on(masks: TraceMasks, device: torch.device) -> torch.Tensor:
    """Return the state on a GPU, where it stays."""
    if masks.state.device != device:
        (masks.state,) = copy_together([masks.state], device, non_blocking=True)
    return masks.state


class _KernelDropout(torch.autograd.Function):
    """Dropout in one kernel. Backward computes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return _run_kernel(x, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _run_kernel(grads[0], *ctx.arguments), None, None, None, None, None


def drop(
    x: torch.Tensor,
    p: float,
    masks: TraceMasks | None,
    stream: int,
    *,
    stream_step: int = 0,
    row_ptr: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply dropout to x.

    Parameters
    ----------
    x : torch.Tensor
        ``(R, ...)``.
    p : float
        Probability that an element is set to zero.
    masks : TraceMasks or None
        None: masks are drawn by torch.
    stream : int
        Number of the layer; see `TraceMasks.draw`.
    stream_step : int
        R may be a multiple of the number of traces. Row r belongs to trace ``r % count`` then, and to the
        stream ``stream + r // count * stream_step``.
    row_ptr : torch.Tensor, optional
        ``(count + 1,)`` int64: the rows of trace k are ``row_ptr[k] .. row_ptr[k + 1]``, relative to ``row_ptr[0]``.
    """
    if masks is None:
        return F.dropout(x, p)
    if p == 1:
        return x * 0
    if masks_on_device(x.device):
        arguments = masks, _bound(1 - p, _KERNEL_STEPS), stream, stream_step, row_ptr
        out: torch.Tensor = _KernelDropout.apply(x, *arguments)  # type: ignore[no-untyped-call]
        return out
    rows = [1] * masks.count if row_ptr is None else row_ptr.diff().tolist()
    streams = range(len(x) // max(1, masks.count)) if row_ptr is None else range(1)
    drawn = [masks.draw(stream + k * stream_step, rows, x.shape[1:], 1 - p) for k in streams]
    mask, keep = drawn[0] if len(drawn) == 1 else (torch.cat([mask for mask, _ in drawn]), drawn[0][1])
    factors = mask.to(x.device, x.dtype)
    # A 16-bit factor would round the scale; scaling the product instead is computed in float32.
    return x * factors.mul_(1 / keep) if x.dtype.itemsize >= 4 else x * factors * (1 / keep)


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
        self, x: torch.Tensor, masks: TraceMasks | None = None, row_ptr: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply dropout to x ``(R, ...)``; `drop` describes `row_ptr`. By default, each trace has one row."""
        return drop(x, self.p, masks, self.stream, row_ptr=row_ptr) if self.training and self.p > 0 else x
