"""Training steps that survive running out of memory.

A step that fails leaves no trace: gradients, random state and buffers are what they
were, the tensors of the failed attempt are freed before the next one, and the batch is
then computed in smaller micro-batches whose weighted gradients add up to the whole.
"""

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tracestore.errors import DoesNotFitError

_DEVICE_TEXTS = (
    "cuda out of memory",
    "cuda error: out of memory",
    "hip out of memory",
    "hip error: out of memory",
    "xpu out of memory",
    "mps backend out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
)
_FATAL_TEXTS = ("illegal memory access", "device-side assert", "unspecified launch failure")
_GROW_AFTER_STEPS = 50
# State that Adam, AdamW, Adamax, RMSprop, Adagrad and SGD begin at zero.
_ZERO_STATE = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "momentum_buffer", "sum"}
)


def classify(error: BaseException) -> str | None:
    """ "device" (memory of the device that computes, also the CPU's allocator), "host"
    (MemoryError, a killed worker, full shared memory), or None for anything else."""
    text = str(error).lower()
    if any(t in text for t in _FATAL_TEXTS):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, MemoryError):
        return "host"
    if isinstance(error, RuntimeError):
        if any(t in text for t in _DEVICE_TEXTS):
            return "device"
        killed = "dataloader worker" in text and ("killed" in text or "exited unexpectedly" in text)
        if killed or ("unable to" in text and "shared memory" in text) or "no space left on device" in text:
            return "host"
    return None


def random_state() -> dict[str, Any]:
    """The random states of torch (CPU and GPUs), Python and numpy."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocates what the optimizer keeps a parameter now, before training, as zeros: a
    step with zero gradients and learning rate, whose counters are then set back."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    # Only what is known to begin at zero is set back. Optimizers with other state (NAdam's
    # product, Rprop's step sizes) keep what a step without a gradient made of it.
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name in _ZERO_STATE:
                value.zero_()


class _OptimizerSnapshot:
    """What a failed optimizer step must not have changed, in buffers made beforehand."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # A fused optimizer allocates nothing once it starts to write, so that its
        # counters alone may be ahead; others are copied whole.
        groups = {(p.device, p.dtype) for g in optimizer.param_groups for p in g["params"]}
        fused = all(g.get("fused") for g in optimizer.param_groups) and len(groups) == len(optimizer.param_groups) == 1
        self._live: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
                self._live += [v for k, v in tensors.items() if k == "step" or not fused]
                self._live += [] if fused else [p.data]
        self._saved = [torch.empty_like(t) for t in self._live]

    @torch.no_grad()
    def take(self) -> None:
        for saved, live in zip(self._saved, self._live, strict=True):
            saved.copy_(live)

    @torch.no_grad()
    def restore(self) -> None:
        for saved, live in zip(self._saved, self._live, strict=True):
            live.copy_(saved)


