"""Arrays of the steps of generation, and of single heads, that are joined to those of a trace."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column
from tracestore.ingest.layouts.values import STATES

_NUM_AXES = {"hidden_states": 2, "attentions": 3}  # of one layer


class JoinedColumn(Column):
    """Arrays that are stacked along a new first axis, or joined along their first one, when they are read.

    Parameters
    ----------
    parts : list of Column
        The arrays.
    shape : tuple of int
        Shape of each before they are joined.
    is_stack : bool
        Whether the first axis is a new one.
    """

    def __init__(self, parts: list[Column], shape: tuple[int, ...], *, is_stack: bool = True) -> None:
        self._parts, self._shape = parts, shape
        self._is_stack = is_stack
        self.shape = (len(parts), *shape) if is_stack else (sum(p.shape[0] if p.ndim else 1 for p in parts), *shape[1:])
        self.dtype = parts[0].dtype

    def whole(self) -> np.ndarray:
        """Read the arrays and join them."""
        arrays = [part.whole() for part in self._parts]
        if self._is_stack:
            return np.stack([a.reshape(self._shape) for a in arrays])
        return np.concatenate([np.atleast_1d(a) for a in arrays])

    def row(self, k: int) -> np.ndarray:
        """Read array `k`."""
        row: np.ndarray = self._parts[k].whole() if self._is_stack else self.whole()[k]
        return row

    def part(self, axis: int, begin: int, end: int) -> np.ndarray:
        """Read all arrays and return a slice of an axis."""
        part: np.ndarray = self.whole()[(*(slice(None),) * axis, slice(begin, end))]
        return part


class ViewColumn(Column):
    """An array with another shape of the same number of values."""

    def __init__(self, column: Column, shape: tuple[int, ...]) -> None:
        self._column, self.shape, self.dtype = column, shape, column.dtype

    def whole(self) -> np.ndarray:
        """Read the array."""
        return self._column.whole().reshape(self.shape)


class LayerColumn(Column):
    """One row of an array of layers."""

    def __init__(self, column: Column, k: int, shape: tuple[int, ...]) -> None:
        self._column, self._k, self.shape, self.dtype = column, k, shape, column.dtype

    def whole(self) -> np.ndarray:
        """Read the row."""
        return self._column.row(self._k).reshape(self.shape)


def joined_heads(arrays: Mapping[int, Any]) -> Any:
    """Return the attention (H, S, S) of a layer, whose heads (S, S) are arrays of their own.

    Raises
    ------
    InvalidInputError
        If the heads are no arrays of one shape.
    """
    columns = [arrays[head] for head in sorted(arrays)]
    shapes = {c.shape[-2:] if isinstance(c, Column) and c.ndim in (2, 3) else None for c in columns}
    shape = shapes.pop()
    if shapes or shape is None or any(c.ndim == 3 and len(c) != 1 for c in columns if hasattr(c, "__len__")):
        raise InvalidInputError("found heads of different shapes, expected (S, S) each", field="attentions")
    return JoinedColumn(columns, shape)


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
        values = [values_of_step.get(name) for values_of_step in steps.values()]
        if name in _NUM_AXES:
            if any(value is None for value in values):
                missing = next(step for step, fields_of_step in steps.items() if name not in fields_of_step)
                raise InvalidInputError(f"found no array in step {missing}, expected one in each step", field=name)
            is_vector = name == "hidden_states" and _are_vectors_of_layers(values)
            fields[name] = {f"step_{k}": _pass(value, name, is_vector) for k, value in zip(steps, values, strict=True)}
        elif name not in STATES and all(isinstance(v, Column) and v.ndim <= 2 and v.dtype.kind in "iu" for v in values):
            flat = [ViewColumn(v, (int(np.prod(v.shape)),)) for v in values if v is not None]
            fields[name] = JoinedColumn(list(flat), flat[0].shape, is_stack=False)
        elif all(not isinstance(v, Column | dict) for v in values):
            fields[name] = values
    return fields


def _are_vectors_of_layers(values: list[Any]) -> bool:
    """Return whether arrays of two axes are (L, D), a token in each step, and not (n, D), the tokens of a layer."""
    shapes = {value.shape if isinstance(value, Column) else None for value in values}
    return len(shapes) == 1 and all(shape is not None and len(shape) == 2 and shape[0] > 1 for shape in shapes)


def _pass(value: Any, name: str, is_vector: bool) -> Any:
    """Return the layers of a pass, each with a batch axis of one: (1, n, D) or (1, H, n, S)."""
    num_axes = _NUM_AXES[name]
    if isinstance(value, dict):
        return {number: _layer(layer, layer.shape, name, num_axes) for number, layer in value.items()}
    if not isinstance(value, Column):
        raise InvalidInputError("found no array in a step", field=name)
    if value.ndim <= num_axes and not is_vector:
        return [_layer(value, value.shape, name, num_axes)]
    return [
        _layer(LayerColumn(value, k, value.shape[1:]), value.shape[1:], name, num_axes) for k in range(value.shape[0])
    ]


def _layer(column: Column, shape: tuple[int, ...], name: str, num_axes: int) -> Column:
    if len(shape) == num_axes + 1 and shape[0] == 1:
        shape = shape[1:]
    missing = num_axes - len(shape)
    if missing < 0 or missing > 1 or (missing and num_axes > 2):
        raise InvalidInputError(f"found shape {shape} in a step, expected {num_axes} axes per layer", field=name)
    return ViewColumn(column, (1,) * (1 + missing) + shape)
