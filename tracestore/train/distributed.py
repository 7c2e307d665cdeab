"""Train one model in several processes, started by torchrun.

Each rank computes its slice of every global batch. Gradients are summed once per step, outside
of backward, so that a rank that ran out of memory can report it before the others wait for it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed, nn

from tracestore.errors import RankFailedError, TracestoreError, escape_unprintable
from tracestore.oom.ranks import RankGroup

T = TypeVar("T")
# Ranks wait for rank 0 while it writes files and fits the probe.
_TIMEOUT = timedelta(minutes=30)


@contextmanager
def _map_errors() -> Iterator[None]:
    """Turn errors of a collective into RankFailedError."""
    try:
        yield
    except RuntimeError as error:
        reason = escape_unprintable(str(error).splitlines()[0] if str(error) else type(error).__name__, 160)
        raise RankFailedError(f"another rank ended or does not respond ({reason})") from None


class DistributedContext(RankGroup):
    """The processes that train together, as seen by one of them.

    All methods but `allocate` are collective: all ranks call them in the same order. They raise
    RankFailedError if another rank has ended. In a single process they return at once.

    Parameters
    ----------
    alone : bool
        Ignore the other ranks.
    """

    def __init__(self, *, alone: bool = False) -> None:
        is_distributed = not alone and distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if is_distributed else 0
        self.world_size = distributed.get_world_size() if is_distributed else 1
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        # Allocated now and read through numpy, so that nothing can fail after the collective.
        self._integer = torch.zeros(1, dtype=torch.int64)
        self._integer_view = self._integer.numpy()

    @classmethod
    @contextmanager
    def connect(cls, device: str) -> "Iterator[DistributedContext]":
        """Join the ranks that torchrun started, with gloo, and NCCL for tensors on GPUs."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield cls()
            return
        on_gpu = torch.device(device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        with _map_errors():
            distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
        try:
            yield cls()
        finally:
            distributed.destroy_process_group()

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes the files and the log."""
        return self.rank == 0

    # Small values are exchanged on the CPU and need no memory of the device.

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of an integer over the ranks."""
        if self.world_size == 1:
            return value
        self._integer_view[0] = value
        with _map_errors():
            distributed.all_reduce(self._integer, distributed.ReduceOp.MAX)
        return int(self._integer_view[0])

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over the ranks, in place."""
        if self.world_size > 1:
            with _map_errors():
                distributed.all_reduce(value)
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _map_errors():
            distributed.all_gather_object(values, value)
        return values

    # Gradients

    def allocate(self, parameters: Sequence[torch.Tensor]) -> None:
        """Allocate the buffer of `sum_gradients` and its views, so that no rank fails while the others wait."""
        shapes = [p.shape for p in parameters]
        if self.world_size == 1 or [view.shape for view in self._views] == shapes:
            return
        sizes, first = [p.numel() for p in parameters], parameters[0]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views = [part.view(shape) for part, shape in zip(self._flat.split(sizes), shapes, strict=True)]

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the ranks, in place. A missing gradient counts as zeros.

        The parameters share one dtype and device. Afterwards their gradients are views of one buffer.
        """
        if self.world_size == 1:
            return
        parameters = list(parameters)
        self.allocate(parameters)
        gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
        torch.cat(gradients, out=self._flat)
        with _map_errors():
            distributed.all_reduce(self._flat)
        # Not an operation of torch, which could run out of memory after the collective.
        for p, summed in zip(parameters, self._views, strict=True):
            p.grad = summed

    # Errors

    def abort_all(self, error: TracestoreError) -> NoReturn:
        """End all ranks with an error that all of them found. Rank 0 reports it."""
        if self.is_rank_zero:
            raise error
        raise SystemExit(error.exit_code)

    def on_rank_zero(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on all ranks. Its error ends them all."""
        if self.world_size == 1:
            return call()
        value, error = None, None
        if self.is_rank_zero:
            try:
                value = call()
            except TracestoreError as raised:
                error = raised
        message: list[Any] = [None if error is None else error.exit_code, value]
        with _map_errors():
            distributed.broadcast_object_list(message, src=0, device=torch.device("cpu"))
        if error is not None:
            raise error
        code, result = message
        if code is not None:
            raise SystemExit(code)
        return result  # type: ignore[no-any-return]