class OOMGuard:
    """Runs training steps and survives running out of memory.

        guard = OOMGuard(model, optimizer)
        loss = guard.step(len(batch), lambda begin, end: loss_of(batch[begin:end]))

    The function computes the mean loss of items begin .. end of the batch; step() runs
    forward, backward and the optimizer, and returns the mean loss of the whole batch.
    After a failure it tries once more at the same size, then halves the micro-batch. The
    gradient is that of the whole batch (to rounding; BatchNorm statistics and dropout
    masks are those of the micro-batches). The size that worked is kept, and doubled
    again after a while. Where one item does not fit, DoesNotFitError is raised with
    model, optimizer and random state as they were before the step.

    scaler: a torch.amp.GradScaler. on_event: called with each event. on_host_memory:
    called first where host memory ran out (MemoryError, a killed worker); give back
    caches there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: Any = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        on_host_memory: Callable[[], None] | None = None,
        ranks: Any = None,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.on_event, self.on_host_memory, self.ranks = on_event, on_host_memory, ranks
        self.epoch = 0
        self.num_steps = 0
        self.micro_batch: int | None = None
        self.events: list[dict[str, Any]] = []
        self._good_steps = 0
        self._grow_after = _GROW_AFTER_STEPS
        self._largest = 0
        if not optimizer.state:
            create_optimizer_state(optimizer)
        self._snapshot = _OptimizerSnapshot(optimizer)

    # State

    def state_dict(self) -> dict[str, Any]:
        return {
            "micro_batch": self.micro_batch,
            "good_steps": self._good_steps,
            "grow_after": self._grow_after,
            "num_steps": self.num_steps,
            "events": list(self.events),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.micro_batch = state["micro_batch"]
        self._good_steps, self._grow_after = state["good_steps"], state["grow_after"]
        self.num_steps, self.events = state["num_steps"], list(state["events"])
        self._snapshot = _OptimizerSnapshot(self.optimizer)

    # Steps

    def step(
        self,
        size: int,
        loss_of: Callable[[int, int], torch.Tensor],
        whole: int | None = None,
        at_most: int | None = None,
    ) -> float:
        """One step over a batch of `size` items, at most `at_most` of them at once; the mean
        loss. With ranks, `size` of the `whole` batch are this rank's (may be 0), and the
        result is its share of the mean."""
        before, buffers, scaler_state = self._prepare()
        # The last batch of an epoch is short and says nothing of what fits.
        self._largest = max(self._largest, size)
        micro = max(1, min(size, self.micro_batch or size, at_most or size))
        retried = False
        while True:
            phase, kind, loss = self._attempt(size, micro, loss_of, whole or size)
            if self.ranks is not None and self.ranks.agree(kind is not None) and kind is None:
                phase, kind = "another rank", "device"
            if kind is None:
                break
            # Outside the except block: no traceback holds the failed tensors.
            self._clean(kind)
            self._give_back(before, buffers, scaler_state)
            after = micro if not retried else max(1, micro // 2)
            self._record(phase, micro, after)
            if retried and micro == 1:
                raise DoesNotFitError(f"out of memory in {phase}: one item alone does not fit")
            # Fragmentation is cured by the first cleaning; after that, size is. A smaller
            # size is tried once, but one item twice.
            if retried:
                micro = self.micro_batch = after
                self._good_steps = 0
            retried = micro > 1 or not retried
        if self.ranks is not None:
            self.ranks.sum_gradients([p for g in self.optimizer.param_groups for p in g["params"]])
        try:
            self._optimizer_step()
        except DoesNotFitError:
            self._give_back(before, buffers, scaler_state)
            raise
        self.num_steps += 1
        self._grow()
        return loss

    def _give_back(self, before: dict[str, Any], buffers: list[torch.Tensor], scaler_state: Any) -> None:
        """Random state, buffers and scaler as _prepare found them."""
        restore_random_state(before)
        with torch.no_grad():
            for buffer, saved in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(saved)
        if scaler_state is not None:
            self.scaler.load_state_dict(scaler_state)

    def _attempt(
        self, size: int, micro: int, loss_of: Callable[[int, int], torch.Tensor], whole: int
    ) -> tuple[str, str | None, float]:
        """Forward and backward of all micro-batches. -> phase that failed, kind of memory or None, loss."""
        phase, total = "forward", 0.0
        try:
            self.optimizer.zero_grad(set_to_none=True)
            for begin in range(0, size, micro):
                end = min(size, begin + micro)
                phase = "forward"
                loss = loss_of(begin, end)
                share = loss * ((end - begin) / whole) if end - begin != whole else loss
                total += float(share.detach())
                phase = "backward"
                (share if self.scaler is None else self.scaler.scale(share)).backward()
                del loss, share
        except Exception as error:
            kind = classify(error)
            if kind is None:
                raise
        else:
            return phase, None, total
        return phase, kind, total

    def _prepare(self) -> tuple[dict[str, Any], list[torch.Tensor], Any]:
        """Copies of what a failed attempt must give back: random state, buffers, scaler."""
        for _ in range(3):
            try:
                scaler_state = None if self.scaler is None else self.scaler.state_dict()
                return random_state(), [b.clone() for b in self.model.buffers()], scaler_state
            except Exception as error:
                kind = classify(error)
                if kind is None:
                    raise
            self._clean(kind)
            self._record("forward", 0, 0)
        raise DoesNotFitError("out of memory before the step: buffers cannot be copied")

    def _optimizer_step(self) -> None:
        """The optimizer's step, at most once, or DoesNotFitError with all as it was."""
        for _ in range(3):
            taken, kind = self._try_optimizer()
            if kind is None:
                return
            if taken:
                self._snapshot.restore()
            self._record("optimizer", 0, 0)
            gc.collect()
            self._empty_cache()
        self.optimizer.zero_grad(set_to_none=True)
        raise DoesNotFitError("out of memory in the optimizer's step")

    def _try_optimizer(self) -> tuple[bool, str | None]:
        """-> whether the snapshot is whole, and the kind of memory that ran out or None."""
        taken = False
        try:
            self._snapshot.take()
            taken = True
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        except Exception as error:
            kind = classify(error)
            if kind is None:
                raise
            return taken, kind
        return taken, None

    def evaluate(self, size: int, run: Callable[[int, int], Any]) -> list[Any]:
        """run(begin, end) over a batch without gradients, in micro-batches that fit."""
        micro, retried = min(size, self.micro_batch or size), False
        while True:
            results: list[Any] = []
            kind = None
            try:
                for begin in range(0, size, micro):
                    results.append(run(begin, min(size, begin + micro)))
            except Exception as error:
                kind = classify(error)
                if kind is None:
                    raise
            if kind is None:
                return results
            results.clear()
            self._clean(kind)
            after = micro if not retried else max(1, micro // 2)
            self._record("evaluation", micro, after)
            if retried and micro == 1:
                raise DoesNotFitError("out of memory in evaluation: one item alone does not fit")
            micro, retried = after, micro > 1 or not retried

    def _clean(self, kind: str) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if kind == "host" and self.on_host_memory is not None:
            self.on_host_memory()
        gc.collect()
        self._empty_cache()

    @staticmethod
    def _empty_cache() -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

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

    def _grow(self) -> None:
        if self.micro_batch is None:
            return
        self._good_steps += 1
        if self._good_steps >= self._grow_after:
            self.micro_batch = self.micro_batch * 2
            self._good_steps = 0
            # Each try costs a failed step at worst, so they become rarer.
            self._grow_after = min(10_000, 2 * self._grow_after)
            if self.micro_batch >= self._largest:
                self.micro_batch = None
