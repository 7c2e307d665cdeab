"""Arrays of the steps of generation, and of single heads, that are joined to those of a trace."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column
from tracestore.ingest.layouts.values import STATES

_NUM_AXES = {"hidden_states": 2, "attentions": 3}  # of one layer


class DerivedColumn(Column):
    """An array that `read` makes of other ones when it is needed."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], np.ndarray]) -> None:
        self.shape, self.dtype, self._read = shape, dtype, read

    def whole(self) -> np.ndarray:
        """Read the arrays that this one is made of."""
        return self._read()

    def row(self, k: int) -> np.ndarray:
        """Read the array and return row `k`."""
        row: np.ndarray = self.whole()[k]
        return row

    def part(self, axis: int, begin: int, end: int) -> np.ndarray:
        """Read the array and return a slice of an axis."""
        return Column(self.whole()).part(axis, begin, end)


def joined_heads(arrays: Mapping[int, Any]) -> Any:
    """Return the attention (H, S, S) of a layer, whose heads (S, S) are arrays of their own.

    Raises
    ------
    InvalidInputError
        If the heads are no arrays of one shape.
    """
    columns = [arrays[head] for head in sorted(arrays)]
    shapes = {c.shape[-2:] if isinstance(c, Column) and c.shape[:-2] in ((), (1,)) else () for c in columns}
    shape = shapes.pop()
    if shapes or len(shape) != 2:
        raise InvalidInputError("found heads of different shapes, expected (S, S) each", field="attentions")
    size = (len(columns), *shape)
    return DerivedColumn(size, columns[0].dtype, lambda: np.stack([c.whole().reshape(shape) for c in columns]))


def joined_steps(steps: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a trace from those of its steps.

    Hidden states and attention become dicts of the passes of `generate()`, tokens one array, other values lists.

    Parameters
    ----------
    steps : Mapping
        Fields of each step. States of a layer are (D,), (n, D) or (1, n, D), of all layers (L, D), (L, n, D) or
        (L, 1, n, D), n tokens of the step.

    Raises
    ------
    InvalidInputError
        If a field is in some steps only, or its arrays do not fit together.
    """
    fields: dict[str, Any] = {}
    names = list(dict.fromkeys(name for fields_of_step in steps.values() for name in fields_of_step))
    for name in names:
        values: list[Any] = [values_of_step.get(name) for values_of_step in steps.values()]
        if name in _NUM_AXES:
            if any(value is None for value in values):
                missing = next(step for step, fields_of_step in steps.items() if name not in fields_of_step)
                raise InvalidInputError(f"found no array in step {missing}, expected one in each step", field=name)
            is_vector = name == "hidden_states" and _are_vectors_of_layers(values)
            fields[name] = {f"step_{k}": _pass(value, name, is_vector) for k, value in zip(steps, values, strict=True)}
        elif name not in STATES and all(isinstance(v, Column) and v.ndim <= 2 and v.dtype.kind in "iu" for v in values):
            size = sum(math.prod(column.shape) for column in values)
            fields[name] = DerivedColumn((size,), values[0].dtype, partial(_flat, values))
        elif all(not isinstance(v, Column | dict) for v in values):
            fields[name] = values
    return fields


def _flat(columns: list[Column]) -> np.ndarray:
    """Return the values of arrays behind each other."""
    return np.concatenate([column.whole().reshape(-1) for column in columns])


def _are_vectors_of_layers(values: list[Any]) -> bool:
    """Return whether arrays of two axes are (L, D), a token in each step, and not (n, D), the tokens of a layer."""
    shapes = {value.shape if isinstance(value, Column) else None for value in values}
    return len(shapes) == 1 and all(shape is not None and len(shape) == 2 and shape[0] > 1 for shape in shapes)


def _pass(value: Any, name: str, is_vector: bool) -> Any:
    """Return the layers of a pass, each with a batch axis of one: (1, n, D) or (1, H, n, S)."""
    if isinstance(value, dict):
        return {number: _layer(layer.whole, layer.shape, layer.dtype, name) for number, layer in value.items()}
    if not isinstance(value, Column):
        raise InvalidInputError("found no array in a step", field=name)
    if value.ndim <= _NUM_AXES[name] and not is_vector:
        return [_layer(value.whole, value.shape, value.dtype, name)]
    return [_layer(partial(value.row, k), value.shape[1:], value.dtype, name) for k in range(value.shape[0])]


def _layer(read: Callable[[], np.ndarray], shape: tuple[int, ...], dtype: np.dtype, name: str) -> Column:
    """Return the array of a layer with a batch axis of one, and an axis of one token where that is missing."""
    num_axes = _NUM_AXES[name]
    if len(shape) == num_axes + 1 and shape[0] == 1:
        shape = shape[1:]
    missing = num_axes - len(shape)
    if missing < 0 or missing > 1 or (missing and num_axes > 2):
        raise InvalidInputError(f"found shape {shape} in a step, expected {num_axes} axes per layer", field=name)
    shape = (1,) * (1 + missing) + shape
    return DerivedColumn(shape, dtype, lambda: read().reshape(shape))
