"""Copies of live tensors, taken before each step and seldom put back."""

import numpy as np
import torch

from tracestore._core.gather import Copies
from tracestore.store import schema

# The core copies elements of 2 bytes without looking at them.
_RAW = schema.dtype_code("float16")


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether the core can read the tensor: dense, on the CPU, contiguous, whole elements of 2 bytes."""
    # Of torch's own classes: others may be wrappers that have no memory of their own.
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_plain and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes % 2 == 0


def address(tensor: torch.Tensor) -> int:
    """Where its memory is; 0 for one that has none of its own, a sparse one, say."""
    return tensor.data_ptr() if _has_bytes(tensor) else 0


class TensorCopies:
    """Copies of live tensors, in memory that is kept from one take to the next.

    By the end of a step, weights and state have left the caches: a copy costs what reading and
    writing memory does. On the CPU the core therefore copies all tensors in one call, past the
    caches: that takes two thirds of the time of torch, tensor by tensor, and several threads
    would not shorten it. Elsewhere torch copies.
    """

    def __init__(self, *, by_core: bool = True) -> None:
        """by_core: the core keeps looking at the tensors' memory, which then cannot be resized in
        place. False where they are few and small, and not the optimizer's."""
        self._by_core = by_core
        self._asked: list[torch.Tensor] = []
        self._where: list[int] = []
        self._live: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []
        self._job: Copies | None = None
        self._num_in_job = 0

    def take(self, live: list[torch.Tensor]) -> None:
        """Copies the tensors. The same list again means that each has the memory it had."""
        if live is not self._asked and not self._is_listed(live):
            self._list(live)
        if self._job is not None:
            self._job.run()
        if self._num_in_job < len(self._live):
            with torch.no_grad():
                torch._foreach_copy_(self._saved[self._num_in_job :], self._live[self._num_in_job :])

    def _is_listed(self, live: list[torch.Tensor]) -> bool:
        return len(live) == len(self._asked) and all(
            a is b and address(a) == where for a, b, where in zip(live, self._asked, self._where, strict=True)
        )

    def _list(self, live: list[torch.Tensor]) -> None:
        self._asked, self._job, self._num_in_job = [], None, 0
        raw: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for t in live:
            if self._by_core and _has_bytes(t):
                raw.append(t.detach())
            else:
                rest.append(t)
        # The largest elements first: then each copy is aligned to its own.
        raw.sort(key=torch.Tensor.element_size, reverse=True)
        # From numpy, which asks for huge pages: fewer of its pages are looked up than copied.
        flat = torch.from_numpy(np.empty(sum(t.nbytes for t in raw), np.uint8))
        pieces = flat.split([t.nbytes for t in raw])
        self._saved = [piece.view(t.dtype).view_as(t) for piece, t in zip(pieces, raw, strict=True)]
        self._saved += [torch.empty_like(t) for t in rest]
        self._live = raw + rest
        if raw:
            self._job = Copies([t.reshape(-1).view(torch.uint8).numpy() for t in raw], _RAW, _RAW)
            self._job.aim(flat.numpy())
        self._num_in_job = len(raw)
        self._asked, self._where = live, [address(t) for t in live]

    @torch.no_grad()
    def restore(self) -> None:
        if self._live:
            torch._foreach_copy_(self._live, self._saved)
