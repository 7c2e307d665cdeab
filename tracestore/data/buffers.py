"""Where a batch lies: one buffer of memory for all its tensors.

A buffer goes back to where it came from when the last tensor on it dies, views and
tensors saved for a backward pass included, so that no batch is overwritten while
somebody holds it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tracestore._core.blocks import Lease, SlotLease

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int64": torch.int64,
}
_ALIGN = 64


def dtype_bytes(name: str) -> int:
    return TORCH_DTYPES[name].itemsize


def align_up(num_bytes: int) -> int:
    """Bytes that an array of num_bytes takes in a buffer."""
    return -(-num_bytes // _ALIGN) * _ALIGN


class BatchBuffer(ABC):
    """Memory of one batch: `buffer` to write to, and tensors on parts of it."""

    buffer: Any

    def tensor(self, offset: int, shape: tuple[int, ...], name: str) -> torch.Tensor:
        """The bytes from `offset` on as a tensor of a dtype name."""
        dtype, count = TORCH_DTYPES[name], math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = self._flat(offset, count, dtype)
        return flat if len(shape) == 1 else flat.view(shape)

    @abstractmethod
    def _flat(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor: ...


class PooledBuffer(BatchBuffer):
    """A block of a BlockPool, or a slot that processes share. Each tensor has a storage of its own over its part, which
    keeps the lease, so that pickling one does not write the others."""

    def __init__(self, lease: Lease | SlotLease) -> None:
        self.buffer = lease

    def _flat(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset)


class TorchBuffer(BatchBuffer):
    """Memory from torch; pinned: its allocator knows which copies to a GPU are still
    under way, and uses blocks again."""

    def __init__(self, num_bytes: int, *, pinned: bool = False) -> None:
        raw = torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._storage, self.buffer = raw.untyped_storage(), raw.numpy()

    def _flat(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype).set_(self._storage, offset // dtype.itemsize, (count,), (1,))


# From the number of bytes of a batch to its memory.
Allocate = Callable[[int], BatchBuffer]


def as_tensor(array: np.ndarray, name: str) -> torch.Tensor:
    """A copy of a stored array as a tensor of its dtype."""
    raw = torch.from_numpy(np.array(array).view("i2") if name == "bfloat16" else np.array(array))
    return raw.view(torch.bfloat16) if name == "bfloat16" else raw
