"""Copies of live tensors, taken before each step and seldom put back."""

import numpy as np
import torch

from tracestore._core.spans import SpanCopies, room_for


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own, at data_ptr(): not a sparse one, nor of a
    class that may be a wrapper around others."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether the core can read the tensor: dense, on the CPU, contiguous."""
    return has_memory(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()


def _address(tensor: torch.Tensor) -> int:
    """Where its memory is; 0 where there is none to ask for."""
    return tensor.data_ptr() if has_memory(tensor) else 0


class TensorCopies:
    """Copies of live tensors, in memory that is kept from one take to the next.

    By the end of a step, weights and state have left the caches, or are in that of the thread
    that wrote them: a copy costs what reading memory does. On the CPU the core therefore copies
    all tensors in one call, past the caches, in the threads that torch's operations run in, each
    the part that is its own there: that takes half the time of torch, tensor by tensor, and the
    next operation is not slower for it. Elsewhere torch copies.
    """

    def __init__(self, *, by_core: bool = True) -> None:
        """by_core: the core keeps looking at the tensors' memory, which then cannot be resized in
        place. False where they are few and small, and not the optimizer's."""
        self._by_core = by_core
        self._asked: list[torch.Tensor] = []
        self._where: list[int] = []
        self._live: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []
        self._job: SpanCopies | None = None
        self._num_in_job = 0

    def take(self, live: list[torch.Tensor]) -> None:
        """Copies the tensors. The same list again means that each has the memory it had."""
        if live is not self._asked and not self._is_listed(live):
            self._list(live)
        if self._job is not None:
            self._job.take(torch.get_num_threads())
        if self._num_in_job < len(self._live):
            with torch.no_grad():
                torch._foreach_copy_(self._saved[self._num_in_job :], self._live[self._num_in_job :])

    def _is_listed(self, live: list[torch.Tensor]) -> bool:
        return len(live) == len(self._asked) and all(
            a is b and _address(a) == where for a, b, where in zip(live, self._asked, self._where, strict=True)
        )

    def _list(self, live: list[torch.Tensor]) -> None:
        # Nothing is listed where it ends half-way.
        self._asked, self._where, self._live, self._saved = [], [], [], []
        self._job, self._num_in_job = None, 0
        raw: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for t in live:
            if self._by_core and _has_bytes(t):
                raw.append(t.detach())
            else:
                rest.append(t)
        spans = [t.reshape(-1).view(torch.uint8).numpy() for t in raw]
        # From numpy, which asks for huge pages: fewer of its pages are looked up than copied.
        room = np.empty(room_for(spans), np.uint8)
        saved: list[torch.Tensor] = []
        job = None
        if raw:
            job = SpanCopies(spans, [t.element_size() for t in raw], room)
            # From the first on, each begins at a multiple of the largest element.
            flat = torch.from_numpy(room[job.begins[0] :])
            pieces = [flat[begin - job.begins[0] :][: t.nbytes] for begin, t in zip(job.begins, raw, strict=True)]
            saved = [piece.view(t.dtype).view_as(t) for piece, t in zip(pieces, raw, strict=True)]
        self._saved = saved + [torch.empty_like(t) for t in rest]
        self._live, self._job, self._num_in_job = raw + rest, job, len(raw)
        self._asked, self._where = live, [_address(t) for t in live]

    @torch.no_grad()
    def restore(self) -> None:
        if self._live:
            torch._foreach_copy_(self._live, self._saved)
