"""Training steps that survive running out of memory.

A step that fails leaves no trace: gradients, random state, buffers, metrics, weights and
optimizer state are what they were, the tensors of the failed attempt are freed before the
next one, and the batch is then computed in smaller micro-batches whose weighted gradients
add up to the whole.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from tracestore.errors import InsufficientMemoryError, TracestoreError
from tracestore.oom.cuda_cache import CudaCacheManager, empty_cache
from tracestore.oom.errors import AMBIGUOUS, HOST, SHORT_BYTES, classify, memory_is_short
from tracestore.oom.micro_batch import MicroBatchPolicy
from tracestore.oom.snapshot import (
    OptimizerSnapshot,
    StepCounters,
    StepSnapshot,
    create_optimizer_state,
    writes_after_allocating,
)

T = TypeVar("T")

# What ranks tell each other of an attempt; the largest wins. An ambiguous error is resolved
# before, by its own rank.
_FINE, _DEVICE, _HOST, _OTHER, _AMBIGUOUS = range(5)
_TRIES = 3


class RankGroup(Protocol):
    """What the guard needs of several ranks. Both calls are collectives; what allocates
    does so before the collective starts and nothing that may fail comes after it, so
    that a call that raised can be made again."""

    world_size: int

    def all_reduce_max(self, code: int) -> int:
        """The maximum of an int over the ranks."""

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients over the ranks, in place; a rank without any counts as zeros."""


class SingleRank:
    """One rank."""

    world_size = 1

    def all_reduce_max(self, code: int) -> int:
        return code

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        pass


def _flush_autograd_queue() -> None:
    """A backward pass on the CPU that failed leaves the nodes it had still to visit in the
    autograd engine's queue, and with them the tensors they saved, until the next pass."""
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).neg().backward()


def _code_of(error: BaseException) -> int:
    kind = classify(error)
    if kind is None:
        return _OTHER
    return _AMBIGUOUS if kind == AMBIGUOUS else _HOST if kind == HOST else _DEVICE


