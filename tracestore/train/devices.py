"""The device and the threads that torch computes on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tracestore.errors import UsageError


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads, and restore the previous number at the end. None: no change."""
    previous = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(previous)


def pick_device(name: str) -> str:
    """Return the torch device for auto, cpu or cuda. Each local rank gets its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name
