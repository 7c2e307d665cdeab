"""Values of a trace that may be its hidden states, attention or id under an unknown name, for the advice of errors."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracestore.ingest.containers.keys import parse_key
from tracestore.ingest.roles.keys import normalized
from tracestore.store.write.values import as_array

_MAX_DEPTH = 6
_MAX_ID = 80


def shape_of(value: Any, depth: int = 0) -> tuple[int, ...] | None:
    """Return the shape of an array of floats, or of nested lists of them by their first items; None for others."""
    array = as_array(value)
    if array is not None:
        return array.shape if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else None
    if isinstance(value, float | np.floating):
        return ()
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple) or not value or depth > _MAX_DEPTH:
        return None
    inner = shape_of(value[0], depth + 1)
    return None if inner is None else (len(value), *inner)


def states_in(trace: Mapping[Any, Any]) -> list[str]:
    """Return the keys, or paths to keys, whose values have a shape of hidden states: (L, S, D) or more axes first."""
    found = [
        (name, shape)
        for name, shape in _shapes(trace)
        if len(shape) in (3, 4) and shape[-1] > 1 and _field_of(name) in (None, "hidden_states")
    ]
    return [name for name, shape in found if shape[-1] != shape[-2]] or [name for name, _ in found]


def vectors_in(trace: Mapping[Any, Any]) -> list[str]:
    """Return the keys, or paths to keys, whose values are vectors of floats."""
    return [name for name, shape in _shapes(trace) if len(shape) == 1 and shape[0] > 2]


def attention_in(trace: Any) -> list[str]:
    """Return the keys whose values have a shape of attention, (L, H, S, S) or (L, S, S), and no name of another field."""
    shapes = _shapes(trace) if isinstance(trace, Mapping) else ()
    squares = [name for name, shape in shapes if len(shape) in (3, 4, 5) and shape[-1] == shape[-2] > 1]
    return [name for name in squares if _field_of(name) is None]


def ids_in(trace: Mapping[Any, Any]) -> list[str]:
    """Return the keys whose values are texts of one word."""
    texts = ((key, value) for key, value in trace.items() if isinstance(key, str) and isinstance(value, str))
    return [key for key, value in texts if 0 < len(value) <= _MAX_ID and len(value.split()) == 1]


def _field_of(name: str) -> str | None:
    """Return the field that the last part of a path names; None without one."""
    key = parse_key(normalized(name.rpartition(".")[2]))
    return None if key is None else key.field


def _shapes(trace: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, value in trace.items():
        if isinstance(key, str) and (shape := shape_of(value)) is not None:
            yield key, shape
        elif isinstance(key, str) and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", s) for name, v in value.items() if (s := shape_of(v)) is not None)
