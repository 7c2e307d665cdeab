"""The resources that training a detector takes: peak memory, time per epoch, minimum budget.

A linear model. Memory is the sum of libraries, model and optimizer, batches of the loader, and the
activations of a step, which grow with the bytes of its traces. Time is a constant per step plus a
constant per trace. A few real steps on real traces of the store, on this machine, determine the coefficients.

The cost of a trace is its bytes in a batch, which grow with its tokens. For the PyG reference it is the number of its
edges, because PyG keeps a row per edge.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from tracestore.data.batches.batch_format import BatchFormat, EdgeFormat, View
from tracestore.data.epoch import BatchBy, EpochPlanner, trace_costs
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import DEFAULT_MODELS, MODELS, make_model
from tracestore.errors import MissingFieldError, UsageError
from tracestore.oom.guard import OOMGuard
from tracestore.oom.memory_limits import RESERVE_BYTES, PeakMemoryMonitor
from tracestore.platform_support import MemoryUse, memory_use
from tracestore.split import FRACTIONS
from tracestore.store.format.labels import DEFAULT_THRESHOLD
from tracestore.store.read.store import TraceStore
from tracestore.train.batches import AccumulatedBatch, BatchFeed
from tracestore.train.config import TrainConfig
from tracestore.train.devices import torch_threads
from tracestore.train.distributed import DistributedContext
from tracestore.train.model_runner import ModelRunner
from tracestore.words import format_size

# Stacks and heaps of threads, workspaces of libraries, Python objects.
SLACK_BYTES = 96 << 20
# Growth after the first steps: fragmentation, and further batches in flight.
LATER_BYTES, LATER_BATCHES = 20 << 20, 2
# Number of batches of an epoch that are searched for the largest.
_MAX_BATCHES = 4096


@dataclass(frozen=True)
class TrainingPlan:
    """Measured cost of training one detector on a store on this machine.

    All bytes but `file_bytes` are anonymous memory of the process.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    batch_size : int
        The requested batch size.
    num_train : int
        Traces of the training split.
    libraries_bytes : int
        Memory of the process after its imports.
    file_bytes : int
        Mapped file pages, which the system can reclaim.
    loader_bytes_per_trace, fixed_bytes, trace_bytes : int, int, float
        Coefficients of the memory: per trace of a batch, fixed, and per trace of a micro-batch.
    largest_batch_factor : float
        Cost of the costliest batch of an epoch, relative to the mean.
    seconds_start, seconds_fixed, seconds_per_trace : float
        Coefficients of the time: per epoch, per step and per trace.
    floor_bytes : int
        The smallest possible ``--memory-budget``, in addition to the libraries.
    """

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
        """Return the peak anonymous memory, at the costliest batch of an epoch."""
        micro = min(batch_size, micro_batch or batch_size)
        step = self.trace_bytes * micro * self.largest_batch_factor
        return int(self.fixed_bytes + self.loader_bytes_per_trace * batch_size + step)

    def seconds_per_epoch(self, batch_size: int) -> float:
        """Return the training time of an epoch, without validation."""
        steps = -(-self.num_train // batch_size)
        return self.seconds_start + steps * self.seconds_fixed + self.num_train * self.seconds_per_trace

    def largest_batch(self, memory: int) -> int:
        """Return the size of the largest batch that fits into `memory` bytes, 0 where a single trace does not."""
        free = memory - self.fixed_bytes
        return max(0, int(free / (self.loader_bytes_per_trace + self.trace_bytes * self.largest_batch_factor)))

    def largest_micro_batch(self, memory: int, batch_size: int) -> int:
        """Return the size of the largest micro-batch that fits into `memory` bytes."""
        free = memory - self.fixed_bytes - self.loader_bytes_per_trace * batch_size
        return min(batch_size, max(0, int(free / (self.trace_bytes * self.largest_batch_factor))))

    def as_json(self, memory: int | None) -> dict[str, Any]:
        """Return the JSON of ``tracestore plan``; `memory`: bytes that the process may use."""
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


def detectors_for(store: TraceStore) -> list[str]:
    """Return the names of the detectors that are trained by default and whose view the store has.

    Raises
    ------
    MissingFieldError
        The store has no view of any detector.
    """
    names: list[str] = []
    missing: MissingFieldError | None = None
    for name in DEFAULT_MODELS:
        try:
            store.require_view(MODELS[name].view)
            names.append(name)
        except MissingFieldError as error:
            missing = error
    if missing is not None and not names:
        raise missing
    return names


def training_traces(store: TraceStore) -> tuple[np.ndarray, int]:
    """Return the traces that a training could use, and how many of them it trains on.

    Returns
    -------
    indices : np.ndarray
        Store indices of the labeled traces, or of all traces where none is labeled.
    num_train : int
        Size of the training split.

    Raises
    ------
    UsageError
        The store is empty.
    """
    labeled = np.flatnonzero(np.isfinite(store.targets(DEFAULT_THRESHOLD)))
    indices = labeled if len(labeled) else np.arange(len(store))
    if not len(indices):
        raise UsageError(f"{store.path}: holds no trace")
    return indices, max(1, round(FRACTIONS["train"] * len(indices)))


def mapped_bytes(store: TraceStore, view: View, indices: np.ndarray) -> int:
    """Return the bytes of the store that an epoch over some traces maps."""
    if store.codec != "none":
        return 0
    stored: EdgeFormat = "heads" if store.attention_layout == "causal" else "coo"
    return int(BatchFormat(view, edge_format=stored).bytes_per_trace(store, indices).sum())


def largest_batch_factor(epochs: EpochPlanner, costs: np.ndarray, indices: np.ndarray) -> float:
    """Return the cost of the costliest batch of an epoch, relative to the mean batch.

    Parameters
    ----------
    epochs : EpochPlanner
    costs : np.ndarray
        ``(n,)``, cost of each of the traces `indices`.
    indices : np.ndarray
        ``(n,)``, store indices, ascending.
    """
    plan = epochs.plan(0)
    batches = min(len(plan), _MAX_BATCHES)
    positions = np.arange(min(batches * epochs.batch_size, epochs.num_samples))
    ordered_costs = costs[np.searchsorted(indices, plan.indices_at(positions))]
    sums = np.add.reduceat(ordered_costs, np.arange(0, len(ordered_costs), epochs.batch_size))
    return max(1.0, float(sums.max()) / (epochs.batch_size * float(costs.mean())))


# Limits for the steps of one measurement.
_MAX_SECONDS = 1.5
_MAX_STEPS = 20
# The measured floor varies by a few percent, and a budget that `tracestore plan` printed must be accepted.
_MIN_SHARE_OF_FLOOR = 0.8


@dataclass
class _Measurement:
    """Steps on `count` traces each; the first one warms up.

    seconds: median of a step with its wait for data. start: seconds until the first batch.
    costliest: indices of the traces of the costliest step.
    """

    peak: MemoryUse
    seconds: float
    start: float
    costliest: np.ndarray


class TrialTrainer:
    """A detector that trains for a few steps and is discarded."""

    def __init__(
        self, name: str, store: TraceStore, indices: np.ndarray, config: TrainConfig, model_options: Mapping[str, Any]
    ) -> None:
        model_config = ModelConfig.from_store(store, **model_options)
        self._runner = ModelRunner(make_model(name, model_config), model_config, config)
        self._guard = OOMGuard(self._runner.model, self._runner.make_optimizer(0.0))
        config = replace(config, batch_size=min(config.batch_size, len(indices)))
        alone = DistributedContext(alone=True)
        self._feed = BatchFeed(name, store, indices, config, model_config, alone, shuffle="global")
        self.loader = self._feed.loader
        is_pyg_graph = model_config.message_passing == "pyg" and MODELS[name].view == "graph"
        self._cost_unit: BatchBy = "edges" if is_pyg_graph else "bytes"

    def costs(self, indices: np.ndarray) -> np.ndarray:
        """Return the cost of each trace."""
        return trace_costs(self.loader.store, self.loader.format, self._cost_unit, indices)

    def measure(self, epoch: int, count: int) -> _Measurement:
        """Measure steps on the first `count` traces of each batch of an epoch."""
        seconds: list[float] = []
        costliest, highest_cost = np.zeros(0, np.int64), -1
        with PeakMemoryMonitor() as monitor:
            began = start = time.perf_counter()
            self._feed.seek(epoch, 0)
            for batch in islice(self._feed.batches(), _MAX_STEPS):
                if not seconds:
                    start = time.perf_counter()
                    first_batch = start - began
                self._guard.step(count, partial(self._runner.step_loss, AccumulatedBatch([batch])))
                indices = batch.trace_index[:count].numpy().copy()
                cost = int(self.costs(indices).sum())
                if cost > highest_cost:
                    costliest, highest_cost = indices, cost
                now = time.perf_counter()
                seconds.append(now - start)
                start = now
                if len(seconds) > 1 and now - began > _MAX_SECONDS:
                    break
        return _Measurement(monitor.peak, float(np.median(seconds[1:] or seconds)), first_batch, costliest)


def plan_training(
    name: str,
    store: TraceStore,
    config: TrainConfig,
    model_options: Mapping[str, Any],
    *,
    start: MemoryUse | None = None,
    num_train: int | None = None,
    num_threads: int | None = None,
    max_bytes: int | None = None,
) -> TrainingPlan:
    """Measure what training a detector takes. The random state is preserved.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    store : TraceStore
    config : TrainConfig
    model_options : mapping
        Fields of `ModelConfig`.
    start : MemoryUse, optional
        Memory of the process after its imports. Default: the current use.
    num_train : int, optional
        Traces of the training split. Default: the usual fraction of the labeled traces.
    num_threads : int, optional
        Threads of torch for the measured steps.
    max_bytes : int, optional
        Bytes above `start` that steps larger than the smallest may use. At most, and by
        default, half of the available memory.
    """
    import psutil

    indices, usual_num_train = training_traces(store)
    start = memory_use() if start is None else start
    with torch_threads(num_threads), torch.random.fork_rng(devices=[]):
        trial = TrialTrainer(name, store, indices, config, model_options)
        batch_size = trial.loader.batch_size
        few = max(1, batch_size // 8)
        small = trial.measure(0, few)
        # A second measurement on the whole batch, or on as many traces as time and memory allow.
        half = int(psutil.virtual_memory().available) // 2
        max_bytes = half if max_bytes is None else min(max_bytes, half)
        bytes_per_trace = max(1, (small.peak.anonymous - start.anonymous) / few)
        most = min(few * 4 * _MAX_SECONDS / small.seconds, max_bytes / bytes_per_trace)
        many = int(min(batch_size, max(few, most)))
        large = trial.measure(1, many) if many > few else small
    costs = trial.costs(indices)
    small_cost, large_cost = (float(trial.costs(m.costliest).sum()) for m in (small, large))
    loaded_bytes_per_trace = int(trial.loader.format.bytes_per_trace(store, indices).mean())
    loader_bytes = (trial.loader.max_in_flight + 1) * loaded_bytes_per_trace
    # Memory as a line through the two measurements: fixed bytes, and bytes per unit of cost.
    bytes_per_cost = max(0.0, (large.peak.anonymous - small.peak.anonymous) / max(1.0, large_cost - small_cost))
    if large_cost <= small_cost or bytes_per_cost == 0:
        step_bytes = large.peak.anonymous - start.anonymous - loader_bytes * batch_size
        bytes_per_cost = max(1.0, step_bytes) / max(1.0, large_cost)
    fixed_bytes = large.peak.anonymous - bytes_per_cost * large_cost - loader_bytes * batch_size
    seconds_per_trace = max(0.0, (large.seconds - small.seconds) / max(1, many - few)) or large.seconds / many
    # The floor: a step on the longest trace alone, with the smallest ring of the loader.
    longest_bytes = bytes_per_cost * max(0.0, float(costs.max()) - small_cost)
    floor = small.peak.data - start.data + longest_bytes + RESERVE_BYTES + SLACK_BYTES
    return TrainingPlan(
        name=name,
        batch_size=config.batch_size,
        num_train=num_train or usual_num_train,
        libraries_bytes=start.anonymous,
        file_bytes=memory_use().file + mapped_bytes(store, trial.loader.format.view, indices),
        loader_bytes_per_trace=loader_bytes + LATER_BATCHES * loaded_bytes_per_trace,
        fixed_bytes=LATER_BYTES + int(fixed_bytes),
        trace_bytes=bytes_per_cost * float(costs.mean()),
        largest_batch_factor=largest_batch_factor(trial.loader.planner, costs, indices),
        seconds_start=large.start,
        seconds_fixed=max(0.0, large.seconds - seconds_per_trace * many),
        seconds_per_trace=seconds_per_trace,
        floor_bytes=int(floor),
    )


def plan_micro_batches(
    names: Sequence[str],
    store: TraceStore,
    config: TrainConfig,
    model_options: Mapping[str, Any],
    budget: int,
    start: MemoryUse,
    num_train: int,
    num_ranks: int = 1,
) -> dict[str, int | None]:
    """Return the micro-batch size of each detector for a memory budget.

    Parameters
    ----------
    names : sequence of str
        Keys of `MODELS`.
    store, config, model_options, start, num_train
        See `plan_training`.
    budget : int
        Bytes above `start` that each rank may use.
    num_ranks : int
        Each rank computes a slice of every batch.

    Returns
    -------
    dict
        Traces of a micro-batch by name, None where the whole slice fits.

    Raises
    ------
    UsageError
        A detector needs more than the budget.
    """
    planned: dict[str, int | None] = {}
    config = replace(config, batch_size=-(-config.batch_size // num_ranks))
    for name in names:
        plan = plan_training(name, store, config, model_options, start=start, num_train=num_train, max_bytes=budget)
        if budget < _MIN_SHARE_OF_FLOOR * plan.floor_bytes:
            raise UsageError(
                f"memory budget {format_size(budget)}{' a rank' if num_ranks > 1 else ''} is below "
                f"{format_size(plan.floor_bytes)}, the least that {name} needs with batches of {config.batch_size} "
                "(tracestore plan shows what fits)"
            )
        micro = plan.largest_micro_batch(start.anonymous + budget - RESERVE_BYTES, config.batch_size)
        planned[name] = max(1, micro) if micro < config.batch_size else None
    return planned
