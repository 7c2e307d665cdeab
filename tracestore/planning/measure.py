"""A training plan by real steps on real traces of the store, on this machine.

The cost of a trace is its bytes in a batch, which grow with its tokens, or for the PyG
reference its edges, of which it keeps a row each.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from tracestore.console import format_size
from tracestore.data.epoch import trace_costs
from tracestore.detectors.config import ModelConfig
from tracestore.detectors.registry import DETECTORS
from tracestore.errors import UsageError
from tracestore.oom.guard import OOMGuard
from tracestore.oom.limits import RESERVE_BYTES, MemoryUse, PeakMemoryMonitor, memory_use
from tracestore.oom.optimizers import Adam
from tracestore.oom.snapshot import get_random_state, restore_random_state
from tracestore.planning.plan import (
    LATER_BATCHES,
    LATER_BYTES,
    SLACK_BYTES,
    TrainingPlan,
    largest_batch_factor,
    mapped_bytes,
    sizes_of,
    training_part,
)
from tracestore.store.read.store import TraceStore
from tracestore.train.batches import AccumulatedBatch, BatchFeed, DeviceBatch
from tracestore.train.config import TrainConfig
from tracestore.train.devices import torch_threads
from tracestore.train.distributed import DistributedContext
from tracestore.train.model_runner import ModelRunner

# How long the steps of a measurement may take.
_SECONDS = 1.5
_MOST_STEPS = 20
# The floor differs by some percent from one measurement to the next: what plan printed is taken.
_REFUSED_BELOW = 0.8


class Trial:
    """A detector that trains on a store for a few steps and is thrown away."""

    def __init__(
        self, name: str, store: TraceStore, indices: np.ndarray, config: TrainConfig, sizes: dict[str, Any]
    ) -> None:
        model_config = ModelConfig.from_store(store, **sizes)
        self.forward = ModelRunner(name, model_config, config)
        optimizer = Adam(self.forward.model.parameters(), lr=0.0, weight_decay=1e-5, fused=True)
        self.guard = OOMGuard(self.forward.model, optimizer)
        config = replace(config, batch_size=min(config.batch_size, len(indices)))
        self.feed = BatchFeed(
            name, store, indices, config, model_config, DistributedContext(alone=True), shuffle="global"
        )
        self.loader = self.feed.loader
        self.cost = "edges" if model_config.message_passing == "pyg" and DETECTORS[name].view == "graph" else "bytes"

    def costs(self, indices: np.ndarray) -> np.ndarray:
        return trace_costs(self.loader.store, self.loader.format, self.cost, indices)

    def step(self, batch: DeviceBatch, count: int) -> None:
        """One step on the first `count` traces of a batch."""
        self.guard.step(count, partial(self.forward.step_loss, AccumulatedBatch([batch])))


@dataclass
class _Measured:
    """Steps on `count` traces each, the first to warm up."""

    peak: MemoryUse
    seconds: float  # of one, with its wait for data
    start: float  # until the first batch was there
    costliest: np.ndarray  # traces


def timed(trial: Trial, epoch: int, count: int) -> _Measured:
    """Steps on the first `count` traces of the batches of an epoch."""
    seconds: list[float] = []
    costliest, most = np.zeros(0, np.int64), -1
    with PeakMemoryMonitor() as meter:
        began = start = time.perf_counter()
        trial.feed.seek(epoch, 0)
        for batch in islice(trial.feed.batches(), _MOST_STEPS):
            if not seconds:
                start = time.perf_counter()
                first = start - began
            trial.step(batch, count)
            indices = batch.trace_index[:count].numpy().copy()
            cost = int(trial.costs(indices).sum())
            if cost > most:
                costliest, most = indices, cost
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
            if len(seconds) > 1 and now - began > _SECONDS:
                break
    return _Measured(meter.peak, float(np.median(seconds[1:] or seconds)), first, costliest)


def plan_training(
    name: str,
    store: TraceStore,
    config: TrainConfig,
    sizes: dict[str, Any],
    *,
    start: MemoryUse | None = None,
    num_train: int | None = None,
    num_threads: int | None = None,
    room: int | None = None,
) -> TrainingPlan:
    """Measures a few steps. sizes: fields of ModelConfig. start: what the process had after
    its imports; num_train: traces of the training part (the usual share of those with a
    label); num_threads: torch's for these steps; room: bytes above `start` that steps larger
    than the smallest may take (half of what the machine has). The random state is left as it was."""
    store.require(DETECTORS[name].view)
    indices, usual = training_part(store)
    start = memory_use() if start is None else start
    num_train = num_train or usual
    before = get_random_state()
    try:
        with torch_threads(num_threads):
            return _measure(name, store, indices, config, sizes, start, num_train, room)
    finally:
        restore_random_state(before)


class Measurer:
    """Measures the plan of each detector by its name, in a process that has imported what training
    imports: plan_training."""

    def __init__(
        self, store: TraceStore, config: TrainConfig, sizes: dict[str, Any], num_threads: int | None = None
    ) -> None:
        self._measure = partial(plan_training, start=memory_use(), num_threads=num_threads)
        self._arguments = store, config, sizes

    def __call__(self, name: str) -> TrainingPlan:
        return self._measure(name, *self._arguments)


def budget_plan(
    names: list[str],
    store: TraceStore,
    config: TrainConfig,
    sizes: dict[str, Any],
    budget: int,
    start: MemoryUse,
    num_train: int,
    num_ranks: int = 1,
) -> dict[str, int | None]:
    """The micro-batch of each detector (None: the whole batch) of one of some ranks, each of
    which has its part of a batch and a budget above `start`. UsageError where the budget is
    below the floor of one."""
    planned: dict[str, int | None] = {}
    config = replace(config, batch_size=-(-config.batch_size // num_ranks))
    for name in names:
        plan = plan_training(name, store, config, sizes, start=start, num_train=num_train, room=budget)
        if budget < _REFUSED_BELOW * plan.floor_bytes:
            raise UsageError(
                f"memory budget {format_size(budget)}{' a rank' if num_ranks > 1 else ''} is below {format_size(plan.floor_bytes)}, the least that "
                f"{name} needs with batches of {config.batch_size} (tracestore plan says what fits)"
            )
        micro = plan.largest_micro_batch(start.anonymous + budget - RESERVE_BYTES, config.batch_size)
        planned[name] = max(1, micro) if micro < config.batch_size else None
    return planned


def _measure(
    name: str,
    store: TraceStore,
    indices: np.ndarray,
    config: TrainConfig,
    sizes: dict[str, Any],
    start: MemoryUse,
    num_train: int,
    room: int | None,
) -> TrainingPlan:
    trial = Trial(name, store, indices, config, sizes)
    full = trial.loader.batch_size
    few = max(1, full // 8)
    small = timed(trial, 0, few)
    # The whole batch where it is not too long or too large to try.
    room = _room() // 2 if room is None else min(room, _room() // 2)
    grows = max(1, (small.peak.anonymous - start.anonymous) / few)
    many = int(min(full, max(few, few * 4 * _SECONDS / small.seconds), max(few, room / grows)))
    large = timed(trial, 1, many) if many > few else small
    costs = trial.costs(indices)
    mean = float(costs.mean())
    small_cost, large_cost = (float(trial.costs(m.costliest).sum()) for m in (small, large))
    batch_bytes = int(trial.loader.format.bytes_per_trace(store, indices).mean())  # of a trace
    loader_bytes = (trial.loader.max_in_flight + 1) * batch_bytes
    per_cost = max(0.0, (large.peak.anonymous - small.peak.anonymous) / max(1.0, large_cost - small_cost))
    if large_cost <= small_cost or per_cost == 0:
        per_cost = max(1.0, large.peak.anonymous - start.anonymous - loader_bytes * full) / max(1.0, large_cost)
    fixed = large.peak.anonymous - per_cost * large_cost - loader_bytes * full
    per_trace = max(0.0, (large.seconds - small.seconds) / max(1, many - few)) or large.seconds / many
    # One trace, the longest, beside the loader's smallest ring.
    one = per_cost * max(0.0, float(costs.max()) - small_cost)
    floor = small.peak.data - start.data + one + RESERVE_BYTES + SLACK_BYTES
    return TrainingPlan(
        name,
        config.batch_size,
        num_train,
        start.anonymous,
        memory_use().file + mapped_bytes(store, trial.loader.view, *sizes_of(store, trial.loader.view, indices)),
        loader_bytes + LATER_BATCHES * batch_bytes,
        LATER_BYTES + int(fixed),
        per_cost * mean,
        largest_batch_factor(trial.loader.epochs, costs, indices),
        large.start,
        max(0.0, large.seconds - per_trace * many),
        per_trace,
        int(floor),
    )


def _room() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
