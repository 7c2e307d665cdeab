"""The only place where axes move: values of the tree as arrays with the axes that a field has in a store, layers in order."""

import base64
import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.values import array_value_of, describe, json_value, named, number_of
from tracestore.ingest.execute.walk import Cell
from tracestore.ingest.layout.language import Layout
from tracestore.ingest.layout.patterns import AXIS_NAMES
from tracestore.ingest.readers.tree import Array, Items, NumpyArray, Value, as_array
from tracestore.store.format import schema
from tracestore.store.write.field_values import field_error

# The numbers of rows and columns that a trace takes of an axis: a position, or a slice of them.
Fixed = Mapping[str, int | slice]
Layers = list[np.ndarray]
LayerIds = tuple[int, ...] | None  # the numbers of layers, None if they are unknown
_TEXTS = "tokens_decoded"
MISSING = object()  # no value for a trace
_DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}


def extent(value: Value, axes: Sequence[str], letter: str) -> int | None:
    """Return the extent of an axis of a value, None if its first items do not show it."""
    for k, axis in enumerate(axes):
        if isinstance(value, Array):
            rest = axes[k:]
            return value.shape[rest.index(letter)] if letter in rest and len(rest) <= len(value.shape) else None
        if not isinstance(value, Items):
            return None
        if axis == letter:
            return value.length
        if not value.length:
            return None
        value = value[0]
    return None


def descend(value: Value, axes: tuple[str, ...], fixed: Fixed) -> tuple[Any, tuple[str, ...]]:
    """Return the item that `fixed` selects along the first axes of nested items, and the axes that it has.

    MISSING for an item behind the last one.
    """
    while isinstance(value, Items) and axes and (axes[0] == "1" or isinstance(fixed.get(axes[0]), int)):
        k = fixed.get(axes[0], 0)
        if value.length is not None and k >= value.length:  # type: ignore[operator]
            return MISSING, axes
        value, axes = value[k], axes[1:]  # type: ignore[index]
    return value, axes


