"""Several processes that train one model together, started by torchrun.

Each rank computes its slice of every global batch. Gradients are summed once a step,
outside of backward, so that a rank that runs out of memory can say so before the others
wait for it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed

from tracestore.errors import RankFailedError, TracestoreError, escape_unprintable

T = TypeVar("T")
# The longest that ranks wait for one: rank 0 writes files and scores alone.
_TIMEOUT = timedelta(minutes=30)


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = escape_unprintable(str(error).splitlines()[0] if str(error) else type(error).__name__, 160)
        raise RankFailedError(f"another rank ended or does not answer ({reason})") from None


class DistributedContext:
    """This process among those that train together; alone where there are no others.

    Every method but `allocate` is collective: all ranks call it, in the same order.
    RankFailedError where another rank is gone.
    """

    def __init__(self, *, alone: bool = False) -> None:
        """alone: as if there were no others."""
        self._together = not alone and distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if self._together else 0
        self.world_size = distributed.get_world_size() if self._together else 1
        self._flat: torch.Tensor | None = None
        # Made beforehand, and read through numpy: nothing that may fail comes after the collective.
        self._code = torch.zeros(1, dtype=torch.int64)
        self._code_view = self._code.numpy()

    @classmethod
    @contextmanager
    def connect(cls, device: str) -> "Iterator[DistributedContext]":
        """Joins the ranks that torchrun started (RANK and WORLD_SIZE): gloo, and NCCL for
        tensors on GPUs."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield cls()
            return
        on_gpu = torch.device(device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        with _reported():
            distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
        try:
            yield cls()
        finally:
            distributed.destroy_process_group()

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes the files and the log."""
        return self.rank == 0

    # Small values: on the CPU, so that they need no memory of the device.

    def all_reduce_max(self, code: int) -> int:
        """The largest code of all ranks."""
        if self.world_size == 1:
            return code
        self._code_view[0] = code
        with _reported():
            distributed.all_reduce(self._code, distributed.ReduceOp.MAX)
        return int(self._code_view[0])

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a CPU tensor over the ranks, in place."""
        if self.world_size > 1:
            with _reported():
                distributed.all_reduce(value)
        return value

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _reported():
            distributed.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value."""
        if self.world_size == 1:
            return value
        values = [value]
        with _reported():
            distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def barrier(self) -> None:
        self.all_reduce_max(0)

    # Gradients

    def allocate(self, parameters: Sequence[torch.Tensor]) -> None:
        """The buffer of sum_gradients, beforehand: no rank fails while the others wait."""
        size, first = sum(p.numel() for p in parameters), parameters[0]
        if self.world_size > 1 and (self._flat is None or len(self._flat) != size):
            self._flat = torch.zeros(size, dtype=first.dtype, device=first.device)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sums the gradients of parameters of one dtype and device over the ranks, in one
        buffer, of which they are views afterwards. A parameter without one adds zeros."""
        if self.world_size == 1:
            return
        parameters = list(parameters)
        self.allocate(parameters)
        assert self._flat is not None
        pieces = [
            piece.view_as(p)
            for piece, p in zip(self._flat.split([p.numel() for p in parameters]), parameters, strict=True)
        ]
        for piece, p in zip(pieces, parameters, strict=True):
            if p.grad is None:
                piece.zero_()
            else:
                piece.copy_(p.grad)
        with _reported():
            distributed.all_reduce(self._flat)
        for piece, p in zip(pieces, parameters, strict=True):
            p.grad = piece

    # Errors

    def abort_all(self, error: TracestoreError) -> NoReturn:
        """Ends all ranks with an error that all of them have: rank 0 says it."""
        if self.is_rank_zero:
            raise error
        raise SystemExit(error.exit_code)

    def on_rank_zero(self, call: Callable[[], T]) -> T:
        """What rank 0's call gives, on all ranks; its error ends them all."""
        if self.world_size == 1:
            return call()
        value, error = None, None
        if self.is_rank_zero:
            try:
                value = call()
            except TracestoreError as raised:
                error = raised
        code = self.broadcast_object(-1 if error is None else error.exit_code)
        if error is not None:
            raise error
        if code >= 0:
            raise SystemExit(code)
        return self.broadcast_object(value)  # type: ignore[return-value]
