"""Shapes of values of a pickle before they are resolved: arrays, nested lists, and dicts by layer are alike."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tracestore.ingest.containers.keys import layer_kind, outputs_of_layers, parse_key
from tracestore.ingest.files.npy import array_in_bytes, guessed_dtype
from tracestore.ingest.pickles.pickled_frames import PandasObject
from tracestore.ingest.pickles.pickled_objects import PickledObject
from tracestore.ingest.pickles.pickled_torch import PickledTensor
from tracestore.ingest.pickles.pickled_values import PickledArray
from tracestore.ingest.pickles.sparse import PickledSparse

# Sizes of nested lists and arrays, from the outside; None where they differ, or the shapes of parts do.
Shape = tuple[int | None, ...]
_MAX_RANK = 7
_PLAIN = frozenset((dict, list, tuple, str, int, float, bool, np.ndarray, type(None)))


class Layout(NamedTuple):
    """Shape and kind of the numbers in a value.

    Attributes
    ----------
    shape : tuple of int or None
        Sizes of nested lists and arrays.
    kind : str
        "f" for floating-point numbers, "i" for others.
    """

    shape: Shape
    kind: str


def opened(value: Any) -> Any:
    """Return the fields of an object as a dict, an array of a pickle as ndarray or list, other values unchanged.

    A frame of pandas is a list of dicts, a namedtuple a tuple.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is PickledArray:
        return value.resolve()
    if isinstance(value, PickledObject):
        return value.fields or value.args or value.fields
    if isinstance(value, PickledArray | PickledTensor | PickledSparse | PandasObject):
        return value.resolve()
    array = array_in_bytes(value)
    return value if array is None else array.view(guessed_dtype(array.dtype))


def layout(value: Any) -> Layout | None:
    """Return the layout of numbers; None for every other value."""
    return _layout(value, 0)


def shape_of(value: Any, kind: str = "f") -> Shape:
    """Return the shape of arrays or lists of floats, or of numbers of another kind; () for every other value."""
    found = layout(value)
    return found.shape if found is not None and found.kind == kind else ()


def _layout(value: Any, depth: int) -> Layout | None:
    if isinstance(value, PickledSparse):
        return Layout(value.size or (), "f")
    value = opened(value)
    if isinstance(value, np.ndarray):
        kind = value.dtype.kind
        return Layout(value.shape, "f" if kind in "fV" else "i") if kind in "fViub" else None
    if isinstance(value, bool | int | np.integer | np.bool_):
        return Layout((), "i")
    if isinstance(value, float | np.floating):
        return Layout((), "f")
    if depth == _MAX_RANK or not isinstance(value, list | tuple | dict) or not value:
        return None
    if isinstance(value, dict):
        layers = layers_of(value)
        if len(layers) < len(value):
            return None
        value = list(layers.values())
    first = _layout(value[0], depth + 1)
    if first is None or first.shape == ():
        # A list of numbers is not searched.
        return None if first is None else Layout((len(value),), first.kind)
    shape: list[int | None] = list(first.shape)
    kinds = {first.kind}
    for item in value[1:]:
        other = _layout(item, depth + 1)
        if other is None or len(other.shape) != len(shape):
            return None
        kinds.add(other.kind)
        shape = [n if n == m else None for n, m in zip(shape, other.shape, strict=True)]
    return Layout((len(value), *shape), "f" if "f" in kinds else "i")


def layer_number(key: Any) -> int | None:
    """Return the layer that a key of a dict means: 3, "3", "layer_3", "model.layers.3", (3, "post"); else None."""
    if isinstance(key, tuple):
        numbers = [part for part in key if isinstance(part, int | np.integer)]
        return int(numbers[0]) if len(numbers) == 1 else None
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(key)
    if isinstance(key, str):
        if key.isdecimal() and key.isascii() and len(key) < 7:
            return int(key)
        parsed = parse_key(key)
        if parsed is not None and parsed.field == "hidden_states" and not parsed.trace:
            return parsed.number
    return None


def layers_of(values: Mapping[Any, Any]) -> dict[int, Any]:
    """Return the values of a dict whose keys mean layers, by their numbers, in order.

    Of several outputs of a layer `outputs_of_layers` chooses one. A tuple, which a hook of PyTorch gets
    from a layer with several outputs, stands for its first array.
    """
    kinds: dict[str, dict[int, Any]] = {}
    for key, value in values.items():
        if (number := layer_number(key)) is not None:
            parsed = parse_key(key) if isinstance(key, str) else None
            kinds.setdefault("" if parsed is None else layer_kind(parsed), {}).setdefault(number, value)
    if not kinds:
        return {}
    return {number: _output(value) for number, value in outputs_of_layers(kinds).items()}


def is_counted_from_last(value: Any) -> bool:
    """Return whether the keys of a dict count layers from the last one: -1, -2."""
    value = opened(value)
    return isinstance(value, dict) and bool(value) and all(type(key) is int and key < 0 for key in value)


def _output(value: Any) -> Any:
    if not isinstance(value, tuple) or not value:
        return value
    first, *others = map(opened, value)
    if not isinstance(first, np.ndarray) or first.ndim < 2:
        return value
    is_list = any(isinstance(other, np.ndarray) and other.ndim == first.ndim for other in others)
    return value if is_list else first


def row(value: Any, k: int, axis: int = 0) -> Any:
    """Return item `k` along the first or second axis of a value that has a layout."""
    value = opened(value)
    if isinstance(value, dict):
        return {number: row(layer, k) for number, layer in layers_of(value).items()}
    if axis == 0:
        return value[k]
    return value[:, k] if isinstance(value, np.ndarray) else [row(item, k) for item in value]


def is_ragged(shape: Iterable[int | None]) -> bool:
    """Return whether sizes differ along an axis."""
    return any(n is None for n in shape)
