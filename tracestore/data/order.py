"""The order and the batches of an epoch.

Both are pure functions of (n, seed, epoch), independent of threads, workers and ranks. An epoch
assigns an id to each position, and a batch is a run of positions. A rank takes a slice of each
batch, a worker takes whole batches.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from tracestore._core.shuffle import ShuffleBuffer
from tracestore._core.shuffle import permute as permute_into
from tracestore.errors import UsageError

Shuffle = Literal["global", "buffer", "block", "none"]
SHUFFLES: tuple[Shuffle, ...] = get_args(Shuffle)
# Positions whose costs are looked up at once.
COST_CHUNK = 1 << 16
_MASK = 0xFFFFFFFFFFFFFFFF


def shuffle_name(shuffle: Shuffle | bool) -> Shuffle:
    """Return the name of an order: True stands for "global", False for "none"."""
    if isinstance(shuffle, bool):
        return "global" if shuffle else "none"
    return shuffle


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an integer of any type, such as one of numpy, as an int; UsageError for another value, or one below `least`."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least):
        expected = "a whole number" if least is None else f"a whole number of at least {least}"
        raise UsageError(f"found {name} {value!r:.80}, expected {expected}")
    return found


def splitmix64(value: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 finalizer of uint64 values, which is a bijection.

    References
    ----------
    Steele, Lea and Flood (2014), "Fast splittable pseudorandom number generators", OOPSLA.
    """
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
    return value


def epoch_key(seed: int, epoch: int, stream: int = 0) -> int:
    """Return a 64-bit key for (seed, epoch). Different streams give independent keys."""
    key = 0
    for value in (seed, epoch, stream):
        # splitmix64 of one value, without the cost of an array.
        key = (key + 0x9E3779B97F4A7C15 + value) & _MASK
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


def _permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    out = np.empty(len(positions), np.int64)
    permute_into(positions, n, key, out)
    return out


