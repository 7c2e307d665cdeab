"""The open file that a reader gets, and values that several containers write alike."""

import base64
import binascii
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError, TruncatedFileError
from tracestore.ingest.files.byte_source import TRUNCATED_WHILE_READING
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.files.npz import array_in_bytes
from tracestore.ingest.tree import (
    Array,
    Charge,
    Group,
    Items,
    MappingGroup,
    NumpyArray,
    Value,
    array_value,
    as_array,
)
from tracestore.store.format import schema
from tracestore.store.io.scratch import Scratch

_DTYPE = re.compile(
    r"(?:torch\.|numpy\.|np\.)?(bfloat16|u?int(?:8|16|32|64)|float(?:16|32|64)|bool|[<>|=]?[biuf][1248])"
)
_MAX_AXES = 8
ARROW_MAGIC = b"ARROW1\0\0"  # of a file of Arrow, before its stream
# What damaged bytes raise where the checks of a reader missed them: a refusal too, never a traceback.
FAULTS: tuple[type[Exception], ...] = (ValueError, TypeError, OverflowError, IndexError, KeyError, AttributeError)
FAULTS += (MemoryError, EOFError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error)
# What a user of a tree may meet in it: a file that shrinks, and endless nesting.
READING: tuple[type[Exception], ...] = (TruncatedFileError, RecursionError)


@dataclass
class Content:
    """The bytes of an open file.

    Attributes
    ----------
    path : Path
        The file.
    name : str
        Name of the file without the suffix of its compression.
    mapped : MappedFile
        The bytes; those of a compressed file are inflated to an unnamed file.
    scratch : Scratch
        Memory for large arrays.
    limits : Limits
        What the values of the file may decode to.
    resources : ExitStack
        What is closed with the tree.
    is_inflated : bool
        Whether `mapped` is an inflated copy.
    """

    path: Path
    name: str
    mapped: MappedFile
    scratch: Scratch
    limits: Limits
    resources: ExitStack
    is_inflated: bool = False


@contextmanager
def refusals(faults: tuple[type[Exception], ...] = (*FAULTS, *READING)) -> Iterator[None]:
    """Turn whatever damaged or malicious bytes raise in a reader, or READING alone, into InvalidInputError."""
    try:
        yield
    except faults as error:
        raise refusal(error) from None


def refusal(error: Exception) -> InvalidInputError:
    """Return the refusal of a file that raised one of FAULTS or of READING."""
    if isinstance(error, TruncatedFileError):
        return InvalidInputError(TRUNCATED_WHILE_READING, is_whole_source=True)
    if isinstance(error, RecursionError):
        return InvalidInputError("nested deeper than a trace file")
    reason = " ".join(str(error).split())[:200]
    return InvalidInputError(f"not a trace file: {type(error).__name__}: {reason}")


def bytes_value(data: Any, charge: Charge) -> Value:
    """Return bytes as the array of a .npy file that they hold, else as an array of uint8."""
    array = array_in_bytes(data)
    if array is None:
        return NumpyArray(np.frombuffer(data, "u1") if len(data) else np.empty(0, "u1"), charge)
    return array_value(array, charge)


def group_value(values: Mapping[Any, Any], open_value: Callable[[Any], Value], charge: Charge) -> Value:
    """Return a mapping as the array that it describes, else as a group; see `described_array`."""
    array = described_array(values, open_value, charge)
    return MappingGroup(values, open_value) if array is None else array


def described_array(values: Mapping[Any, Any], open_value: Callable[[Any], Value], charge: Charge) -> Array | None:
    """Return the array that a mapping describes in an exact notation, None for another mapping.

    The notations are {"dtype", "shape", values}, {"data", "shape"} of flat values, and "__ndarray__" as json_tricks
    writes it. The values are bytes, base64 text or nested lists. A mapping that does not fit its shape is a group.
    """
    if len(values) > _MAX_AXES or not ("shape" in values or "__ndarray__" in values):
        return None
    array = _described(MappingGroup(values, open_value))
    return None if array is None else NumpyArray(array, charge)


def _described(group: Group) -> np.ndarray | None:
    if "__ndarray__" in group:
        data, kind, shape = group["__ndarray__"], _dtype(group.get("dtype")), group.get("shape")
        if group.get("Corder") is False and not isinstance(data, Items):  # flat values in another order
            return None
    elif group.keys() == {"data", "shape"}:
        data, kind, shape = group["data"], None, group["shape"]
        if not isinstance(as_array(data), Array):
            return None
    elif len(group) == 3 and {"dtype", "shape"} <= group.keys():
        data = next(value for key, value in group.items() if key not in ("dtype", "shape"))
        kind, shape = _dtype(group["dtype"]), group["shape"]
        if kind is None:
            return None
    else:
        return None
    extents = as_array(shape)
    numbers = None if extents is None else extents.read()
    if numbers is None or numbers.ndim != 1 or numbers.dtype.kind not in "iu" or numbers.size > _MAX_AXES:
        return None
    return _shaped(data, kind, tuple(map(int, numbers)))


def _shaped(data: Value, kind: np.dtype | None, shape: tuple[int, ...]) -> np.ndarray | None:
    count = math.prod(shape) if min(shape, default=0) >= 0 else -1
    if isinstance(data, str) and kind is not None:
        try:
            raw: Any = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            return None
        return np.frombuffer(raw, kind).reshape(shape) if len(raw) == count * kind.itemsize and count else None
    found = as_array(data)
    array = None if found is None or not count else found.read()
    if array is None:
        return None
    if array.dtype == np.dtype("u1") and kind is not None and array.ndim == 1 and array.size == count * kind.itemsize:
        return np.ascontiguousarray(array).view(kind).reshape(shape)
    if array.size != count or (array.ndim > 1 and array.shape != shape):
        return None
    is_same = kind is None or kind == array.dtype or kind == schema.BFLOAT16
    return (array if is_same else array.astype(kind)).reshape(shape)


def _dtype(name: Value) -> np.dtype | None:
    match = _DTYPE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return None
    try:
        return schema.BFLOAT16 if match[1] == "bfloat16" else np.dtype(match[1])
    except TypeError:
        return None
