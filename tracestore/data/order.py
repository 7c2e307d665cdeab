"""The order of an epoch: pure functions of (n, seed, epoch), never of threads, workers or ranks.

Position p of an epoch is a trace; a batch is a run of positions. Ranks take slices of
a batch, workers take whole batches. `permute` and `shuffle_buffer` say in numpy what
_core.shuffle does; the tests hold the two together.
"""

import math
from collections.abc import Callable

import numpy as np

from tracestore._core import shuffle

SHUFFLES = ("global", "buffer", "block", "none")
_ROUNDS = 6
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def splitmix64(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): uint64 -> uint64, a bijection."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
        return value


def epoch_key(seed: int, epoch: int, stream: int = 0) -> int:
    """A 64-bit key from seed and epoch; `stream` keeps different uses apart."""
    key = np.zeros(1, np.uint64)
    for part in (seed, epoch, stream):
        with np.errstate(over="ignore"):
            key = splitmix64(key + np.uint64(0x9E3779B97F4A7C15) + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return int(key[0])


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """The keyed permutation of range(n) at some positions, in O(1) memory a position.

    A balanced Feistel network over the smallest even number of bits that holds n;
    values outside the range are sent through again (cycle walking, Black and
    Rogaway 2002)."""
    if n <= 1:
        return np.zeros(len(positions), np.int64)
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = splitmix64(np.uint64(key) ^ (np.arange(1, _ROUNDS + 1, dtype=np.uint64) << np.uint64(56)))

    def once(value: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & low
        for round_key in keys:
            left, right = right, left ^ (splitmix64(right ^ round_key) & low)
        return (left << half) | right

    result = once(np.asarray(positions, dtype=np.uint64))
    outside = np.flatnonzero(result >= np.uint64(n))
    while outside.size:
        result[outside] = once(result[outside])
        outside = outside[result[outside] >= np.uint64(n)]
    return result.astype(np.int64)


def shuffle_buffer(n: int, size: int, key: int) -> np.ndarray:
    """Every id once: a window of `size` ids, filled in store order, emits one at random a step."""
    size = max(1, min(size, n))
    draws = splitmix64(np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key))
    window = list(range(size))
    out = np.empty(n, np.int64)
    following = size
    for step in range(n):
        slot = int(draws[step]) % len(window)
        out[step] = window[slot]
        if following < n:
            window[slot] = following
            following += 1
        else:
            window[slot] = window[-1]
            window.pop()
    return out


class EpochOrder:
    """Which trace stands at which position of one epoch of n.

    mode: "global", a keyed permutation of all; "buffer", a shuffle buffer of ids;
    "block", blocks of `block_size` neighbours in random order, mixed inside;
    "none", store order. Memory: O(1) for "global" and "none", O(buffer_size) for
    "buffer", O(number of blocks) for "block".
    """

    def __init__(
        self, n: int, seed: int, epoch: int, mode: str = "global", buffer_size: int = 1000, block_size: int = 1
    ) -> None:
        if mode not in SHUFFLES:
            raise ValueError(f"found shuffle {mode!r}, expected one of {', '.join(SHUFFLES)}")
        self.n, self.mode = n, mode
        self._key = epoch_key(seed, epoch)
        if mode == "buffer":
            self._buffer = shuffle.ShuffleBuffer(n, max(1, min(buffer_size, n)), self._key)
        elif mode == "block":
            self._block_size = size = max(1, min(block_size, n))
            count = math.ceil(n / size)
            self._blocks = _permute(np.arange(count), count, self._key)
            self._starts = np.concatenate([[0], np.cumsum(np.minimum(size, n - self._blocks * size))])

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Ids at some positions, each in range(n). "buffer" reads forward at no cost;
        a position before the last one read starts its window over."""
        positions = np.ascontiguousarray(positions, np.int64)
        if self.mode == "none" or self.n <= 1:
            return positions.copy()
        if self.mode == "global":
            return _permute(positions, self.n, self._key)
        return self._buffered(positions) if self.mode == "buffer" else self._block(positions)

    def _buffered(self, positions: np.ndarray) -> np.ndarray:
        out = np.empty(len(positions), np.int64)
        # Runs of neighbouring positions: a rank's slice of a batch is one.
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(positions)], strict=True):
            if end > begin:
                self._buffer.read(int(positions[begin]), out[begin:end])
        return out

    def _block(self, positions: np.ndarray) -> np.ndarray:
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


def _permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    out = np.empty(len(positions), np.int64)
    shuffle.permute(positions, n, key, out)
    return out


class Batches:
    """Batches of batch_size positions: batch g is [g B, (g + 1) B). drop_last leaves a
    short last one out; pad fills it with positions from the front of the epoch."""

    def __init__(self, n: int, batch_size: int, drop_last: bool = False, pad_last: bool = False) -> None:
        self.n, self.batch_size, self.pad_last = n, batch_size, pad_last and not drop_last
        self._count = n // batch_size if drop_last else -(-n // batch_size)

    def __len__(self) -> int:
        return self._count

    def bounds(self, batch: int) -> tuple[int, int]:
        begin = batch * self.batch_size
        return begin, begin + self.batch_size if self.pad_last else min(self.n, begin + self.batch_size)

    def positions(self, batch: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """The positions of a batch that a rank takes: a contiguous slice, the first ranks
        one longer where the batch does not divide; may be empty."""
        begin, end = self.bounds(batch)
        share, rest = divmod(max(0, end - begin), world_size)
        first = begin + rank * share + min(rank, rest)
        found = np.arange(first, first + share + (rank < rest), dtype=np.int64)
        return found % self.n if self.pad_last else found


class CostBoundedBatches(Batches):
    """Batches of neighbouring positions whose costs add up to at most `limit`; a trace
    that costs more is a batch by itself. cost_at(positions) -> int64 costs.

    Where the batches begin is found in one pass over the epoch (8 bytes a batch kept).
    """

    def __init__(
        self, n: int, limit: int, cost_at: Callable[[np.ndarray], np.ndarray], drop_last: bool = False
    ) -> None:
        self.n, self.pad_last = n, False
        starts, spent = [0], 0
        for begin in range(0, n, 1 << 16):
            costs = cost_at(np.arange(begin, min(n, begin + (1 << 16)))).astype(np.int64)
            total = np.concatenate([[0], np.cumsum(costs)])
            at = 0
            while True:
                # The first position of the chunk that does not fit the batch begun.
                end = int(np.searchsorted(total, total[at] + limit - spent, side="right")) - 1
                if end >= len(costs):
                    spent += int(total[-1] - total[at])
                    break
                if spent == 0 and end == at:
                    end += 1
                starts.append(begin + end)
                at, spent = end, 0
                if at == len(costs):
                    break
        if starts[-1] < n and not (drop_last and spent < limit):
            starts.append(n)
        self._starts = np.array(starts, np.int64)
        self._count = len(starts) - 1

    def bounds(self, batch: int) -> tuple[int, int]:
        return int(self._starts[batch]), int(self._starts[batch + 1])
