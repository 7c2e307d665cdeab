"""Where a batch lies: one piece of memory for all its tensors.

A piece goes back to where it came from when the last tensor on it dies, views and
tensors saved for a backward pass included, so that no batch is overwritten while
somebody holds it.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from tracestore._core.blocks import Lease
from tracestore.store import schema

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int64": torch.int64,
}
_ALIGN = 64


def dtype_bytes(name: str) -> int:
    return TORCH_DTYPES[name].itemsize


def padded(num_bytes: int) -> int:
    """Bytes that an array of num_bytes takes in a piece."""
    return -(-num_bytes // _ALIGN) * _ALIGN


class Piece:
    """num_bytes of memory, handed out from front to back as tensors."""

    def __init__(self, num_bytes: int) -> None:
        self._used, self._num_bytes = 0, num_bytes

    def _tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def take(self, shape: tuple[int, ...], name: str) -> tuple[torch.Tensor, np.ndarray]:
        """The next tensor of a dtype name, and its bytes as a flat uint8 array to write to."""
        dtype, count = TORCH_DTYPES[name], math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype), np.empty(0, "u1")
        size = count * dtype.itemsize
        if self._used + size > self._num_bytes:
            raise AssertionError(f"a batch of {self._used + size} bytes in {self._num_bytes}")
        tensor = self._tensor(self._used, count, dtype)
        self._used += padded(size)
        raw = tensor.view(torch.int16) if dtype == torch.bfloat16 else tensor
        return tensor if len(shape) == 1 else tensor.view(shape), raw.numpy().view("u1")


class LeasedPiece(Piece):
    """A block of a BlockPool. Each tensor has a storage of its own over its part, which
    keeps the lease, so that pickling one does not write the others."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(len(lease))
        self._lease: Any = lease

    def _tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self._lease, dtype=dtype, count=count, offset=offset)


class TorchPiece(Piece):
    """Memory from torch: pinned (its allocator knows which copies to a GPU are still
    under way and uses blocks again), or shared between processes."""

    def __init__(self, num_bytes: int, *, pinned: bool = False, shared: bool = False) -> None:
        super().__init__(num_bytes)
        if shared:
            self._storage = torch.UntypedStorage._new_shared(max(1, num_bytes))
        else:
            self._storage = torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=pinned).untyped_storage()

    def _tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype).set_(self._storage, offset // dtype.itemsize, (count,), (1,))


class SeparatePieces(Piece):
    """Each tensor by itself from torch: for single items."""

    def __init__(self) -> None:
        super().__init__(0)

    def take(self, shape: tuple[int, ...], name: str) -> tuple[torch.Tensor, np.ndarray]:
        dtype = TORCH_DTYPES[name]
        tensor = torch.empty(shape, dtype=dtype)
        raw = tensor.view(torch.int16) if dtype == torch.bfloat16 else tensor
        return tensor, raw.numpy().reshape(-1).view("u1")


# From the number of bytes of a batch to its memory.
Allocate = Callable[[int], Piece]


def allocate_here(num_bytes: int) -> Piece:
    """In a DataLoader's worker process memory that the parent can map, so that the batch
    is not copied on its way; elsewhere separate tensors."""
    return SeparatePieces() if get_worker_info() is None else TorchPiece(num_bytes, shared=True)


def as_tensor(array: np.ndarray, name: str) -> torch.Tensor:
    """A copy of a stored array as a tensor of its dtype."""
    tensor, out = SeparatePieces().take(array.shape, name)
    out.view(schema.storage_dtype(name))[:] = np.ascontiguousarray(array).reshape(-1)
    return tensor
