"""Arrays in values that are not arrays: nested lists, flat lists with a shape, bytes with dtype and shape."""

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import whole
from tracestore.ingest.containers.keys import parse_key
from tracestore.ingest.files.npy import array_in_bytes, guessed_dtype
from tracestore.ingest.roles.keys import normalized
from tracestore.ingest.roles.layout import opened
from tracestore.store.format import schema
from tracestore.store.write.values import are_arrays, as_array

STATES = ("hidden_states", "attentions", "last_token")
_SHAPE = re.compile(r"(?:(?P<name>.+)[_.])?shapes?|shapes?[_.](?P<name_>.+)")
_DTYPE = re.compile(r"(?:(?P<name>.+)[_.])?dtype|dtype[_.](?P<name_>.+)")
# Names of dtypes, also as "torch.float16" and "<f2".
_DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "half": "<f2", "float": "<f4", "double": "<f8"}
# Keys with the sizes of the axes of flat states: layers, tokens, hidden size.
_SIZES = (
    re.compile(r"(?:num_|n_)layers?|layers?_count"),
    re.compile(r"(?:num_|n_)tok(?:en)?s?|seq_?len(?:gth)?|length|sequence_length|token_count"),
    re.compile(r"(?:hidden_|embed(?:ding)?_|model_)?(?:dim|size)|d_model|d_hidden|n_dims?|hidden_dimension"),
)
_MASK = re.compile(r"(?:att(?:ention|n)?_?|input_|token_)?masks?")
_MAX_DEPTH = 6
_TEXTS = frozenset((*schema.STRING_FIELDS, "answer", "prompt", "response", "completion"))
_MAX_JSON_CHARACTERS = 16 << 20


