"""Ragged arrays: strings as UTF-8 bytes plus offsets (int64, length N + 1, from 0, non-decreasing); numbers of items."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tracestore.errors import UsageError


def encode_strings(strings: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the strings as (uint8 bytes, int64 offsets).

    Lone surrogates are preserved because real tokenizers produce them.
    """
    texts = list(strings)
    data = "".join(texts).encode("utf-8", "surrogatepass")
    parts = texts if data.isascii() else [text.encode("utf-8", "surrogatepass") for text in texts]
    offsets = np.zeros(len(texts) + 1, "<i8")
    np.cumsum(list(map(len, parts)), out=offsets[1:])
    return np.frombuffer(data, "u1"), offsets


def decode_string(data: np.ndarray, offsets: np.ndarray, index: int) -> str:
    """Return string `index`.

    Raises
    ------
    ValueError
        If the offsets are out of bounds or the bytes are not valid UTF-8.
    """
    begin, end = int(offsets[index]), int(offsets[index + 1])
    if not 0 <= begin <= end <= len(data):
        raise ValueError("string offsets out of bounds")
    return data[begin:end].tobytes().decode("utf-8", "surrogatepass")


def decode_strings(data: np.ndarray, offsets: np.ndarray) -> list[str]:
    """Return all strings, whose offsets begin at 0 and end at the last byte; ValueError as decode_string()."""
    if not is_offsets(offsets, len(data)):
        raise ValueError("string offsets out of bounds")
    encoded = data.tobytes()
    if encoded.isascii():
        text = encoded.decode()
        return [text[begin:end] for begin, end in pairwise(offsets.tolist())]
    return [encoded[begin:end].decode("utf-8", "surrogatepass") for begin, end in pairwise(offsets.tolist())]


def is_offsets(offsets: np.ndarray, count: int) -> bool:
    """Return whether these are the offsets of ragged data of `count` values."""
    return bool(len(offsets) and offsets[0] == 0 and offsets[-1] == count and (offsets[1:] >= offsets[:-1]).all())


def concatenate_ragged(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenation of ragged arrays, each given as (values, offsets)."""
    values = [v for v, _ in parts]
    offsets = [np.zeros(1, "<i8")]
    base = 0
    for data, starts in parts:
        offsets.append(starts[1:] + base)
        base += len(data)
    return (np.concatenate(values) if values else np.zeros(0, "u1")), np.concatenate(offsets).astype("<i8")


def without_surrogates(value: Any) -> Any:
    """Return texts, also those of lists, with escape sequences for lone surrogates, which UTF-8 lacks."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return [without_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def checked_indices(values: Sequence[int] | np.ndarray, name: str = "indices") -> np.ndarray:
    """Return integers as a contiguous array (n,) int64.

    UsageError for other values, which numpy would convert: a mask is no list of zeros and ones.
    """
    found = np.asarray(values)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise UsageError(f"found {name} of {found.dtype} and shape {found.shape}, expected a list of integers")
    return np.ascontiguousarray(found, np.int64)
