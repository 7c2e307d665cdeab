"""The permutation and the shuffle buffer of `_core.shuffle`, in numpy."""

import numpy as np

from tracestore.data.order import splitmix64

_ROUNDS = 6


def permute(positions, n, key):
    """Return the keyed permutation of range(n) at some positions.

    The permutation is a balanced Feistel network over the smallest even number of bits that holds
    n. Values outside the range pass through it again (cycle walking, Black and Rogaway 2002).
    """
    if n <= 1:
        return np.zeros(len(positions), np.int64)
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = splitmix64(np.uint64(key) ^ (np.arange(1, _ROUNDS + 1, dtype=np.uint64) << np.uint64(56)))

    def encrypt(value):
        left, right = value >> half, value & low
        for round_key in keys:
            left, right = right, left ^ (splitmix64(right ^ round_key) & low)
        return (left << half) | right

    result = encrypt(np.asarray(positions, dtype=np.uint64))
    outside = np.flatnonzero(result >= np.uint64(n))
    while outside.size:
        result[outside] = encrypt(result[outside])
        outside = outside[result[outside] >= np.uint64(n)]
    return result.astype(np.int64)


def shuffle_buffer(n, size, key):
    """Return range(n) in the order in which a window of `size` ids emits it."""
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