class EpochOrder:
    """The id at each position of one epoch over n ids.

    Parameters
    ----------
    n : int
        Number of ids.
    seed, epoch : int
        Together they select the order.
    shuffle : {"global", "buffer", "block", "none"}
        "global": a keyed permutation, in O(1) memory. "buffer": a shuffle buffer of `buffer_size`
        ids, in O(buffer_size) memory. "block": blocks of `block_size` neighboring ids in random
        order, each permuted, in O(n / block_size) memory. "none": store order.
    buffer_size, block_size : int
        Sizes in ids for "buffer" and "block".
    """

    def __init__(
        self, n: int, seed: int, epoch: int, shuffle: Shuffle = "global", buffer_size: int = 1000, block_size: int = 1
    ) -> None:
        self.n, self.shuffle = n, shuffle
        self._key = epoch_key(seed, epoch)
        if shuffle == "buffer":
            self._buffer = ShuffleBuffer(n, max(1, min(buffer_size, n)), self._key)
        elif shuffle == "block":
            self._block_size = size = max(1, min(block_size, n))
            count = math.ceil(n / size)
            self._blocks = _permute(np.arange(count), count, self._key)
            self._starts = np.concatenate([[0], np.cumsum(np.minimum(size, n - self._blocks * size))])

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids, int64 in range(n), at the given positions.

        Order "buffer" is cheap only when it is read forward: a position before the last one that
        was read restarts the window.
        """
        positions = np.ascontiguousarray(positions, np.int64)
        if self.shuffle == "none" or self.n <= 1:
            return positions.copy()
        if self.shuffle == "global":
            return _permute(positions, self.n, self._key)
        return self._read_buffer(positions) if self.shuffle == "buffer" else self._read_blocks(positions)

    def _read_buffer(self, positions: np.ndarray) -> np.ndarray:
        out = np.empty(len(positions), np.int64)
        # The buffer reads runs of consecutive positions; a rank's slice of a batch is one run.
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(positions)], strict=True):
            if end > begin:
                self._buffer.read(int(positions[begin]), out[begin:end])
        return out

    def _read_blocks(self, positions: np.ndarray) -> np.ndarray:
        which = np.searchsorted(self._starts, positions, side="right") - 1
        out = np.empty(len(positions), np.int64)
        for k in np.unique(which).tolist():
            chosen = which == k
            block, begin = int(self._blocks[k]), int(self._starts[k])
            inside = _permute(
                positions[chosen] - begin, int(self._starts[k + 1]) - begin, epoch_key(self._key, block, 1)
            )
            out[chosen] = block * self._block_size + inside
        return out


@lru_cache(maxsize=8)
def mixing_slots(weights: tuple[int, ...]) -> np.ndarray:
    """Return which of several sets gives each sample of a period, read-only (sum of the weights,) int64.

    Of the first n samples a set has less than one more or less than its share n * weight / sum, for every n: sample k
    of a set is due between floor(k / share) and ceil((k + 1) / share), and the one that is due first goes first [1]_.

    References
    ----------
    .. [1] Baruah, Cohen, Plaxton and Varvel (1996), "Proportionate progress: a notion of fairness in resource
       allocation", Algorithmica 15.
    """
    total, counts, slots = sum(weights), [0] * len(weights), []
    for slot in range(total):
        ready = (k for k, weight in enumerate(weights) if counts[k] * total < (slot + 1) * weight)
        slots.append(min(ready, key=lambda k: -(-(counts[k] + 1) * total // weights[k])))
        counts[slots[-1]] += 1
    found = np.array(slots, np.int64)
    found.flags.writeable = False
    return found


class MixedOrder:
    """An epoch of any length over several sets of ids, mixed by weights.

    It continues the slots of the epoch before, so that the shares hold over all epochs, also where their length is no
    multiple of the period. The ids of set s follow those of set s - 1. Sample k of a set, counted over all epochs, is the id at position
    k % n of its own order number k // n, an EpochOrder with seed + s: each set continues where the epoch before ended,
    and begins again, in another order, when it ends. Memory does not grow with the epoch.

    Parameters
    ----------
    sizes, weights : sequence and tuple of int
        Ids and weight of each set, all positive.
    length : int
        Positions of the epoch.
    seed, epoch : int
    shuffle, buffer_size, block_size
        As of EpochOrder.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: tuple[int, ...],
        length: int,
        seed: int,
        epoch: int,
        shuffle: Shuffle = "global",
        buffer_size: int = 1000,
        block_size: int = 1,
    ) -> None:
        self._sizes, self._first = sizes, np.cumsum([0, *sizes])
        self._slots = mixing_slots(weights)
        # Samples of its set before each slot of a period.
        self._before = np.zeros(len(self._slots), np.int64)
        self._weights, self._begin = np.array(weights, np.int64), epoch * length
        for k, weight in enumerate(weights):
            self._before[self._slots == k] = np.arange(weight)
        self._seed, self._options = seed, (shuffle, buffer_size, block_size)
        self._orders: dict[int, tuple[int, EpochOrder]] = {}

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids, int64, at the given positions; see EpochOrder.ids_at()."""
        period, slot = np.divmod(self._begin + np.asarray(positions, np.int64), len(self._slots))
        which = self._slots[slot]
        numbers = period * self._weights[which] + self._before[slot]
        out = np.empty(len(which), np.int64)
        for k in np.unique(which).tolist():
            passes, inside = np.divmod(numbers, self._sizes[k])
            for number in np.unique(passes[which == k]).tolist():
                chosen = (which == k) & (passes == number)
                out[chosen] = self._first[k] + self._order(k, number).ids_at(inside[chosen])
        return out

    def _order(self, k: int, number: int) -> EpochOrder:
        """Return an order of a set. The last one is kept, because some have a state."""
        if k not in self._orders or self._orders[k][0] != number:
            self._orders[k] = number, EpochOrder(self._sizes[k], self._seed + k, number, *self._options)
        return self._orders[k][1]


class Batches:
    """Batches of a fixed number of positions: batch g covers [g * batch_size, (g + 1) * batch_size).

    Parameters
    ----------
    n : int
        Positions of the epoch.
    batch_size : int
        Positions of a batch.
    drop_last : bool
        Leave out a last batch that is short.
    pad_last : bool
        Fill a short last batch with the first positions of the epoch.
    """

    def __init__(self, n: int, batch_size: int, drop_last: bool = False, pad_last: bool = False) -> None:
        self.n, self.batch_size, self.pad_last = n, batch_size, pad_last and not drop_last
        self._count = n // batch_size if drop_last else -(-n // batch_size)

    def __len__(self) -> int:
        return self._count

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return the first position of a batch and the position after its last one."""
        begin = batch * self.batch_size
        return begin, begin + self.batch_size if self.pad_last else min(self.n, begin + self.batch_size)

    def positions(self, batch: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """Return the positions of a rank's slice of a batch, int64, possibly none.

        Slices are contiguous. Where the batch does not divide evenly, the first ranks get one more.
        """
        begin, end = self.bounds(batch)
        size, rest = divmod(max(0, end - begin), world_size)
        start = begin + rank * size + min(rank, rest)
        positions = np.arange(start, start + size + (rank < rest), dtype=np.int64)
        return positions % self.n if self.pad_last else positions


class CostBoundedBatches(Batches):
    """Batches of neighboring positions whose costs add up to at most `max_cost`.

    An id that costs more is a batch by itself. One pass over the epoch finds where the batches
    begin; 8 bytes per batch are kept.

    Parameters
    ----------
    n : int
        Positions of the epoch.
    max_cost : int
        Limit for the sum of the costs of a batch.
    cost_at : callable
        Maps positions to their costs, int64.
    drop_last : bool
        Leave out a last batch that is below the limit.
    """

    def __init__(
        self, n: int, max_cost: int, cost_at: Callable[[np.ndarray], np.ndarray], drop_last: bool = False
    ) -> None:
        self.n, self.pad_last = n, False
        total = np.zeros(n + 1, np.int64)  # of the positions before each position
        for begin in range(0, n, COST_CHUNK):
            end = min(n, begin + COST_CHUNK)
            total[begin + 1 : end + 1] = cost_at(np.arange(begin, end))
        np.cumsum(total, out=total)
        starts = [0]
        while starts[-1] < n:
            fitting = int(np.searchsorted(total, total[starts[-1]] + max_cost, side="right")) - 1
            starts.append(max(fitting, starts[-1] + 1))
        if drop_last and n > 0 and total[n] - total[starts[-2]] < max_cost:
            starts.pop()
        self._starts = np.array(starts, np.int64)
        self._count = len(starts) - 1

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return the first position of a batch and the position after its last one."""
        return int(self._starts[batch]), int(self._starts[batch + 1])
