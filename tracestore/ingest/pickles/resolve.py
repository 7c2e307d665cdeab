"""Replace the values of a pickle by arrays and plain values, within limits."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import array_in_bytes
from tracestore.ingest.pickles.joblib_arrays import JoblibArray
from tracestore.ingest.pickles.pickled_frames import PandasObject
from tracestore.ingest.pickles.pickled_objects import PickledDict, PickledObject, UnknownClass
from tracestore.ingest.pickles.pickled_torch import PickledTensor, TorchDtype
from tracestore.ingest.pickles.pickled_values import PickledArray, PickledValue, SafeGlobal
from tracestore.ingest.pickles.sparse import PickledSparse

# Limits of the values that a file's traces hold, where a value counts each time it is named: a fixed
# allowance and a multiple of the bytes read, for the number of values, the bytes of text and the bytes of
# arrays. A value takes at least one byte. Text is encoded again each time it is named; an array is not. The
# multiple of arrays is large because in files made by hand one array may stand for all layers.
_ALLOWANCES = ((20_000, 4), (16 << 20, 4), (64 << 20, 200))
_MAX_BYTES_VALUE = 4 << 20
_NUMBERS = frozenset((int, float, bool))


def resolve(value: Any, limits: "Limits") -> Any:
    """Replace pickled values inside a value by arrays, charge them to the limits and return the value."""
    kind = type(value)
    if kind is str:
        limits.charge(len(value))
        return value
    if kind is list or kind is tuple:
        limits.charge()
        return _resolve_all(value, limits)
    if kind is bytes or kind is memoryview:
        if (array := array_in_bytes(value)) is not None:
            limits.charge(0, array.nbytes)
            return array
        limits.charge(len(value))
        if kind is memoryview and len(value) > _MAX_BYTES_VALUE:
            raise InvalidInputError(f"found {len(value):,} bytes that are not an array")
        return bytes(value)
    if kind is PickledArray or kind is PickledTensor or kind is JoblibArray:
        array = value.resolve()
        if isinstance(array, list):
            return _resolve_all(array, limits)
        limits.charge(0, array.nbytes)
        return array
    if kind is PickledSparse:
        limits.charge(0, math.prod(value.size or ()) * 8)
        return value.resolve()
    limits.charge(0, value.nbytes if kind is np.ndarray else 0)
    if kind is dict:
        return {k: resolve(v, limits) for k, v in value.items()}
    if kind is PandasObject:
        return resolve(value.resolve(), limits)
    if kind is PickledObject and value.args and not value.fields:
        return _resolve_all(value.args, limits)
    if kind is PickledObject:
        text = value.plain()
        limits.has_objects |= text is value
        return text
    if kind is PickledDict:
        return {k: resolve(v, limits) for k, v in value.fields.items()}
    if isinstance(value, UnknownClass):
        limits.has_objects = True
        return PickledObject(value.name)
    if kind is TorchDtype:
        return value.name
    if isinstance(value, PickledValue | SafeGlobal):
        kind_name = type(value).__name__.removeprefix("Pickled")
        raise InvalidInputError(f"found a {kind_name} object, expected a value")
    return value


def _resolve_all(values: Sequence[Any], limits: "Limits") -> list[Any]:
    """Resolve a sequence, with shortcuts for the common cases of only texts, only numbers or only arrays."""
    kinds = set(map(type, values))
    if kinds == {str}:
        limits.charge(sum(map(len, values)), count=len(values))
        return list(values)
    if kinds <= _NUMBERS:
        limits.charge(count=len(values))
        return list(values)
    if kinds == {PickledArray}:
        arrays = [v.array for v in values]
        if set(map(type, arrays)) == {np.ndarray}:
            limits.charge(0, sum(a.nbytes for a in arrays), count=len(arrays))
            return arrays
    return [resolve(v, limits) for v in values]


class Limits:
    """Limits on values and bytes of the traces of one file.

    A file exceeds them only by naming the same values many times. `read_bytes` returns the
    number of bytes of the file that have been read so far. `has_objects` is set when a value
    holds an object that is not data.
    """

    def __init__(self, read_bytes: Callable[[], int]) -> None:
        self._read_bytes = read_bytes
        self._values = self._text_bytes = self._array_bytes = 0
        self._max_values = self._max_text_bytes = self._max_array_bytes = 0
        self.has_objects = False

    def charge(self, text_bytes: int = 0, array_bytes: int = 0, count: int = 1) -> None:
        """Add values and their bytes; raise InvalidInputError beyond a limit."""
        self._values += count
        self._text_bytes += text_bytes
        self._array_bytes += array_bytes
        if self._is_exceeded():
            maxima = (allowance + ratio * self._read_bytes() for allowance, ratio in _ALLOWANCES)
            self._max_values, self._max_text_bytes, self._max_array_bytes = maxima
            if self._is_exceeded():
                raise InvalidInputError(
                    "traces whose values, counted each time they are named, exceed the file many times"
                )

    def _is_exceeded(self) -> bool:
        return (
            self._values > self._max_values
            or self._text_bytes > self._max_text_bytes
            or self._array_bytes > self._max_array_bytes
        )