class OOMGuard:
    """Runs training steps and survives running out of memory.

        guard = OOMGuard(model, optimizer)
        loss = guard.step(len(batch), lambda begin, end: loss_of(batch[begin:end]))

    The function computes the mean loss of items begin .. end of the batch; step() runs
    forward, backward and the optimizer, and returns the mean loss of the whole batch.
    After a failure it tries once more at the same size, then halves the micro-batch. The
    gradient is that of the whole batch (to rounding; BatchNorm statistics and masks of torch's
    dropout are those of the micro-batches). The size that worked is kept, and doubled
    again after a while; begin_epoch() plans it anew from what was learned. Where one item
    does not fit, InsufficientMemoryError is raised with model, optimizer, metrics and random
    state as they were before the step.

    scaler: a torch.amp.GradScaler. metrics: objects that the loss function updates
    (torchmetrics or others that keep tensors, numbers and lists as attributes).
    on_event: called with each event. on_host_memory: called first where host memory ran
    out (MemoryError, a killed worker, any allocation of a model on the CPU); give back
    caches there. ranks: see step().
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: Any = None,
        metrics: Sequence[Any] = (),
        on_event: Callable[[dict[str, Any]], None] | None = None,
        on_host_memory: Callable[[], None] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.on_event, self.on_host_memory = on_event, on_host_memory
        self.ranks: RankGroup = SingleRank() if ranks is None else ranks
        self.epoch = 0
        self.num_steps = 0
        self.sizes = MicroBatchPolicy()
        self.events: list[dict[str, Any]] = []
        self.cleaner = CudaCacheManager()
        if not optimizer.state:
            create_optimizer_state(optimizer)
        if scaler is not None:
            # Makes its state as well, without which it cannot be put back.
            scaler.scale(torch.zeros((), device=optimizer.param_groups[0]["params"][0].device))
        self._before = StepSnapshot(model, scaler, metrics)
        self._configure_snapshots()

    def _configure_snapshots(self) -> None:
        """What must be kept of it; again where it got another group of parameters."""
        groups = self.optimizer.param_groups
        self._num_groups = len(groups)
        self._parameters = [p for group in groups for p in group["params"]]
        self._on_cpu = all(p.device.type == "cpu" for p in self._parameters)
        # A rank whose own step went well must be able to undo it when another's failed.
        # With a scaler a counter may go up and down again.
        few = self.ranks.world_size == 1 and self.scaler is None and writes_after_allocating(self.optimizer)
        self._optimizer_before: StepCounters | OptimizerSnapshot = (
            StepCounters(self.optimizer) if few else OptimizerSnapshot(self.optimizer)
        )

    @property
    def micro_batch(self) -> int | None:
        """Items of a micro-batch; None: the whole batch."""
        return self.sizes.size

    # State

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes.state_dict(), "num_steps": self.num_steps, "events": list(self.events)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sizes.load_state_dict(state["sizes"])
        self.num_steps, self.events = state["num_steps"], list(state["events"])

    def begin_epoch(self, epoch: int) -> None:
        """An epoch starts or goes on: events carry its number. Where it starts, its
        micro-batches are planned from the failures of the one before."""
        self.epoch = epoch
        self.sizes.begin_epoch(epoch)

    # Steps

    def step(
        self,
        size: int,
        loss_of: Callable[[int, int], torch.Tensor],
        whole: int | None = None,
        at_most: int | None = None,
        seed: Callable[[], Any] | None = None,
    ) -> float:
        """One step over a batch of `size` items, at most `at_most` of them at once; the mean loss.

        `seed` sets the random states that the step begins with, and is called before each
        attempt; without it those of torch, Python and numpy are copied before the first.

        With ranks, each gives its own slice: `size` items (may be 0) of `whole`. No rank
        enters a collective before all know that none has failed; if one has, all take the
        same smaller micro-batches. The result is then the rank's share: the mean loss of
        the whole batch is the sum over the ranks."""
        if len(self.optimizer.param_groups) != self._num_groups:
            self._configure_snapshots()
        whole = size if whole is None else whole
        share = -(-whole // self.ranks.world_size)
        # At least one: a rank without items of its own takes part in what is agreed.
        share = max(1, min(share, at_most or share))
        micro = min(share, self.sizes.size or share)
        cleaned, optimizer_failures, taken = False, 0, False
        while True:
            phase, code, taken, loss = self._attempt(size, whole, micro, loss_of, taken, seed)
            if code == _FINE:
                break
            # Outside every except block: no traceback holds the failed tensors.
            self._clean(code)
            if taken:
                self._retry_on_oom(self._before.restore)
            if phase == "optimizer":
                optimizer_failures += 1
                self._record(phase, micro, micro)
                if optimizer_failures == _TRIES:
                    raise InsufficientMemoryError("out of memory in the optimizer's step")
                continue
            # Fragmentation and full caches are cured by cleaning; after that, size is. A
            # smaller size is tried once, but one item twice.
            after = self.sizes.failed(micro) if cleaned else micro
            self._record(phase, micro, after)
            if cleaned and micro == 1:
                raise InsufficientMemoryError(f"out of memory in {phase}: one item alone does not fit")
            cleaned = not cleaned or after > 1
            micro = after
        self.num_steps += 1
        self.sizes.worked(micro, share)
        self.cleaner.after_step()
        return loss

    def _attempt(
        self,
        size: int,
        whole: int,
        micro: int,
        loss_of: Callable[[int, int], torch.Tensor],
        taken: bool,
        seed: Callable[[], Any] | None,
    ) -> tuple[str, int, bool, float]:
        """Everything from the snapshot to the optimizer's step, once. -> the phase that
        failed, what the ranks agree on, whether the snapshot is whole, and the loss."""
        phase, code, loss, error = "forward", _FINE, 0.0, None
        value = part = None
        try:
            if not taken:
                self._before.take(seed)
                taken = True
            self.optimizer.zero_grad(set_to_none=True)
            for begin in range(0, size, micro):
                end = min(size, begin + micro)
                phase = "forward"
                value = loss_of(begin, end)
                part = value if end - begin == whole else value * ((end - begin) / whole)
                loss += float(part.detach())
                phase = "backward"
                (part if self.scaler is None else self.scaler.scale(part)).backward()
                value = part = None
        except Exception as raised:
            code = _code_of(raised)
            error = raised if code == _OTHER else None
        value = part = None
        if code == _AMBIGUOUS:
            # A rank without items has no smaller case: its snapshot failed.
            code, error = self._resolve(lambda: self._one_item(loss_of) if size else None)
        code = self._agreed(code, error)
        if code == _FINE:
            if self.ranks.world_size > 1:
                self._retry_on_oom(lambda: self.ranks.sum_gradients(self._parameters))
            phase, code = "optimizer", self._optimizer_step()
        return phase, code, taken, loss

    def _one_item(self, loss_of: Callable[[int, int], torch.Tensor]) -> None:
        loss = loss_of(0, 1)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _resolve(self, smallest_case: Callable[[], Any]) -> tuple[int, Exception | None]:
        """Decide whether an ambiguous error was out of memory, by the smallest case.

        A missing kernel fails for one item as well, while memory is not short. -> the
        code, and the error of the smallest case where it is not of memory."""
        self._clean(_HOST)
        code, error = _HOST, None
        try:
            smallest_case()
        except Exception as raised:
            code = _code_of(raised)
            if code == _AMBIGUOUS:
                code = _HOST if memory_is_short(self._needed_bytes()) else _OTHER
            error = raised if code == _OTHER else None
        self.optimizer.zero_grad(set_to_none=True)
        return code, error

    def _needed_bytes(self) -> int:
        """Bytes that one item needs at least: packed copies of the weights, and scratch."""
        weights_bytes: int = sum(p.numel() * p.element_size() for p in self._parameters)
        return SHORT_BYTES + 2 * weights_bytes

    def _agreed(self, code: int, error: BaseException | None) -> int:
        """The worst that any rank met; an error that is not of memory ends all of them."""
        if self.ranks.world_size == 1:
            if error is not None:
                raise error
            return code
        told = code
        code = self._retry_on_oom(lambda: self.ranks.all_reduce_max(told))
        if error is not None:
            raise error
        if code == _OTHER:
            raise TracestoreError("another rank failed; its message says why")
        return code

    def _retry_on_oom(self, action: Callable[[], T]) -> T:
        """Something that can be done again from the start and has to be done: putting
        back what was, and a collective in which the others may wait already."""
        for _ in range(_TRIES):
            try:
                return action()
            except Exception as error:
                code = _code_of(error)
                if code == _OTHER or (code == _AMBIGUOUS and not memory_is_short(self._needed_bytes())):
                    raise
            gc.collect()
            empty_cache()
        raise InsufficientMemoryError("out of memory again and again between two attempts")

    def _optimizer_step(self) -> int:
        """The optimizer's step, on all ranks or on none. -> what they agree on."""
        taken, code, error = False, _FINE, None
        try:
            self._optimizer_before.take()
            taken = True
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        except Exception as raised:
            code = _code_of(raised)
            if code == _AMBIGUOUS:
                code = _HOST if memory_is_short(self._needed_bytes()) else _OTHER
            error = raised if code == _OTHER else None
        code = self._agreed(code, error)
        if code != _FINE and taken:
            self._retry_on_oom(self._optimizer_before.restore)
        return code

    def evaluate(self, size: int, run: Callable[[int, int], Any]) -> list[Any]:
        """run(begin, end) over a batch without gradients, in micro-batches that fit. Each
        rank for itself: nothing is agreed."""
        micro, cleaned = max(1, min(size, self.sizes.size or size)), False
        while True:
            results: list[Any] = []
            code = _FINE
            try:
                for begin in range(0, size, micro):
                    results.append(run(begin, min(size, begin + micro)))
            except Exception as error:
                code = _code_of(error)
                if code == _OTHER:
                    raise
            if code == _FINE:
                return results
            results.clear()
            if code == _AMBIGUOUS:
                code, error_of_one = self._resolve(lambda: run(0, 1))
                if error_of_one is not None:
                    raise error_of_one
            self._clean(code)
            after = max(1, micro // 2) if cleaned else micro
            self._record("evaluation", micro, after)
            if cleaned and micro == 1:
                raise InsufficientMemoryError("out of memory in evaluation: one item alone does not fit")
            micro, cleaned = after, not cleaned or after > 1

    def _clean(self, code: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.on_host_memory is not None and (code == _HOST or self._on_cpu):
            self.on_host_memory()
        self._retry_on_oom(_flush_autograd_queue)
        gc.collect()
        empty_cache()

    def _record(self, phase: str, before: int, after: int) -> None:
        event = {
            "epoch": self.epoch,
            "step": self.num_steps,
            "phase": phase,
            "size_before": before,
            "size_after": after,
        }
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)
