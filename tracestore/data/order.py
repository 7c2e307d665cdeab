"""The order of an epoch: pure functions of (n, seed, epoch), never of threads, workers or ranks.

Position p of an epoch is a trace; batch g is positions g B .. (g + 1) B. Ranks
take slices of a batch, workers take whole batches.
"""

import math
from dataclasses import dataclass

import numpy as np

MODES = ("global", "buffer", "block", "none")
_ROUNDS = 6
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): uint64 -> uint64, a bijection."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def epoch_key(seed: int, epoch: int, stream: int = 0) -> int:
    """A 64-bit key from seed and epoch; `stream` keeps different uses apart."""
    key = np.zeros(1, np.uint64)
    for part in (seed, epoch, stream):
        with np.errstate(over="ignore"):
            key = mix(key + np.uint64(0x9E3779B97F4A7C15) + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
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
    keys = mix(np.uint64(key) ^ (np.arange(1, _ROUNDS + 1, dtype=np.uint64) << np.uint64(56)))

    def once(value: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & low
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & low)
        return (left << half) | right

    result = once(np.asarray(positions, dtype=np.uint64))
    outside = np.flatnonzero(result >= np.uint64(n))
    while outside.size:
        result[outside] = once(result[outside])
        outside = outside[result[outside] >= np.uint64(n)]
    return result.astype(np.int64)


def _buffer_order(n: int, size: int, key: int) -> np.ndarray:
    """Every id once: a window of `size` ids, filled in store order, emits one at random a step."""
    size = max(1, min(size, n))
    draws = mix(np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key))
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


@dataclass(frozen=True)
class EpochOrder:
    """Which trace stands at which position of one epoch.

    mode: "global", a keyed permutation of all; "buffer", a shuffle buffer of ids;
    "block", blocks of `block_size` neighbours in random order, mixed inside;
    "none", store order.
    """

    n: int
    seed: int
    epoch: int
    mode: str = "global"
    buffer_size: int = 1000
    block_size: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"found shuffle {self.mode!r}, expected one of {', '.join(MODES)}")
        if self.mode == "buffer":
            order = _buffer_order(self.n, self.buffer_size, epoch_key(self.seed, self.epoch))
            object.__setattr__(self, "_buffered", order)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Ids at some positions, each in range(n)."""
        positions = np.asarray(positions, np.int64)
        key = epoch_key(self.seed, self.epoch)
        if self.mode == "none" or self.n <= 1:
            return positions.copy()
        if self.mode == "global":
            return permute(positions, self.n, key)
        if self.mode == "buffer":
            return np.asarray(self._buffered[positions])  # type: ignore[attr-defined]
        return self._block(positions, key)

    def _block(self, positions: np.ndarray, key: int) -> np.ndarray:
        size = max(1, min(self.block_size, self.n))
        blocks = permute(np.arange(math.ceil(self.n / size)), math.ceil(self.n / size), key)
        counts = np.minimum(size, self.n - blocks * size)
        starts = np.concatenate([[0], np.cumsum(counts)])
        which = np.searchsorted(starts, positions, side="right") - 1
        out = np.empty(len(positions), np.int64)
        for k in np.unique(which):
            chosen = which == k
            inside = permute(positions[chosen] - starts[k], int(counts[k]), epoch_key(key, int(blocks[k]), 1))
            out[chosen] = blocks[k] * size + inside
        return out


def num_batches(n: int, batch_size: int, drop_last: bool = False) -> int:
    """Batches an epoch of n positions has."""
    return n // batch_size if drop_last else -(-n // batch_size)


def batch_positions(batch: int, n: int, batch_size: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
    """The positions of global batch `batch` that a rank takes: a contiguous slice, the
    first ranks one longer where the batch does not divide; may be empty."""
    begin, end = batch * batch_size, min(n, (batch + 1) * batch_size)
    count = max(0, end - begin)
    share, rest = divmod(count, world_size)
    first = begin + rank * share + min(rank, rest)
    return np.arange(first, first + share + (rank < rest), dtype=np.int64)
