"""Reduced precision on processors and GPUs that lack some of its kernels, and the check of the kernels of detectors."""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tracestore.detectors.layers.model_config import Precision
from tracestore.errors import UsageError

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# The layers of the detectors that autocast computes in reduced precision.
_PROBES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(8, 8, batch_first=True, bidirectional=True),
    "Linear": lambda: nn.Linear(8, 8),
}


@functools.cache
def has_kernel(layer: str, device_type: str, dtype: torch.dtype) -> bool:
    """Return whether a layer runs forward and backward under autocast, found by trying a tiny case.

    oneDNN has no bfloat16 LSTM for x86-64 processors without AVX-512, for example, and
    reports it only when the layer runs.

    Parameters
    ----------
    layer : {"LSTM", "Linear"}
    device_type : str
        As in ``torch.device.type``.
    dtype : torch.dtype
        The autocast dtype.

    Raises
    ------
    RuntimeError
        The tiny case fails in float32 as well, so the dtype is not the cause.
    """
    try:
        _try(layer, device_type, dtype)
    except (RuntimeError, NotImplementedError):
        _try(layer, device_type, None)
        return False
    return True


def _try(layer: str, device_type: str, dtype: torch.dtype | None) -> None:
    """Run a tiny case, without drawing from the caller's random state."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        module = _PROBES[layer]().to(device_type)
        x = torch.zeros(2, 3, 8, device=device_type, requires_grad=True)
        with torch.autocast(device_type, dtype, enabled=dtype is not None):
            out = module(x)
        (out[0] if isinstance(out, tuple) else out).float().sum().backward()


def float32_layers(precision: Precision, device_type: str) -> list[str]:
    """Return the layers that run in float32 because the device has no kernel for the precision.

    Parameters
    ----------
    precision : {"float32", "bf16", "fp16"}
    device_type : str

    Raises
    ------
    UsageError
        Linear layers are among them, so that the precision has no use on this device.
    """
    dtype = _autocast_dtype(precision, device_type)
    missing = [] if dtype is None else [layer for layer in _PROBES if not has_kernel(layer, device_type, dtype)]
    if "Linear" in missing:
        raise UsageError(
            f"--precision {precision}: no kernel for linear layers in {dtype} on this {device_type}; use float32"
        )
    return missing


def autocast_for(model: nn.Module, precision: Precision, device: torch.device) -> torch.autocast:
    """Return the autocast context that computes a detector in a precision.

    The LSTM layers of `model` are changed to run in float32 inside the context where
    `float32_layers` names them. On a CPU, float16 is computed in float32.

    Parameters
    ----------
    model : nn.Module
    precision : {"float32", "bf16", "fp16"}
    device : torch.device

    Raises
    ------
    UsageError
        See `float32_layers`.
    """
    dtype = _autocast_dtype(precision, device.type)
    if "LSTM" in float32_layers(precision, device.type):
        for module in model.modules():
            if isinstance(module, nn.LSTM):
                _run_in_float32(module)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def kernel_works(kernel: str, device: torch.device, check: Callable[[], str | None], instead: str) -> bool:
    """Return whether a kernel passes a check, which returns None or what is wrong; warn if not.

    An out-of-memory error is raised, because the kernel may work.
    """
    try:
        what = check()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("%s failed", kernel, exc_info=True)
        what = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
    if what is not None:
        text = f"{kernel} on {device} {what}; {instead}, which is slower."
        advice = "Please report this with the output of: tracestore doctor"
        warnings.warn(f"{text} {advice}", RuntimeWarning, stacklevel=4)
    return what is None


def _autocast_dtype(precision: Precision, device_type: str) -> torch.dtype | None:
    dtype = AUTOCAST_DTYPES.get(precision)
    return None if dtype == torch.float16 and device_type == "cpu" else dtype


def _run_in_float32(module: nn.Module) -> None:
    forward = module.forward

    def in_float32(x: torch.Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return forward(x.float())

    module.forward = in_float32
