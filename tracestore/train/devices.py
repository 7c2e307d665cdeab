"""The number of threads of torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tracestore.errors import UsageError


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Run with `count` threads of torch, then set the number that was before. None: change nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def pick_device(name: str) -> str:
    """auto, cpu or cuda -> a torch device, of several GPUs this rank's."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name
