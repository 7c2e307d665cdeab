"""What an epoch is made of: which traces, in which order, in which batches, for which rank."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.data import order
from tracestore.data.batch_format import BatchFormat
from tracestore.errors import UsageError
from tracestore.store.read.store import TraceStore

COSTS = ("tokens", "nodes", "edges", "bytes")


def rank_and_world_size() -> tuple[int, int]:
    """From torch.distributed where it is initialised, else from RANK and WORLD_SIZE."""
    import torch.distributed  # here: `tracestore plan` lays out epochs without torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def trace_costs(store: TraceStore, form: BatchFormat, cost: str, indices: np.ndarray) -> np.ndarray:
    """(n,) int64 costs of some traces: tokens S, nodes L S, edges (stored pairs of all
    layers, before any threshold) or bytes in a batch."""
    if cost == "bytes":
        return form.bytes_per_trace(store, indices)
    tokens, pairs = store.sizes(indices)
    return {"tokens": tokens, "nodes": tokens * store.num_layers, "edges": pairs}[cost]


def mean_trace_bytes(store: TraceStore, form: BatchFormat, indices: np.ndarray | None = None) -> int:
    """Bytes a trace takes in a batch, on average over the store or over `indices`; of
    large stores over 4,096 of them, evenly spaced."""
    n = len(store) if indices is None else len(indices)
    if n == 0:
        return 1
    some = np.unique(np.linspace(0, n - 1, min(n, 4096)).astype(np.int64))
    return max(1, int(form.bytes_per_trace(store, some if indices is None else indices[some]).mean()))


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch. `ids` says which id stands at a position, `batches`
    which positions are a batch, `indices` which trace an id is (None: itself)."""

    ids: order.EpochOrder
    batches: order.Batches
    indices: np.ndarray | None

    def __len__(self) -> int:
        return len(self.batches)

    def traces(self, batch: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """Store indices (int64) of a rank's slice of a batch; may be empty."""
        return self.indices_at(self.batches.positions(batch, rank, world_size))

    def indices_at(self, positions: np.ndarray) -> np.ndarray:
        chosen = self.ids.ids_at(positions)
        return chosen if self.indices is None else self.indices[chosen]


class EpochPlanner:
    """Makes the plan of any epoch: a pure function of the store and these arguments.

    batch_size traces a batch, or with batch_by ("tokens", "nodes", "edges", "bytes")
    neighbours in the order whose costs add up to at most max_batch_cost. UsageError for
    arguments that make no sense.
    """

    def __init__(
        self,
        store: TraceStore,
        form: BatchFormat,
        *,
        batch_size: int,
        batch_by: str | None = None,
        max_batch_cost: int | None = None,
        shuffle: str = "global",
        seed: int = 0,
        indices: Sequence[int] | np.ndarray | None = None,
        buffer_size: int = 1000,
        block_bytes: int = 256 << 20,
        drop_last: bool = False,
        pad_last: bool = False,
    ) -> None:
        if batch_size < 1 or buffer_size < 1 or block_bytes < 1:
            raise UsageError(
                f"found batch_size {batch_size}, buffer_size {buffer_size}, block_bytes {block_bytes}, expected at least 1"
            )
        if shuffle not in order.SHUFFLES:
            raise UsageError(f"found shuffle {shuffle!r}, expected one of {', '.join(order.SHUFFLES)}")
        if batch_by is not None and (batch_by not in COSTS or max_batch_cost is None or max_batch_cost < 1):
            raise UsageError(
                f"found batch_by {batch_by!r} and max_batch_cost {max_batch_cost}, expected one of {', '.join(COSTS)} "
                "and at least 1"
            )
        if batch_by is None and max_batch_cost is not None:
            raise UsageError("max_batch_cost requires batch_by: tokens, nodes, edges or bytes")
        if pad_last and (drop_last or batch_by is not None):
            raise UsageError("pad_last goes with batch_size alone")
        self.store, self.form = store, form
        self.batch_size, self.batch_by, self.max_batch_cost = batch_size, batch_by, max_batch_cost
        self.shuffle, self.seed = shuffle, seed
        self.indices = None if indices is None else np.asarray(indices, np.int64)
        if (
            self.indices is not None
            and self.indices.size
            and not (self.indices.min() >= 0 and self.indices.max() < len(store))
        ):
            raise UsageError(f"found indices outside 0 .. {len(store) - 1}")
        self.buffer_size, self.drop_last, self.pad_last = buffer_size, drop_last, pad_last
        self.block_size = 1
        if shuffle == "block":
            self.block_size = max(1, block_bytes // mean_trace_bytes(store, form))
        self._last: tuple[int, EpochPlan] | None = None

    @property
    def num_samples(self) -> int:
        """Traces an epoch visits, over all ranks."""
        return len(self.store) if self.indices is None else len(self.indices)

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; the last one is kept."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._make(epoch)
        return self._last[1]

    def _make(self, epoch: int) -> EpochPlan:
        n = self.num_samples
        positions = order.EpochOrder(n, self.seed, epoch, self.shuffle, self.buffer_size, self.block_size)
        if self.batch_by is None:
            return EpochPlan(positions, order.Batches(n, self.batch_size, self.drop_last, self.pad_last), self.indices)
        assert self.max_batch_cost is not None
        whole = EpochPlan(positions, order.Batches(n, 1), self.indices)
        kind = self.batch_by

        def cost_at(at: np.ndarray) -> np.ndarray:
            return trace_costs(self.store, self.form, kind, whole.indices_at(at))

        return EpochPlan(
            positions, order.CostBoundedBatches(n, self.max_batch_cost, cost_at, self.drop_last), self.indices
        )

    def signature(self) -> dict[str, Any]:
        """What must agree for a position in one epoch to mean the same in another."""
        return {
            "seed": self.seed,
            "batch_size": self.batch_size if self.batch_by is None else 0,
            "batch_cost": self.batch_by or "",
            "batch_limit": self.max_batch_cost or 0,
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
            "window": {"buffer": self.buffer_size, "block": self.block_size}.get(self.shuffle, 0),
            "indices_crc32c": 0 if self.indices is None else crc32c(self.indices),
        }