def set_arrays(values: dict[str, Any]) -> None:
    """Replace the hidden states, attention and last tokens of a trace by arrays where they are something else.

    A list becomes an array if it is regular. A flat array gets the shape of a key such as `shape` or
    `hidden_states_shape`; bytes and base64 text in addition the dtype of a key such as `dtype`.

    Raises
    ------
    InvalidInputError
        If a shape or dtype does not fit the values.
    """
    for name in STATES:
        value = values.get(name)
        if isinstance(value, Mapping) and (inner := _described(value)) is not None:
            values[name] = _array(name, *inner)
        elif isinstance(value, Mapping) and value.keys() == {"data", "shape"}:
            values[name] = _flat_array(name, array_of(value["data"]), _shape(value["shape"]))
        elif isinstance(value, Mapping):
            values[name] = {key: _shaped(array_of(layer), values) for key, layer in value.items()}
        elif (array := array_in_bytes(value)) is not None:
            values[name] = array.view(guessed_dtype(array.dtype))
        elif isinstance(value, bytes | bytearray | memoryview):
            dtype = _of(values, _DTYPE, name, lambda _: True)
            shape = _of(values, _SHAPE, name, lambda _: True)
            kind = _kind(dtype)
            if shape is None and kind is not None:
                shape = _sizes(values, len(value) // kind.itemsize)
            values[name] = _array(name, value, dtype, shape)
        else:
            array = values[name] = array_of(value) if value is not None else None
            if isinstance(array, np.ndarray) and array.ndim == 1:
                has_shape = any(map(_SHAPE.fullmatch, values))
                shape = _of(values, _SHAPE, name, lambda s, n=array.size: math.prod(s) == n)
                shape = shape if has_shape else _sizes(values, array.size)
                if shape is None and not has_shape:
                    continue
                if shape is None:
                    raise InvalidInputError(f"found {array.size:,} values, which fit no shape of the trace", field=name)
                values[name] = array.reshape(shape)
        if values[name] is None:
            del values[name]


@lru_cache(maxsize=1 << 14)
def _is_mask(name: str) -> bool:
    return _MASK.fullmatch(normalized(name)) is not None


def with_mask(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Return fields in which a mask of padding has the name attention_mask.

    A `mask` is one of padding if a row of it has none, and the others have it at one end.
    """
    if "attention_mask" in fields:
        return fields
    names = [name for name in fields if isinstance(name, str) and _is_mask(name)]
    if len(names) != 1:
        return fields
    if normalized(names[0]) in ("mask", "masks"):
        mask = array_of(whole(opened(fields[names[0]])))
        if not isinstance(mask, np.ndarray) or mask.ndim != 2 or mask.dtype.kind not in "biuf":
            return fields
        mask = mask != 0
        if not mask.all(axis=1).any() or np.array_equal(mask, np.tril(mask)):
            return fields
        if not (mask[:, 1:] >= mask[:, :-1]).all() and not (mask[:, 1:] <= mask[:, :-1]).all():
            return fields
    return {("attention_mask" if name == names[0] else name): v for name, v in fields.items()}


def joined_passes(layers: Any) -> Any:
    """Return the states (P, D) of a prompt and (D,) of each later token as one layer, and other layers unchanged.

    A layer may hold them, too, as hooks get them: (1, P, D), then (1, 1, D) for each token.
    """
    if isinstance(layers, Mapping):
        return {number: _joined_passes_of_layer(layer) for number, layer in layers.items()}
    if are_arrays(layers) and layers[-1].ndim > 1:
        return layers
    if len(layers) < 2 or _rank(layers[0]) != 2 or _rank(layers[1]) != 1:
        is_nested = any(isinstance(layer, list | tuple) for layer in layers)
        return [_joined_passes_of_layer(layer) for layer in layers] if is_nested else layers
    parts: list[Any] = [array_of(layer) if as_array(layer) is None else as_array(layer) for layer in layers]
    shapes = [np.shape(part)[-1:] if isinstance(part, np.ndarray) else () for part in parts]
    if any(shape != shapes[0] for shape in shapes) or any(part.ndim != 1 for part in parts[1:]):
        return layers
    return [np.concatenate([parts[0], *(part[None] for part in parts[1:])])]


def _joined_passes_of_layer(layer: Any) -> Any:
    """Return the states of a prompt of several tokens and of single later tokens as (S, D), and other values unchanged."""
    items = layer if isinstance(layer, list | tuple) else []
    parts = [part for item in items if (part := as_array(item)) is not None]
    shapes = [part.shape[1:] if part.ndim == 3 and len(part) == 1 else part.shape for part in parts]
    if len(shapes) < 2 or len(shapes) < len(items) or len(shapes[0]) != 2 or shapes[0][0] == 1:
        return layer
    if any(shape != (1, shapes[0][1]) for shape in shapes[1:]):
        return layer
    return np.concatenate([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])


def _rank(value: Any) -> int:
    """Return the number of axes of an array or nested lists, by their first items."""
    leaf, depth = leaf_of(value)
    array = as_array(leaf)
    return depth + (0 if array is None else array.ndim)


def open_texts(values: dict[str, Any], trace: str, k: int, count: int) -> None:
    """Replace texts of JSON, such as metadata of all traces, by the values that belong to one trace.

    Parameters
    ----------
    values : dict[str, Any]
        Values of the trace, which are changed. Those that are there already take precedence.
    trace : str
        Name of the trace in its container, or "".
    k, count : int
        Position of the trace, and number of the traces that are stacked with it.
    """
    for name, text in list(values.items()):
        if (
            not isinstance(text, str)
            or text[:1] not in ("{", "[")
            or name in _TEXTS
            or len(text) > _MAX_JSON_CHARACTERS
        ):
            continue
        found = _parsed(text)
        if isinstance(found, list) and len(found) == count and (count > 1 or isinstance(found[0], dict)):
            found = found[k]
        elif isinstance(found, dict) and trace:
            found = next((found[key] for key in (trace, re.split(r"[./]", trace)[-1]) if key in found), found)
        if isinstance(found, dict):
            del values[name]
            values |= {key: value for key, value in found.items() if key not in values}
        elif found is not None and not isinstance(found, list):
            values[name] = found


def _shaped(layer: Any, values: Mapping[str, Any]) -> Any:
    """Return a flat array of a layer with the axes of tokens and hidden size, if the trace has both sizes."""
    if not isinstance(layer, np.ndarray) or layer.ndim != 1:
        return layer
    shape = _sizes(values, layer.size)
    return layer if shape is None else layer.reshape(shape)


def _sizes(values: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """Return the shape of flat states by numbers of layers and tokens and the hidden size; None unless they fit.

    Raises
    ------
    InvalidInputError
        If the keys of the numbers are not in the order of the axes of hidden states.
    """
    numbers: dict[str, int] = {k: v for k, v in values.items() if isinstance(v, int) and v > 0 and v is not True}
    found = [next((key for key in numbers if pattern.fullmatch(key)), None) for pattern in _SIZES]
    layers, tokens, dim = found
    ids = values.get("tokens")
    if tokens is None and dim is not None and isinstance(ids, list | np.ndarray) and len(ids) * numbers[dim] == count:
        return len(ids), numbers[dim]
    for axes in ((layers, tokens, dim), (tokens, dim), (layers, dim)):
        names = [name for name in axes if name is not None]
        if len(names) == len(axes) and math.prod([numbers[name] for name in names]) == count:
            order = sorted(names, key=list(numbers).index)
            if order != names:
                raise InvalidInputError(
                    f"found flat values and the sizes {', '.join(order)}, whose order leaves the axes open; add a key "
                    "hidden_states_shape, such as [L, S, D]",
                    field="hidden_states",
                )
            return tuple(numbers[name] for name in names)
    return None


def _kind(dtype: Any) -> np.dtype | None:
    """Return the dtype of a name such as torch.float16; None for another value."""
    text = str(dtype).removeprefix("torch.").removeprefix("numpy.")
    text = _DTYPES.get(text, text.replace("|", "<"))
    if text in ("bfloat16", "bf16"):
        return schema.BFLOAT16
    return np.dtype(text) if text in _DTYPES.values() else None


@lru_cache(maxsize=4)
def _parsed(text: str) -> Any:
    """Return the value of a JSON text, which the traces of a file share; None for another text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def leaf_of(value: Any) -> tuple[Any, int]:
    """Return what the first items of nested lists lead to, and the number of lists around it."""
    depth = 0
    while isinstance(value, list | tuple) and value and depth < _MAX_DEPTH:
        value, depth = value[0], depth + 1
    return value, depth


def array_of(value: Any) -> Any:
    """Return nested lists of numbers of one length per level as a float32 array, and any other value unchanged."""
    leaf, depth = leaf_of(value)
    if not depth or isinstance(leaf, bool) or not isinstance(leaf, int | float):
        return value
    try:
        array = np.asarray(value, "<f4")
    except (ValueError, TypeError, OverflowError):
        return value
    return array if array.ndim == depth else value


def has_vectors(values: Mapping[str, Any]) -> bool:
    """Return whether each layer is one vector, the state of one token."""
    hidden = values.get("hidden_states")
    layers = list(hidden.values()) if isinstance(hidden, Mapping) else [hidden]
    return bool(layers) and all(isinstance(layer, np.ndarray) and layer.ndim == 1 for layer in layers)


def _of(values: dict[str, Any], pattern: re.Pattern[str], name: str, is_fitting: Any) -> Any:
    """Remove and return the value of the key that describes an array, such as shape or hidden_states_shape."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for key in values:
        if match := pattern.fullmatch(key):
            owner = match["name"] or match["name_"]
            parsed = parse_key(owner) if owner else None
            if owner is None or (parsed is not None and parsed.field == name):
                found[owner is not None].append(key)
    for key in found[True] + found[False]:
        value = _shape(values[key]) if pattern is _SHAPE else values[key]
        if value is not None and is_fitting(value):
            del values[key]
            return value
    return None


def _shape(value: Any) -> tuple[int, ...] | None:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list | tuple) or not 0 < len(value) <= 8:
        return None
    return tuple(map(int, value)) if all(isinstance(n, int | float) and n >= 0 for n in value) else None


def _described(value: Mapping[Any, Any]) -> tuple[Any, Any, Any] | None:
    """Return (data, dtype, shape) of a dict that describes an array; None for another dict."""
    if not {"dtype", "shape"} <= value.keys() or len(value) != 3:
        return None
    data = next(v for k, v in value.items() if k not in ("dtype", "shape"))
    return data, value["dtype"], _shape(value["shape"])


def _flat_array(name: str, data: Any, shape: tuple[int, ...] | None) -> np.ndarray:
    """Return the array of a struct of flat values and their shape, as Ray writes arrays of different shapes."""
    if shape is None or not isinstance(data, np.ndarray) or data.shape != (math.prod(shape),):
        raise InvalidInputError(f"found data and shape that do not fit each other ({shape})", field=name)
    return data.reshape(shape)


def _array(name: str, data: Any, dtype: Any, shape: tuple[int, ...] | None) -> np.ndarray:
    """Return an array of bytes, base64 text or a flat list."""
    if dtype is None or shape is None:
        raise InvalidInputError(
            "found bytes without dtype and shape; add columns dtype, such as float16, and shape, such as [L, S, D]",
            field=name,
        )
    kind = _kind(dtype)
    if kind is None:
        raise InvalidInputError(f"found dtype {str(dtype)[:40]!r}, expected {', '.join(list(_DTYPES)[:3])}", field=name)
    if isinstance(data, list):
        data = np.asarray(array_of(data), kind).tobytes()
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInputError("found text that is not base64", field=name) from None
    expected = math.prod(shape) * kind.itemsize
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) != expected:
        found = f"{len(data):,} bytes" if isinstance(data, bytes | bytearray | memoryview) else type(data).__name__
        raise InvalidInputError(
            f"found {found}, expected {expected:,} bytes for shape {shape} of {kind.name}", field=name
        )
    return np.frombuffer(data, "u1").view(kind).reshape(shape)
