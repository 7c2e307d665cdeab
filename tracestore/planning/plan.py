"""What training a detector will take: peak memory, time an epoch, and the least it needs.

A cost model with few terms: memory = libraries + model and optimizer + batches of the loader +
what a step keeps of its traces, which grows with their bytes in a batch; time = steps, and traces
beside them. train.measure finds the terms by real steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracestore.data.batch_format import BatchFormat, EdgeOptions
from tracestore.data.epoch import EpochPlanner
from tracestore.detectors.registry import DETECTORS
from tracestore.errors import MissingFieldError, UsageError
from tracestore.store.read.store import TraceStore

# Threads' stacks and heaps, plans of libraries, Python objects.
SLACK_BYTES = 96 << 20
# What a run comes to take beside its first steps: fragments of freed memory, and batches more at once.
LATER_BYTES, LATER_BATCHES = 20 << 20, 2
_TRAIN_SHARE = 0.7
# So many batches of an epoch are looked at for the largest.
_BATCHES = 4096


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


def detectors_for(store: TraceStore) -> list[str]:
    """Return the names of the detectors whose view the store has.

    Raises
    ------
    MissingFieldError
        The store has no view of any detector.
    """
    names: list[str] = []
    missing: MissingFieldError | None = None
    for name, spec in DETECTORS.items():
        try:
            store.require(spec.view)
        except MissingFieldError as error:
            missing = error
        else:
            names.append(name)
    if missing is not None and not names:
        raise missing
    return names


def training_part(store: TraceStore) -> tuple[np.ndarray, int]:
    """The traces to plan for, those with a label, or all where none has one; and how many a
    training takes of them. UsageError where there is none."""
    labelled = np.flatnonzero(np.isfinite(store.targets()))
    indices = labelled if len(labelled) else np.arange(len(store))
    if not len(indices):
        raise UsageError(f"{store.path}: holds no trace")
    return indices, max(1, round(_TRAIN_SHARE * len(indices)))


def sizes_of(store: TraceStore, view: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """store.sizes, where the view is of graphs; else zeros: of sequences nothing need be looked up."""
    return store.sizes(indices) if view == "graph" else (np.zeros_like(indices), np.zeros_like(indices))


def mapped_bytes(store: TraceStore, view: str, tokens: np.ndarray, pairs: np.ndarray) -> int:
    """Bytes of the store that an epoch over some traces maps, for what sizes_of gives of them."""
    stored = EdgeOptions(edge_format="heads" if store.attention_layout == "causal" else "coo")
    return (
        int(BatchFormat(view, stored).bytes_per_trace_of_sizes(store, tokens, pairs).sum())
        if store.codec == "none"
        else 0
    )


def largest_batch_factor(epochs: EpochPlanner, costs: np.ndarray, indices: np.ndarray) -> float:
    """The costliest batch of an epoch over a mean one; costs: of the traces `indices`."""
    plan = epochs.plan(0)
    batches = min(len(plan), _BATCHES)
    at = np.searchsorted(indices, plan.indices_at(np.arange(min(batches * epochs.batch_size, epochs.num_samples))))
    sums = np.add.reduceat(costs[at], np.arange(0, len(at), epochs.batch_size))
    return max(1.0, float(sums.max()) / (epochs.batch_size * float(costs.mean())))
