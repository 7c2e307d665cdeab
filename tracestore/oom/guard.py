"""Training steps that recover from out-of-memory errors.

A failed attempt leaves no side effects: gradients, random states, buffers, metrics, weights
and optimizer state are restored, and its tensors are freed before the next attempt. The batch
is then computed in smaller micro-batches whose weighted gradients sum to those of the whole.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from tracestore.errors import InsufficientMemoryError, TracestoreError, explain_dtype
from tracestore.oom.cuda_cache import CudaCacheManager
from tracestore.oom.micro_batch import MicroBatchPolicy
from tracestore.oom.oom_errors import StepOutcome, classify, resolve
from tracestore.oom.ranks import RankGroup
from tracestore.oom.recordings import Graphs, Loss
from tracestore.oom.snapshot import (
    OptimizerSnapshot,
    StepCounters,
    StepSnapshot,
    create_optimizer_state,
    flush_autograd_queue,
    writes_after_allocating,
)
from tracestore.oom.step_loss import StepLoss

T = TypeVar("T")
Phase = Literal["forward", "backward", "optimizer", "evaluation"]
_MAX_ATTEMPTS = 3


class OOMGuard:
    """Run training steps and recover from out-of-memory errors.

    After a failure `step` frees memory and tries once more at the same size, then halves the
    micro-batch until the step fits. The gradient equals that of the whole batch to rounding;
    BatchNorm statistics and the masks of torch's dropout are those of the micro-batches. The
    guard keeps the size that fits, doubles it again after a number of steps without failures,
    and `begin_epoch` plans it from the failures of the previous epoch.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer
        Its state is allocated now, where torch's own optimizers allow it.
    scaler : torch.amp.GradScaler, optional
    metrics : sequence of object, optional
        Objects that the loss function updates, for example torchmetrics. Attributes that are
        tensors, numbers, lists, dicts or sets are restored after a failure.
    on_event : callable, optional
        Called with each recovery: a dict of ``epoch``, ``step``, ``phase``, ``size_before``
        and ``size_after``.
    on_host_memory : callable, optional
        Called first where host memory ran out (`MemoryError`, a killed worker, any allocation
        of a model on the CPU). Release caches here.
    ranks : RankGroup, optional
        The processes that train together; see `step`. A single process by default.
    graphs : Graphs, optional
        Recordings that the loss function replays. They are released where memory runs out.

    Attributes
    ----------
    events : list of dict
        All recoveries so far.
    num_steps : int
        Completed steps.

    Examples
    --------
    >>> import torch
    >>> from tracestore.train import OOMGuard
    >>> model = torch.nn.Linear(4, 1)
    >>> guard = OOMGuard(model, torch.optim.Adam(model.parameters()))
    >>> x, y = torch.randn(16, 4), torch.randn(16, 1)
    >>> loss = guard.step(len(x), lambda begin, end: (model(x[begin:end]) - y[begin:end]).square().mean())
    >>> guard.events
    []
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
        graphs: Graphs | None = None,
    ) -> None:
        self.model, self.optimizer, self.scaler, self.graphs = model, optimizer, scaler, graphs
        self.on_event, self.on_host_memory = on_event, on_host_memory
        self.ranks = ranks or RankGroup()
        self.epoch = self.num_steps = 0
        self.policy = MicroBatchPolicy()
        self.events: list[dict[str, Any]] = []
        self.cuda_cache = CudaCacheManager()
        if not optimizer.state:
            create_optimizer_state(optimizer)
        if scaler is not None:
            # Scaling a value allocates the scaler's state, without which it cannot be restored.
            scaler.scale(torch.zeros((), device=optimizer.param_groups[0]["params"][0].device))
        self._snapshot = StepSnapshot(model, scaler, metrics)
        self._configure_snapshots()

    def _configure_snapshots(self) -> None:
        """Choose what to copy before the optimizer's step; again after it got a parameter group."""
        groups = self.optimizer.param_groups
        self._num_groups = len(groups)
        self._parameters = [p for group in groups for p in group["params"]]
        self._on_cpu = all(p.device.type == "cpu" for p in self._parameters)
        # A rank whose own step succeeded must be able to undo it when another rank failed, and
        # the counters of a scaled step may change twice.
        counters_suffice = (
            self.ranks.world_size == 1 and self.scaler is None and writes_after_allocating(self.optimizer)
        )
        self._optimizer_snapshot: StepCounters | OptimizerSnapshot = (
            StepCounters(self.optimizer) if counters_suffice else OptimizerSnapshot(self.optimizer)
        )

    @property
    def micro_batch(self) -> int | None:
        """Items of a micro-batch. None: the whole batch."""
        return self.policy.size

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batch sizes, the step count and the events as plain values."""
        return {"sizes": self.policy.state_dict(), "num_steps": self.num_steps, "events": list(self.events)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.policy.load_state_dict(state["sizes"])
        self.num_steps, self.events = state["num_steps"], list(state["events"])

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of the following events, and plan the micro-batches of a new epoch."""
        self.epoch = epoch
        self.policy.begin_epoch(epoch)

    def step(
        self,
        size: int,
        loss_fn: Callable[[int, int], Loss],
        global_size: int | None = None,
        max_micro_batch: int | None = None,
        seed: Callable[[], Any] | None = None,
    ) -> float:
        """Run forward, backward and the optimizer over one batch.

        With several ranks each computes its own slice. No rank enters a collective before all ranks report that
        their slice succeeded; if one failed, all retry with the same smaller micro-batches.

        Parameters
        ----------
        size : int
            Items of the batch, with several ranks of this rank's slice (may be 0).
        loss_fn : callable
            ``loss_fn(begin, end)`` returns the mean loss, a scalar tensor, of items begin to end.
        global_size : int, optional
            Items of the slices of all ranks. Default: `size`.
        max_micro_batch : int, optional
            Most items to compute at once, the same on all ranks. Default: no limit.
        seed : callable, optional
            Sets the random states of the step; called before each attempt. Without it the
            states of torch, Python and numpy are copied before the first attempt.

        Returns
        -------
        float
            The sum of the losses of this rank's items, divided by `global_size`: the mean
            loss of the batch, with several ranks after a sum over the ranks.

        Raises
        ------
        InsufficientMemoryError
            If one item does not fit. Model, optimizer, metrics and random states are those before the step.
        UsageError
            If the batch is float16 and the model float32.
        """
        return self.submit(size, loss_fn, global_size, max_micro_batch, seed).result()

    def submit(
        self,
        size: int,
        loss_fn: Callable[[int, int], Loss],
        global_size: int | None = None,
        max_micro_batch: int | None = None,
        seed: Callable[[], Any] | None = None,
    ) -> StepLoss:
        """Do what `step` does without waiting for a GPU. ``result()`` of what it returns waits, and returns the loss."""
        if len(self.optimizer.param_groups) != self._num_groups:
            self._configure_snapshots()
        global_size = size if global_size is None else global_size
        rank_size = -(-global_size // self.ranks.world_size)
        # A rank without items takes part in the collectives, with a size of 1.
        rank_size = max(1, min(rank_size, max_micro_batch or rank_size))
        micro_batch = min(rank_size, self.policy.size or rank_size)
        is_retried, optimizer_failures = False, 0
        self._snapshot.discard()
        while True:
            phase, outcome, loss = self._attempt(size, global_size, micro_batch, loss_fn, seed)
            if outcome == StepOutcome.SUCCESS:
                break
            # This runs outside of every except block, where no traceback refers to failed tensors.
            self._free_memory(outcome)
            if self._snapshot.is_saved:
                self._retry_on_oom(self._snapshot.restore)
            if phase == "optimizer":
                optimizer_failures += 1
                self._record(phase, micro_batch, micro_batch)
                if optimizer_failures == _MAX_ATTEMPTS:
                    raise InsufficientMemoryError("out of memory in the optimizer's step")
                continue
            micro_batch, is_retried = self._next_attempt(phase, micro_batch, is_retried)
        self.num_steps += 1
        self.policy.on_success(micro_batch, rank_size)
        self.cuda_cache.after_step()
        return loss

    def _attempt(
        self,
        size: int,
        global_size: int,
        micro_batch: int,
        loss_fn: Callable[[int, int], Loss],
        seed: Callable[[], Any] | None,
    ) -> tuple[Phase, StepOutcome, StepLoss]:
        """Try everything once, snapshot to optimizer. Return the last phase, the outcome over all ranks and the loss."""
        phase: Phase = "forward"
        outcome, loss, error = StepOutcome.SUCCESS, StepLoss(), None
        value = weighted = None
        try:
            if not self._snapshot.is_saved:
                self._snapshot.save(seed)
            # Optimizer.zero_grad takes ten times as long.
            for parameter in self._parameters:
                parameter.grad = None
            for begin in range(0, size, micro_batch):
                end = min(size, begin + micro_batch)
                phase = "forward"
                value = loss_fn(begin, end)
                weighted = value if end - begin == global_size else value * ((end - begin) / global_size)
                loss.add(weighted.detach())
                phase = "backward"
                self._backward(weighted)
                value = weighted = None
            loss.end()
        except Exception as raised:
            outcome = classify(raised)
            error = raised if outcome == StepOutcome.OTHER_ERROR else None
        value = weighted = None
        if outcome == StepOutcome.AMBIGUOUS:
            # On a rank without items the snapshot failed, and there is no smaller case.
            outcome, error = self._resolve_ambiguous(lambda: self._backward(loss_fn(0, 1)) if size else None)
        outcome = self._reduce_outcome(outcome, error)
        if outcome == StepOutcome.SUCCESS:
            if self.ranks.world_size > 1:
                self._retry_on_oom(lambda: self.ranks.sum_gradients(self._parameters))
            phase, outcome = "optimizer", self._optimizer_step()
        return phase, outcome, loss

    def _backward(self, loss: Loss) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _resolve_ambiguous(self, smallest_case: Callable[[], Any]) -> tuple[StepOutcome, Exception | None]:
        """Decide by the smallest case whether an ambiguous error was out of memory.

        A missing kernel fails for one item as well, while memory is not short. Return the
        outcome, and the error of the smallest case if memory did not cause it.
        """
        self._free_memory(StepOutcome.HOST_OOM)
        outcome, error = StepOutcome.HOST_OOM, None
        try:
            smallest_case()
        except Exception as raised:
            outcome = resolve(classify(raised), self._parameters)
            error = raised if outcome == StepOutcome.OTHER_ERROR else None
        self.optimizer.zero_grad(set_to_none=True)
        return outcome, error

    def _reduce_outcome(self, outcome: StepOutcome, error: BaseException | None) -> StepOutcome:
        """Return the worst outcome of all ranks. An error other than out of memory ends them all."""
        if self.ranks.world_size > 1:
            outcome = StepOutcome(self._retry_on_oom(lambda: self.ranks.all_reduce_max(outcome)))
        if error is not None:
            raise explain_dtype(error)
        if outcome == StepOutcome.OTHER_ERROR:
            raise TracestoreError("another rank failed; see its error message")
        return outcome

    def _retry_on_oom(self, action: Callable[[], T]) -> T:
        """Return the result of an action that must succeed and can be repeated from its start.

        Such actions are restoring a snapshot, and collectives for which other ranks may wait.
        """
        for _ in range(_MAX_ATTEMPTS):
            try:
                return action()
            except Exception as error:
                if resolve(classify(error), self._parameters) == StepOutcome.OTHER_ERROR:
                    raise
            gc.collect()
            torch.cuda.empty_cache()
        raise InsufficientMemoryError("out of memory repeatedly between two attempts of a step")

    def _optimizer_step(self) -> StepOutcome:
        """Step the optimizer on all ranks or on none. Return the outcome over all ranks."""
        is_saved, outcome, error = False, StepOutcome.SUCCESS, None
        try:
            # A replayed step allocates nothing, so that it cannot run out of memory.
            if self.ranks.world_size == 1 and self.graphs is not None and self.graphs.step():
                return outcome
            self._optimizer_snapshot.save()
            is_saved = True
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        except Exception as raised:
            outcome = resolve(classify(raised), self._parameters)
            error = raised if outcome == StepOutcome.OTHER_ERROR else None
        outcome = self._reduce_outcome(outcome, error)
        if outcome != StepOutcome.SUCCESS and is_saved:
            self._retry_on_oom(self._optimizer_snapshot.restore)
        return outcome

    def evaluate(self, size: int, run: Callable[[int, int], T]) -> list[T]:
        """Run a function over a batch in micro-batches that fit.

        Ranks do not communicate here. Disable gradients with ``torch.no_grad()``.

        Parameters
        ----------
        size : int
            Items of the batch.
        run : callable
            ``run(begin, end)`` computes items begin to end.

        Returns
        -------
        list
            The results of `run`, in the order of the items.

        Raises
        ------
        InsufficientMemoryError
            If one item does not fit.
        """
        micro_batch, is_retried = max(1, min(size, self.policy.size or size)), False
        while True:
            try:
                return [run(begin, min(size, begin + micro_batch)) for begin in range(0, size, micro_batch)]
            except Exception as error:
                outcome = classify(error)
                if outcome == StepOutcome.OTHER_ERROR:
                    raise explain_dtype(error)  # noqa: B904 - the cause is set
            if outcome == StepOutcome.AMBIGUOUS:
                outcome, error_of_one = self._resolve_ambiguous(lambda: run(0, 1))
                if error_of_one is not None:
                    raise error_of_one
            self._free_memory(outcome)
            micro_batch, is_retried = self._next_attempt("evaluation", micro_batch, is_retried)

    def _free_memory(self, outcome: StepOutcome) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.graphs is not None:
            self.graphs.release()
        if self.on_host_memory is not None and (outcome == StepOutcome.HOST_OOM or self._on_cpu):
            self.on_host_memory()
        self._retry_on_oom(flush_autograd_queue)
        gc.collect()
        torch.cuda.empty_cache()

    def _next_attempt(self, phase: Phase, micro_batch: int, is_retried: bool) -> tuple[int, bool]:
        """Return the size of the next attempt, and the value of `is_retried` for it.

        `is_retried` is true if the next failure of that size makes the size smaller. The first size is tried
        twice, because freeing memory cures fragmentation and full caches. A smaller size is tried once, and a
        single item twice.
        """
        size = micro_batch
        if is_retried:
            size = max(1, micro_batch // 2) if phase == "evaluation" else self.policy.on_failure(micro_batch)
        self._record(phase, micro_batch, size)
        if is_retried and micro_batch == 1:
            raise InsufficientMemoryError(f"out of memory in {phase}: one item alone does not fit")
        return size, not is_retried or size > 1

    def _record(self, phase: Phase, size_before: int, size_after: int) -> None:
        event: dict[str, Any] = {"epoch": self.epoch, "step": self.num_steps, "phase": phase}
        event |= {"size_before": size_before, "size_after": size_after}
        self.events.append(event)
        if self.on_event:
            self.on_event(event)
