"""The resources that training a detector takes: peak memory, time per epoch, minimum budget.

A linear model. Memory is the sum of libraries, model and optimizer, batches of the loader, and the
activations of a step, which grow with the bytes of its traces. Time is a constant per step plus a
constant per trace. The module measure determines the coefficients with real steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracestore.data.batches.batch_format import BatchFormat, EdgeFormat, View
from tracestore.data.epoch import EpochPlanner
from tracestore.detectors.registry import DEFAULT_MODELS, MODELS
from tracestore.errors import MissingFieldError, UsageError
from tracestore.split import FRACTIONS
from tracestore.store.format.labels import DEFAULT_THRESHOLD
from tracestore.store.read.store import TraceStore

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
