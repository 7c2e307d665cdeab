"""The memory of a batch: one buffer for all of its tensors.

A buffer returns to its pool when the last tensor on it dies. Views and tensors that autograd saved
count, so a batch is never overwritten while something refers to it.
"""

import copyreg
import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from tracestore._core.blocks import MemoryPool, PooledMemory, SharedBuffer

_ALIGN = 64

# A worker process gets a pool of its own.
copyreg.pickle(MemoryPool, lambda pool: (MemoryPool, (pool.max_bytes, pool.max_idle)))


def align_up(num_bytes: int) -> int:
    """Return num_bytes rounded up to the alignment of the tensors of a batch."""
    return -(-num_bytes // _ALIGN) * _ALIGN


class BatchBuffer:
    """Memory of one batch: a block of a MemoryPool, or a slot that processes share.

    Each tensor has a storage over its own bytes, so that pickling one does not write the others.
    The storage keeps the lease of the block.

    Attributes
    ----------
    memory : buffer
        The bytes, writable. The C core gathers into it.
    """

    def __init__(self, memory: PooledMemory | SharedBuffer | np.ndarray) -> None:
        self.memory = memory

    def tensor(self, offset: int, shape: tuple[int, ...], dtype_name: str) -> torch.Tensor:
        """Return a tensor on the bytes from `offset` on, without a copy."""
        dtype, count = getattr(torch, dtype_name), math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = self._flat(offset, count, dtype)
        return flat if len(shape) == 1 else flat.view(shape)

    def _flat(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` values from `offset` on as a tensor of one dimension."""
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)


class TorchBuffer(BatchBuffer):
    """Memory from torch's allocators.

    The allocator of pinned memory reuses a block only after the copies from it to a GPU have ended.
    """

    def __init__(self, num_bytes: int, *, pinned: bool = False) -> None:
        raw = torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=pinned)
        super().__init__(raw.numpy())
        self._storage = raw.untyped_storage()

    def _flat(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype).set_(self._storage, offset // dtype.itemsize, (count,), (1,))


# Returns a buffer of at least the given number of bytes.
Allocate = Callable[[int], BatchBuffer]


def copy_together(tensors: Sequence[torch.Tensor], device: torch.device, *, non_blocking: bool) -> list[torch.Tensor]:
    """Copy small tensors of the host to a GPU at once, from pinned memory.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
    device : torch.device
    non_blocking : bool
        Return before the copy is done.

    Returns
    -------
    list of torch.Tensor
        The copies, views of one buffer of the device.
    """
    begins = [0, *accumulate(align_up(t.nbytes) for t in tensors)]
    staged = torch.empty(max(_ALIGN, begins[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    # Torch would start its threads for some of these copies, which takes longer than the copies.
    whole = staged.numpy()
    for tensor, begin in zip(tensors, begins, strict=False):
        if tensor.nbytes:
            values = np.ascontiguousarray(tensor.numpy())
            whole[begin : begin + tensor.nbytes] = values.reshape(-1).view(np.uint8)
    moved = staged.to(device, non_blocking=non_blocking)
    by_dtype = {dtype: moved.view(dtype) for dtype in {t.dtype for t in tensors}}
    return [
        by_dtype[t.dtype].as_strided(t.shape, t.contiguous().stride(), begin // t.itemsize)
        for t, begin in zip(tensors, begins, strict=False)
    ]
