"""Strings as utf-8 bytes and offsets (int64, length N + 1, from 0, non-decreasing)."""

from collections.abc import Iterable

import numpy as np


def encode_strings(strings: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """-> (bytes uint8, offsets int64). Lone surrogates, which real tokenizers leave, are kept."""
    encoded = [s.encode("utf-8", "surrogatepass") for s in strings]
    offsets = np.zeros(len(encoded) + 1, "<i8")
    np.cumsum([len(e) for e in encoded], out=offsets[1:])
    return np.frombuffer(b"".join(encoded), "u1"), offsets


def decode_string(data: np.ndarray, offsets: np.ndarray, index: int) -> str:
    """String `index`; ValueError where the offsets or the utf-8 are not sound."""
    begin, end = int(offsets[index]), int(offsets[index + 1])
    if not 0 <= begin <= end <= len(data):
        raise ValueError("string offsets out of bounds")
    return data[begin:end].tobytes().decode("utf-8", "surrogatepass")


def concatenate_ragged(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Ragged arrays one behind the other."""
    values = [v for v, _ in parts]
    offsets = [np.zeros(1, "<i8")]
    base = 0
    for data, starts in parts:
        offsets.append(starts[1:] + base)
        base += len(data)
    return (np.concatenate(values) if values else np.zeros(0, "u1")), np.concatenate(offsets).astype("<i8")