def read(value: Value, axes: tuple[str, ...], fixed: Fixed, what: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the values that `fixed` leaves, and the letters of their axes.

    Parameters
    ----------
    value : Value
        An array, nested items, or a number.
    axes : tuple of str
        Its axes. "NS" is one along which the tokens of all traces lie behind each other.
    fixed : Mapping
        The position or slice on some of the axes.
    what : str
        Field and address, for messages.

    Raises
    ------
    InvalidInputError
        If the value has other axes, or its parts have different shapes.
    """
    if isinstance(value, Array):
        return _of_array(value, axes, fixed, what)
    if not axes:
        return _of_scalar(value, what), ()
    if isinstance(value, str):  # a cell of a table
        return read((json_value if what == _TEXTS else array_value_of)(value, what), axes, fixed, what)
    if not isinstance(value, Items):
        raise InvalidInputError(f"found {describe(value)}, expected the axes {_text(axes)}", field=what)
    axis, rest = axes[0], axes[1:]
    chosen = _chosen(axis, value.length or 0, fixed, what)
    if isinstance(chosen, int):
        return read(value[chosen], rest, fixed, what)
    if not any(a in fixed or a == "1" for a in axes) and (array := as_array(value)) is not None:
        return _of_array(array, axes, fixed, what)
    parts = [read(value[k], rest, fixed, what) for k in range(*chosen.indices(value.length or 0))]
    letter = _kept(axis)
    if not parts:
        raise InvalidInputError(f"found no items on the axis {axis}", field=what)
    first, letters = parts[0]
    for k, (part, _) in enumerate(parts):
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            found = f"{part.dtype} {part.shape} at {letter} {k}"
            raise field_error(what, found, f"{first.dtype} {first.shape} as before")
    return np.stack([part for part, _ in parts]), (letter, *letters)


def _of_scalar(value: Value, what: str) -> np.ndarray:
    if isinstance(value, bool | int | float):
        return np.asarray(value)
    if not isinstance(value, str):
        kind = "text" if what == _TEXTS else "number"
        raise InvalidInputError(f"found {describe(value)}, expected a {kind}", field=what)
    return np.asarray(value, object) if what == _TEXTS else np.asarray(number_of(value, what))


def _of_array(array: Array, axes: tuple[str, ...], fixed: Fixed, what: str) -> tuple[np.ndarray, tuple[str, ...]]:
    if array.ndim == len(axes) - 1 and "P" in fixed and "S" in axes:
        axes = tuple(axis for axis in axes if axis != "S")  # a vector in a pass is one token
    if array.ndim != len(axes):
        raise field_error(what, f"the shape {array.shape}", f"{len(axes)} axes {_text(axes)} as the layout says")
    selection = [_chosen(axis, size, fixed, what) for axis, size in zip(axes, array.shape, strict=True)]
    letters = tuple(_kept(axis) for axis, one in zip(axes, selection, strict=True) if not isinstance(one, int))
    while selection and selection[-1] == slice(None):
        selection.pop()
    return array.read(tuple(selection)), letters


def _chosen(axis: str, size: int, fixed: Fixed, what: str) -> int | slice:
    if axis == "1":
        if size != 1:
            raise InvalidInputError(f"found {size} on an axis, expected 1 as the layout says", field=what)
        return 0
    one = fixed.get(axis, slice(None))
    if isinstance(one, int) and not 0 <= one < size:
        raise InvalidInputError(f"found {size} on the axis {axis}, expected more than {one}", field=what)
    if isinstance(one, slice) and one.stop is not None and one.stop > size:
        raise InvalidInputError(f"found {size} on the axis {axis}, expected at least {one.stop}", field=what)
    return one


def _kept(axis: str) -> str:
    """Return the letter that is left of an axis of several when one of its traces is taken."""
    return axis[-1] if axis == "NS" else axis


def _text(axes: Sequence[str]) -> str:
    return " ".join(f"({' '.join(a)})" if len(a) > 1 else a.replace("Q", "S") for a in axes)


def read_block(
    cells: Sequence[Cell], letters: str, fixed: Fixed, settings: Mapping[str, Any], what: str, num_before: int = 0
) -> tuple[Layers, LayerIds]:
    """Return the values of cells on the axes L and `letters`, such as "SD" or "HSQ", and the numbers of the layers.

    An axis without L is one layer; the numbers are known where names say them. `num_before` is the number of tokens of
    the parts before, at which the numbers of tokens may continue. Cells that differ in what they bind on axes are put
    together: every combination is there once (rule 4).
    """
    letter_of = {name: AXIS_NAMES.get(name, name) for name in cells[0].bound}
    names = [name for name, letter in letter_of.items() if letter in tuple("LSHD")]
    by_place, places = _grid_of(cells, names, what, num_before)
    of_layers = next((name for name in names if letter_of[name] == "L"), None)
    found = {letter_of[name]: len(places[name]) for name in names if name != of_layers}
    rest = "".join(letter for letter in letters if letter not in found)
    numbers: list[Any] = places.get(str(of_layers), [None])
    layers: Layers = []
    for number in numbers:
        grid = itertools.product(*([number] if name == of_layers else places[name] for name in names))
        parts = [_layers(by_place[place], rest, fixed, settings, what) for place in grid]
        if len({len(part) for part in parts}) > 1 or (of_layers is not None and len(parts[0]) > 1):
            raise InvalidInputError("found different numbers of layers", field=what)
        for arrays in zip(*parts, strict=True):
            layers.append(_moved(_gridded(arrays, found, what), (*found, *rest), letters, what))
    if not layers:
        raise InvalidInputError("found zero layers, expected at least one", field=what)
    return layers, tuple(numbers) if of_layers == "layer" else None


def _grid_of(
    cells: Sequence[Cell], names: list[str], what: str, num_before: int
) -> tuple[dict[tuple[int, ...], Cell], dict[str, list[int]]]:
    """Return cells by what they bind on axes, and the numbers on each axis: every combination is there once (rule 4)."""
    by_place: dict[tuple[int, ...], Cell] = {}
    for cell in cells:
        place = tuple(cell.bound[name] for name in names)
        if by_place.setdefault(place, cell) is not cell:
            raise InvalidInputError(f"found {named(names, place) or 'its value'} twice", field=what)
    places = {name: sorted({cell.bound[name] for cell in cells}) for name in names}
    missing = next((place for place in itertools.product(*places.values()) if place not in by_place), None)
    if missing is not None:
        raise InvalidInputError(f"{named(names, missing)} is missing", field=what)
    for name, found in places.items():
        # Layers may be some of the model's, tokens and heads are numbered from 0 or 1, or continue those before.
        continues = found[0] == num_before and AXIS_NAMES.get(name, name) == "S"
        expected = range(found[0] if continues else min(found[0], 1), found[-1] + 1)
        if name != "layer" and (gap := next((k for k in expected if k not in found), None)) is not None:
            raise InvalidInputError(f"{name} {gap} is missing", field=what)
    return by_place, places


def _gridded(arrays: Sequence[np.ndarray], found: Mapping[str, int], what: str) -> np.ndarray:
    """Return the arrays of a grid of positions as one array with axes of the extents `found` in front."""
    if len(shapes := {array.shape for array in arrays}) > 1:
        raise InvalidInputError(f"found the shapes {sorted(shapes)!s:.80}, expected one", field=what)
    return np.stack(arrays).reshape(*found.values(), *arrays[0].shape) if found else arrays[0]


def _layers(cell: Cell, letters: str, fixed: Fixed, settings: Mapping[str, Any], what: str) -> Layers:
    """Return the layers of a value, each with the axes `letters`."""
    value, axes = cell.value, cell.axes
    if isinstance(value, Items) and axes[:1] == ("L",):
        parts = (read(value[k], axes[1:], fixed, what) for k in range(value.length or 0))
        return [_moved(*_divided(*part, settings, what), letters, what) for part in parts]
    array, found = _divided(*read(value, axes, fixed, what), settings, what)
    if "L" not in found:
        return [_moved(array, found, letters, what)]
    return list(_moved(array, found, f"L{letters}", what))


def _divided(
    array: np.ndarray, found: tuple[str, ...], settings: Mapping[str, Any], what: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return an array and its axes with (L D) or (S D) as two axes."""
    if (flat := next((axis for axis in ("LD", "SD") if axis in found), None)) is None:
        return array, found
    at, (size, dim) = found.index(flat), (settings.get(f"{flat[0]}.size"), settings.get("D.size"))
    width = array.shape[at]
    count = size if size is not None else width // dim if dim else 0
    if not count or width % count or (dim is not None and width != count * dim):
        needed = "L.size or D.size divides" if flat == "LD" else "D.size divides"
        raise InvalidInputError(f"found {width} numbers on the axis ({' '.join(flat)}); {needed} them", field=what)
    array = array.reshape(*array.shape[:at], count, width // count, *array.shape[at + 1 :])
    return array, (*found[:at], *flat, *found[at + 1 :])


def _moved(array: np.ndarray, letters: Sequence[str], wanted: str, what: str) -> np.ndarray:
    """Return an array with its axes in the wanted order; a missing H is one head, a missing S one token."""
    found = list(letters)
    for letter in wanted:
        if letter not in found and letter in "HS":
            array, found = array[None], [letter, *found]
    if sorted(found) != sorted(wanted):
        text = f"found the axes {' '.join(found) or 'of a number'}, expected {' '.join(wanted)}"
        raise InvalidInputError(text.replace("Q", "S"), field=what)
    order = [found.index(letter) for letter in wanted]
    return array if order == list(range(len(order))) else array.transpose(order)


def shaped(cell: Cell, shape: np.ndarray, stated: str | None) -> Cell:
    """Return a cell of flat numbers, or of bytes of a stated dtype, also in base64, in a shape of its row."""
    array = as_array(cell.value)
    if isinstance(cell.value, str) and stated is not None:
        with contextlib.suppress(ValueError):
            array = NumpyArray(np.frombuffer(base64.b64decode(cell.value, validate=True), np.uint8))
    numbers = None if array is None else np.ascontiguousarray(array.read())
    if shape.dtype.kind not in "iu" or shape.min(initial=1) < 1:
        raise field_error(f"shape.{cell.place.name}", f"{shape.tolist()!s:.60}", "positive integers")
    if numbers is not None and stated is not None and numbers.dtype == np.uint8:
        wanted = dtype_of(stated)
        numbers = None if numbers.nbytes % wanted.itemsize else numbers.view(wanted)
    sizes = tuple(int(size) for size in shape.tolist())
    if numbers is None or numbers.ndim != 1 or len(sizes) != len(cell.axes) or math.prod(sizes) != numbers.size:
        found = "other than flat numbers" if numbers is None else f"{numbers.size} {numbers.dtype.name} values"
        found = "a text" if numbers is None and isinstance(cell.value, str) else found
        hint = "" if stated is not None else f"; dtype.{cell.place.name} states the kind of bytes"
        raise field_error(cell.place.name, found, f"the shape {list(sizes)} on the axes {_text(cell.axes)}{hint}")
    return cell._replace(value=NumpyArray(numbers.reshape(sizes)))


def dtype_of(stated: str) -> np.dtype:
    """Return the dtype of one of the names that a layout may state."""
    return schema.BFLOAT16 if stated == "bfloat16" else np.dtype(_DTYPES.get(stated, "u1"))


def numbers_of(array: np.ndarray) -> np.ndarray:
    """Return an array with a dtype of NumPy: bfloat16 as float32."""
    return (array["bfloat16"].astype("<u4") << 16).view("<f4") if array.dtype == schema.BFLOAT16 else array


class LayerOrder:
    """Put the layers of states and attention into the order of their numbers (rule 1).

    Parameters
    ----------
    layout : Layout
    is_of_schema : bool
        Whether the numbers are those that `create` takes as `layer_ids`: some traces may lack them, so that they sort no
        layers.
    """

    def __init__(self, layout: Layout, *, is_of_schema: bool) -> None:
        self._stated, self._size = layout.settings.get("L.ids"), layout.settings.get("L.size")
        self._is_of_schema, self._is_of_file = is_of_schema, "L.ids" in layout.addresses
        self._what = "layer_ids" if is_of_schema else "L.ids"

    def sort(self, values: dict[str, Any], names: Mapping[str, LayerIds], of_file: Sequence[int] | None) -> LayerIds:
        """Sort the layers of fields, of which the first has the states; return the numbers of those.

        Parameters
        ----------
        values : dict
            The fields of a trace; the lists of layers are replaced.
        names : Mapping
            For each field that has layers: the increasing numbers that names bind, by which they are sorted, or None.
        of_file : sequence of int, optional
            What the address of `L.ids` gives.
        """
        if of_file is None and self._is_of_file and not self._is_of_schema:
            raise InvalidInputError("the trace has no numbers of layers where the layout says", field=self._what)
        stated = self._stated if of_file is None else of_file
        if stated is None and not any(names.values()):
            return None
        first, *rest = (own for field, own in names.items() if values.get(field) is not None)
        # Names that count may also be the places of the stated numbers.
        if stated and first and None not in rest and _is_counted(first) and [*stated] != sorted(stated) == [*first]:
            found = f"found the layers {first!s:.60} in names, and {stated!s:.60}; remove it if the names are right"
            raise InvalidInputError(found, field=self._what)
        numbers: dict[str, LayerIds] = {}
        for field, own in names.items():
            if values.get(field) is not None:
                values[field], numbers[field] = self._sorted(values[field], own, stated, field)
        ids, *others = numbers.values()
        for other in others:
            self._check_same(ids, other, list(numbers))
        return ids

    def _sorted(
        self, layers: Layers, own: LayerIds, stated: Sequence[int] | None, field: str
    ) -> tuple[Layers, LayerIds]:
        given = own if stated is None else stated
        if given is None:
            return layers, None
        numbers = self._from_the_first(given)
        if own is not None and stated is not None and numbers not in _ways(own, self._size):
            of_names = self._from_the_first(own)
            if sorted(of_names) == sorted(numbers):
                numbers = of_names  # by which the layers are sorted
            elif not (_is_counted(of_names) and numbers == sorted(numbers)):
                found = f"the layers {of_names!s:.60} in names"
                raise field_error(field, found, f"{numbers!s:.60} as {self._what} says")
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        if order == list(range(len(order))):
            return layers, tuple(numbers)
        if self._is_of_schema:
            raise InvalidInputError(f"found the layers {numbers!s:.60}, expected them in their order", field=self._what)
        if len(layers) != len(numbers):
            expected = f"{len(numbers)} as {self._what} says, which sorts them"
            raise field_error(field, f"{len(layers)} layers", expected)
        return [layers[k] for k in order], tuple(numbers[k] for k in order)

    def _from_the_first(self, numbers: Sequence[int]) -> list[int]:
        """Return numbers of layers, of which negative ones count from the end where `L.size` is known."""
        size, what = self._size, self._what
        if {type(number) for number in numbers} != {int}:  # of a file
            raise InvalidInputError(f"found {list(numbers)!s:.60}, expected integers", field=what)
        if (len(numbers) > 2 or size == 2) and (ways := _ways(numbers, size)):
            text = f"found the layers {list(numbers)}; if -1 is in front of 0, as the embeddings are, L.ids = {ways[0]} gives"
            raise InvalidInputError(f"{text} their numbers in this order, {ways[1]} if it is the last one", field=what)
        if size is None and min(numbers) < 0 <= max(numbers):
            raise InvalidInputError(
                f"found the layers {list(numbers)}; L.size gives the number of the model's layers", field=what
            )
        if size is not None and (wrong := [k for k in numbers if not -size <= k < size]):
            raise InvalidInputError(f"found the layer {wrong[0]}, expected fewer than {size}", field="L.size")
        found = [k if size is None else k % size for k in numbers]
        if len(set(found)) < len(found):
            raise InvalidInputError(f"found the layers {list(numbers)!s:.60}, expected each once", field=what)
        return found

    def _check_same(self, ids: LayerIds, other: LayerIds, fields: list[str]) -> None:
        """Refuse attention of other layers than the states, and numbers of one that say nothing about the other."""
        if ids is None or other is None:
            known = ids or other
            if known is not None and not _is_counted(known):
                one, two = fields if other is None else fields[::-1]
                raise InvalidInputError(
                    f"{one} has the layers {list(known)!s:.60}, {two} has no numbers: L.ids states them in the order of "
                    "its arrays",
                    field="L.ids",
                )
            return
        # The states may have the embeddings in front, or be numbered with them.
        is_shifted = ids[0] == 0 and (other == ids[1:] or (_is_counted(ids) and other == ids[:-1]))
        if other != ids and not is_shifted:
            raise InvalidInputError(f"found the layers {list(other)}, expected {list(ids)}", field=fields[1])


def _ways(numbers: Sequence[int], size: int | None) -> list[list[int]]:
    """Return the numbers of layers if -1 next to all of 0, 1, ... is in front of them, and if it is the last one."""
    count = len(numbers)
    if not 2 <= count <= (size or count) or sorted(numbers) != list(range(-1, count - 1)):
        return []
    return [[k + 1 for k in numbers], [k % (size or count) for k in numbers]]


def _is_counted(numbers: Sequence[int]) -> bool:
    """Return whether numbers may be places in a list: they count from 0 or 1."""
    return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] in (0, 1)
