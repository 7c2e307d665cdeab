"""What training a detector will take: peak memory, time an epoch, and the least it needs.

A cost model with few terms, each measured on this machine by real steps on real traces of
the store: memory = libraries + model and optimizer + batches of the loader + a + b x (what
the traces of a micro-batch cost). The cost of a trace is its bytes in a batch, which grow
with its tokens, or for the PyG reference its edges, of which it keeps a row each.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from tracestore.console import format_size
from tracestore.data.batch import BatchFormat, GraphOptions
from tracestore.data.epoch import trace_costs
from tracestore.errors import UsageError
from tracestore.store.reader import TraceStore
from tracestore.train.config import TrainConfig
from tracestore.train.feed import FedBatch, Feed, StepBatches
from tracestore.train.forward import Forward
from tracestore.train.memory import RESERVE_BYTES, MemoryMeter, MemoryUse, memory_use
from tracestore.train.models import VIEWS, ModelConfig
from tracestore.train.oom import OOMGuard
from tracestore.train.ranks import Ranks
from tracestore.train.snapshot import random_state, restore_random_state

# How long the steps of a measurement may take.
_SECONDS = 1.5
_MOST_STEPS = 20
# Threads' stacks and heaps, plans of libraries, Python objects.
_SLACK_BYTES = 96 << 20
_TRAIN_SHARE = 0.7
# The floor differs by some percent from one measurement to the next: what plan printed is taken.
_REFUSED_BELOW = 0.8


@dataclass(frozen=True)
class TrainingPlan:
    """What training one detector on a store takes on this machine. Bytes of the process:
    anonymous ones (what a machine must have), and file pages beside them, which can be
    reclaimed. floor_bytes: the least --memory-budget, above what the process has after its
    imports."""

    name: str
    batch_size: int
    num_train: int
    libraries_bytes: int
    file_bytes: int
    loader_bytes_per_trace: int
    fixed_bytes: int
    trace_bytes: float
    largest_batch_factor: float
    seconds_start: float
    seconds_fixed: float
    seconds_per_trace: float
    floor_bytes: int

    def peak_bytes(self, batch_size: int, micro_batch: int | None = None) -> int:
        """Anonymous memory at its peak: of the batch of most tokens in an epoch."""
        micro = min(batch_size, micro_batch or batch_size)
        step = self.trace_bytes * micro * self.largest_batch_factor
        return int(self.fixed_bytes + self.loader_bytes_per_trace * batch_size + step)

    def seconds_per_epoch(self, batch_size: int) -> float:
        """Of the training part."""
        steps = -(-self.num_train // batch_size)
        return self.seconds_start + steps * self.seconds_fixed + self.num_train * self.seconds_per_trace

    def largest_batch(self, memory: int) -> int:
        """Traces of the largest batch that fits whole; 0 where one alone does not."""
        room = memory - self.fixed_bytes
        return max(0, int(room / (self.loader_bytes_per_trace + self.trace_bytes * self.largest_batch_factor)))

    def largest_micro_batch(self, memory: int, batch_size: int) -> int:
        """Traces of the largest micro-batch of batches of batch_size."""
        room = memory - self.fixed_bytes - self.loader_bytes_per_trace * batch_size
        return min(batch_size, max(0, int(room / (self.trace_bytes * self.largest_batch_factor))))

    def as_json(self, memory: int | None) -> dict[str, Any]:
        out: dict[str, Any] = {
            "model": self.name,
            "batch_size": self.batch_size,
            "peak_memory_bytes": self.peak_bytes(self.batch_size),
            "file_bytes": self.file_bytes,
            "libraries_bytes": self.libraries_bytes,
            "seconds_per_epoch": self.seconds_per_epoch(self.batch_size),
            "floor_bytes": self.floor_bytes,
        }
        if memory is not None:
            out["memory_bytes"] = memory
            out["largest_batch"] = self.largest_batch(memory)
            out["largest_micro_batch"] = self.largest_micro_batch(memory, self.batch_size)
        return out


class _Trial:
    """A detector that trains on a store for a few steps and is thrown away."""

    def __init__(
        self, name: str, store: TraceStore, indices: np.ndarray, config: TrainConfig, sizes: dict[str, Any]
    ) -> None:
        model_config = ModelConfig.of_store(store, **sizes)
        self.forward = Forward(name, model_config, config)
        optimizer = torch.optim.Adam(self.forward.model.parameters(), lr=0.0, weight_decay=1e-5, fused=True)
        self.guard = OOMGuard(self.forward.model, optimizer)
        config = replace(config, batch_size=min(config.batch_size, len(indices)))
        self.feed = Feed(name, store, indices, config, model_config, Ranks(alone=True), shuffle="global")
        self.loader = self.feed.loader
        self.cost = "edges" if model_config.message_passing == "pyg" and VIEWS[name] == "graph" else "bytes"

    def costs(self, indices: np.ndarray) -> np.ndarray:
        return trace_costs(self.loader.store, self.loader.format, self.cost, indices)

    def step(self, batch: FedBatch, count: int) -> None:
        """One step on the first `count` traces of a batch."""
        self.guard.step(count, partial(self.forward.step_loss, StepBatches([batch])))


@dataclass
class _Measured:
    """Steps on `count` traces each, the first to warm up."""

    peak: MemoryUse
    seconds: float  # of one, with its wait for data
    start: float  # until the first batch was there
    costliest: np.ndarray  # traces


def _timed(trial: _Trial, epoch: int, count: int) -> _Measured:
    seconds: list[float] = []
    costliest, most = np.zeros(0, np.int64), -1
    with MemoryMeter() as meter:
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
    label); num_threads: torch's, from now on; room: bytes above `start` that steps larger
    than the smallest may take (half of what the machine has). The random state is left as it was."""
    store.require(VIEWS[name])
    labelled = np.flatnonzero(np.isfinite(store.targets()))
    indices = labelled if len(labelled) else np.arange(len(store))
    if not len(indices):
        raise UsageError(f"{store.path}: holds no trace")
    start = memory_use() if start is None else start
    num_train = num_train or max(1, round(_TRAIN_SHARE * len(labelled)))
    if num_threads:
        torch.set_num_threads(num_threads)
    before = random_state()
    try:
        return _measure(name, store, indices, config, sizes, start, num_train, room)
    finally:
        restore_random_state(before)


