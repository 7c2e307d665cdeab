"""The plan of an epoch: which traces form which batch, for which rank."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.data import order
from tracestore.data.batches.batch_format import BatchFormat
from tracestore.data.tokens.token_table import TokenTable
from tracestore.errors import UsageError
from tracestore.store.read.store import TraceStore
from tracestore.words import plural

BatchBy = Literal["tokens", "nodes", "edges", "bytes"]
_MEAN_SAMPLE = 4096
# Largest sum of weights: a period of the order, which is kept in memory.
MAX_WEIGHTS = 10_000
# The ids that tell in a state which store it is of.
_MAX_IDS = 256


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return the rank and the number of ranks.

    A value that is None comes from torch.distributed if it is initialized, else from the
    environment variables RANK and WORLD_SIZE.
    """
    import torch.distributed  # imported here because `tracestore plan` plans epochs without torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        default = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        default = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rank = default[0] if rank is None else rank
    world_size = default[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise UsageError(f"found rank {rank} of {world_size}")
    return rank, world_size


def trace_costs(store: TraceStore, batch_format: BatchFormat, by: BatchBy, indices: np.ndarray) -> np.ndarray:
    """Return the cost of each trace, int64 of shape (n,), at least 1.

    "tokens" is S, "nodes" S for each of the layers, "edges" the stored pairs of these before any
    threshold, and "bytes" what the trace takes in a batch.
    """
    if by == "bytes":
        return batch_format.bytes_per_trace(store, indices)
    tokens, pairs = store.token_and_pair_counts(indices, batch_format.layer_numbers(store))
    found = {"tokens": tokens, "nodes": tokens * batch_format.num_layers(store), "edges": pairs}[by]
    costs: np.ndarray = np.maximum(found, 1)  # last tokens alone, and graphs without edges, have none
    return costs


def mean_trace_bytes(store: TraceStore, batch_format: BatchFormat, indices: np.ndarray | None = None) -> int:
    """Return the mean number of bytes that a trace takes in a batch, at least 1.

    The mean is over `indices`, or over the store. Large sets are sampled evenly.
    """
    n = len(store) if indices is None else len(indices)
    if n == 0:
        return 1
    sample = np.unique(np.linspace(0, n - 1, min(n, _MEAN_SAMPLE)).astype(np.int64))
    return max(1, int(batch_format.bytes_per_trace(store, sample if indices is None else indices[sample]).mean()))


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch.

    Attributes
    ----------
    ids : EpochOrder or MixedOrder
        The id at each position.
    batches : Batches
        The positions of each batch.
    indices : ndarray of int64, optional
        The store index of each id. None: an id is a store index.
    """

    ids: order.EpochOrder | order.MixedOrder
    batches: order.Batches
    indices: np.ndarray | None

    def __len__(self) -> int:
        return len(self.batches)

    def traces(self, batch: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """Return the store indices, int64, of a rank's slice of a batch. The slice may be empty."""
        return self.indices_at(self.batches.positions(batch, rank, world_size))

    def indices_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the store indices, int64, at the given positions of the epoch."""
        ids = self.ids.ids_at(positions)
        return ids if self.indices is None else self.indices[ids]


@dataclass
class EpochPlanner:
    """Plans epochs: each plan is a pure function of the store and these arguments.

    Parameters
    ----------
    store : TraceStore
        The store.
    batch_format : BatchFormat
        The form of the batches.
    batch_size : int
        Traces or tokens of a batch, over all ranks.
    batch_by : {"tokens", "nodes", "edges", "bytes"}, optional
        Bound the cost of a batch in this unit instead of its number of traces.
    max_batch_cost : int, optional
        The bound. Required by `batch_by`.
    shuffle : {"global", "buffer", "block", "none"}
        The order, see `order.EpochOrder`.
    seed : int
        Seed of the order.
    indices : ndarray of int64, optional
        Restrict the epoch to these traces.
    tokens : TokenTable, optional
        The chosen tokens of view "tokens", which the epoch is over instead of `indices`. Excludes `batch_by`.
    buffer_size : int
        Ids of the window of shuffle "buffer".
    block_bytes : int
        Bytes of a block of shuffle "block".
    drop_last : bool
        Leave out a last batch that is short.
    pad_last : bool
        Fill a short last batch with the first traces of the epoch. Excludes `drop_last` and
        `batch_by`.
    weights : sequence of int, optional
        The share of each of several stores in the epoch; see `order.MixedOrder`.
    epoch_size : int, optional
        Traces or tokens of an epoch, over all ranks. Default: all.

    Raises
    ------
    UsageError
        For arguments outside these ranges.
    """

    store: TraceStore
    batch_format: BatchFormat
    _: KW_ONLY
    batch_size: int
    batch_by: BatchBy | None = None
    max_batch_cost: int | None = None
    shuffle: order.Shuffle = "global"
    seed: int = 0
    indices: np.ndarray | None = None
    tokens: TokenTable | None = None
    buffer_size: int = 1000
    block_bytes: int = 256 << 20
    drop_last: bool = False
    pad_last: bool = False
    weights: Sequence[int] | None = None
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        self._num_traces = len(self.store)  # a pickled copy may open the store with further traces
        for name in ("batch_size", "buffer_size", "block_bytes"):
            setattr(self, name, order.whole_number(name, getattr(self, name), 1))
        self.seed = order.whole_number("seed", self.seed)
        if self.shuffle not in order.SHUFFLES:
            raise UsageError(f"found shuffle {self.shuffle!r}, expected one of {', '.join(order.SHUFFLES)}")
        by, units = self.batch_by, get_args(BatchBy)
        if by is None and self.max_batch_cost is not None:
            raise UsageError(f"max_batch_cost requires batch_by, one of {', '.join(units)}")
        if by is not None:
            if by not in units:
                raise UsageError(f"found batch_by {by!r}, expected one of {', '.join(units)}")
            self.max_batch_cost = order.whole_number("max_batch_cost", self.max_batch_cost, 1)
        if self.pad_last and (self.drop_last or self.batch_by is not None):
            raise UsageError("pad_last excludes drop_last and batch_by")
        if self.tokens is not None:
            self.indices = None
            if by is not None:
                raise UsageError("batch_by composes batches of traces; view 'tokens' takes batch_size")
        self.block_size = 1
        if self.shuffle == "block":
            self.block_size = max(1, self.block_bytes // mean_trace_bytes(self.store, self.batch_format))
        self._last: tuple[int, EpochPlan] | None = None
        self._sizes = self._checked_sizes()

    def _checked_sizes(self) -> list[int]:
        """Return the samples of each set that the epoch mixes, and sort the traces by their store."""
        if self.epoch_size is not None:
            self.epoch_size = order.whole_number("epoch_size", self.epoch_size, 1)
        weights = self.weights = None if self.weights is None else tuple(self.weights)
        if weights is None:
            sizes = [self._num_known]
        else:
            paths, bounds = self.store.internals.members, self.store.internals.first_traces
            is_valid = all(hasattr(weight, "__index__") and weight > 0 for weight in weights)
            if len(weights) != len(paths) or not is_valid or sum(weights) > MAX_WEIGHTS:
                raise UsageError(
                    f"found weights {weights!r:.80}, expected a positive integer for each of {plural(len(paths), 'store')}, "
                    f"together at most {MAX_WEIGHTS:,}"
                )
            if self.tokens is not None:
                raise UsageError("weights mix traces; view 'tokens' takes none")
            if self.indices is not None:
                owner = np.searchsorted(bounds, self.indices, side="right")
                self.indices = self.indices[np.argsort(owner, kind="stable")]
                bounds = np.searchsorted(np.sort(owner), range(1, len(paths) + 2)).tolist()
            sizes = np.diff(bounds).tolist()
        if 0 in sizes and self.num_samples:
            raise UsageError(f"{self.store.path}: a store has no trace in the epoch: {sizes}; leave it out")
        return sizes

    @property
    def _num_known(self) -> int:
        """Traces, or tokens in view "tokens", that an epoch takes its samples from."""
        if self.tokens is not None:
            return len(self.tokens)
        return self._num_traces if self.indices is None else len(self.indices)

    @property
    def num_samples(self) -> int:
        """Traces, or tokens in view "tokens", of an epoch, over all ranks."""
        return self._num_known if self.epoch_size is None else self.epoch_size

    def plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch. The last plan is kept."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._make_plan(epoch)
        return self._last[1]

    def _make_plan(self, epoch: int) -> EpochPlan:
        n = self.num_samples
        ids: order.EpochOrder | order.MixedOrder
        kind = self.shuffle, self.buffer_size, self.block_size
        if self._sizes == [n]:
            ids = order.EpochOrder(n, self.seed, epoch, *kind)
        else:
            ids = order.MixedOrder(self._sizes, tuple(self.weights or [1]), n, self.seed, epoch, *kind)
        batches = order.Batches(n, self.batch_size, self.drop_last, self.pad_last)
        plan = EpochPlan(ids, batches, self.indices)
        if self.batch_by is None or self.max_batch_cost is None:
            return plan
        by = self.batch_by

        def cost_at(positions: np.ndarray) -> np.ndarray:
            return trace_costs(self.store, self.batch_format, by, plan.indices_at(positions))

        return EpochPlan(ids, order.CostBoundedBatches(n, self.max_batch_cost, cost_at, self.drop_last), self.indices)

    def signature(self) -> dict[str, Any]:
        """Return the values that two planners must share for a position to mean the same trace.

        The keys are part of the loader's state and therefore of checkpoints.
        """
        members = self.store.internals.members
        costs = {} if self.batch_by is None else {"costs_crc32c": self._costs_crc32c}
        return costs | {
            "seed": self.seed,
            "batch_size": self.batch_size if self.batch_by is None else 0,
            "batch_cost": self.batch_by or "",
            "batch_limit": self.max_batch_cost or 0,
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
            "window": {"buffer": self.buffer_size, "block": self.block_size}.get(self.shuffle, 0),
            "indices_crc32c": self._indices_crc32c(),
            "num_known": self._num_known,
            "weights": [int(weight) for weight in self.weights or ()],
            "stores": [m.manifest.content for m in members] if len(members) > 1 else [self._some_ids],
        }

    @cached_property
    def _some_ids(self) -> str:
        """Return a digest of sizes and some ids of the only store, which it still has for the same traces if it has grown."""
        count = self._num_traces if self.indices is None else len(self.indices)
        chosen = np.linspace(0, count - 1, min(count, _MAX_IDS)).astype(np.int64)
        chosen = chosen if self.indices is None else np.asarray(self.indices)[chosen]
        facts = self.store.num_layers, self.store.hidden_dim, self.store.question_ids.take(chosen)
        return hashlib.blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @cached_property
    def _costs_crc32c(self) -> int:
        """The checksum of the costs that compose batches, which depend on layers and form of the batches."""
        assert self.batch_by is not None
        known, crc = np.arange(self._num_traces) if self.indices is None else self.indices, 0
        for begin in range(0, len(known), order.COST_CHUNK):
            some = known[begin : begin + order.COST_CHUNK]
            crc = crc32c(trace_costs(self.store, self.batch_format, self.batch_by, some), crc)
        return crc

    def _indices_crc32c(self) -> int:
        if self.tokens is not None:
            return self.tokens.crc32c
        return 0 if self.indices is None else crc32c(self.indices)
