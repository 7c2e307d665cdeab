"""Replace the values of a pickle by arrays and plain values, within limits."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.files.npy import array_in_bytes, guessed_dtype
from tracestore.ingest.pickles.joblib_arrays import JoblibArray
from tracestore.ingest.pickles.pickled_frames import PandasObject
from tracestore.ingest.pickles.pickled_objects import PickledDict, PickledObject, UnknownClass
from tracestore.ingest.pickles.pickled_torch import PickledTensor, TorchDtype
from tracestore.ingest.pickles.pickled_values import PickledArray, PickledValue, SafeGlobal
from tracestore.ingest.pickles.sparse import PickledSparse

_MAX_BYTES_VALUE = 4 << 20
_NUMBERS = frozenset((int, float, bool))


def resolve(value: Any, limits: Limits) -> Any:
    """Replace pickled values inside a value by arrays, charge them to the limits and return the value."""
    kind = type(value)
    if kind is str:
        limits.charge(len(value))
        return value
    if kind is list or kind is tuple:
        limits.charge()
        return _resolve_all(value, limits)
    if kind is bytes or kind is memoryview:
        return _resolve_bytes(value, limits)
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
    return _resolve_object(value, limits)


def _resolve_bytes(value: bytes | memoryview, limits: Limits) -> Any:
    if (array := array_in_bytes(value)) is not None:
        limits.charge(0, array.nbytes)
        return array.view(guessed_dtype(array.dtype))
    limits.charge(len(value))
    if isinstance(value, memoryview) and len(value) > _MAX_BYTES_VALUE:
        raise InvalidInputError(f"found {len(value):,} bytes that are not an array")
    return bytes(value)


def _resolve_object(value: Any, limits: Limits) -> Any:
    kind = type(value)
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


def _resolve_all(values: Sequence[Any], limits: Limits) -> list[Any]:
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