def budget_plan(
    names: list[str],
    store: TraceStore,
    config: TrainConfig,
    sizes: dict[str, Any],
    budget: int,
    start: MemoryUse,
    num_train: int,
) -> dict[str, int | None]:
    """The micro-batch of each detector (None: the whole batch) within a budget above `start`.
    UsageError where the budget is below the floor of one."""
    planned: dict[str, int | None] = {}
    for name in names:
        plan = plan_training(name, store, config, sizes, start=start, num_train=num_train, room=budget)
        if budget < _REFUSED_BELOW * plan.floor_bytes:
            raise UsageError(
                f"memory budget {format_size(budget)} is below {format_size(plan.floor_bytes)}, the least that "
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
    trial = _Trial(name, store, indices, config, sizes)
    full = trial.loader.batch_size
    few = max(1, full // 8)
    small = _timed(trial, 0, few)
    # The whole batch where it is not too long or too large to try.
    room = _room() // 2 if room is None else min(room, _room() // 2)
    grows = max(1, (small.peak.anonymous - start.anonymous) / few)
    many = int(min(full, max(few, few * 4 * _SECONDS / small.seconds), max(few, room / grows)))
    large = _timed(trial, 1, many) if many > few else small
    costs = trial.costs(indices)
    mean = float(costs.mean())
    small_cost, large_cost = (float(trial.costs(m.costliest).sum()) for m in (small, large))
    loader_bytes = (trial.loader.max_in_flight + 1) * int(trial.loader.format.bytes(store, indices).mean())
    per_cost = max(0.0, (large.peak.anonymous - small.peak.anonymous) / max(1.0, large_cost - small_cost))
    if large_cost <= small_cost or per_cost == 0:
        per_cost = max(1.0, large.peak.anonymous - start.anonymous - loader_bytes * full) / max(1.0, large_cost)
    fixed = large.peak.anonymous - per_cost * large_cost - loader_bytes * full
    per_trace = max(0.0, (large.seconds - small.seconds) / max(1, many - few)) or large.seconds / many
    # One trace, the longest, beside the loader's smallest ring.
    one = per_cost * max(0.0, float(costs.max()) - small_cost)
    floor = small.peak.data - start.data + one + RESERVE_BYTES + _SLACK_BYTES
    return TrainingPlan(
        name,
        config.batch_size,
        num_train,
        start.anonymous,
        memory_use().file + _store_bytes(trial, indices),
        loader_bytes,
        int(fixed),
        per_cost * mean,
        _largest_batch_factor(trial, costs, indices, full),
        large.start,
        max(0.0, large.seconds - per_trace * many),
        per_trace,
        int(floor),
    )


def _room() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _store_bytes(trial: _Trial, indices: np.ndarray) -> int:
    """Bytes of the store that an epoch maps."""
    store = trial.loader.store
    stored = GraphOptions(edges="heads" if store.attention_layout == "causal" else "coo")
    return int(BatchFormat(trial.loader.view, stored).bytes(store, indices).sum()) if store.codec == "none" else 0


def _largest_batch_factor(trial: _Trial, costs: np.ndarray, indices: np.ndarray, batch_size: int) -> float:
    """The costliest batch of an epoch over the mean one."""
    by_index = np.zeros(int(indices.max()) + 1)
    by_index[indices] = costs
    plan = trial.loader.epochs.plan(0)
    sums = [by_index[plan.traces(k)].sum() for k in range(min(len(plan), 4096))]
    return max(1.0, float(max(sums)) / (batch_size * float(costs.mean())))
