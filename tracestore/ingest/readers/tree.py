"""The tree that every reader of a container yields: groups, items, lazy arrays, texts and numbers.

A tree knows no names, roles or axes. A reader opens its groups and items when they are used, so that one item at a
time is in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol, Union, cast

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import schema

Key = str | int | float | bool | tuple[Any, ...]
Value = Union["Group", "Items", "Array", str, int, float, bool, None]
Selection = tuple[int | slice, ...]
_MAX_AXES = 8
_NUMBERS = ("int", "uint", "float", "bool")
_NO_ATTRIBUTES: Mapping[str, Any] = {}


class Charge(Protocol):
    """Count decoded values and bytes; raise InvalidInputError beyond the limits of the file."""

    def __call__(self, text_bytes: int = 0, array_bytes: int = 0, count: int = 1) -> None:
        """Count `count` values with these bytes."""


def no_charge(text_bytes: int = 0, array_bytes: int = 0, count: int = 1) -> None:
    """Charge nothing: each value takes bytes of its own in the file."""


class Array(ABC):
    """An array of numbers that is read when it is asked for.

    Attributes
    ----------
    shape : tuple of int
        Extent of each axis. There is at least one axis: a number without axes is a scalar of the tree.
    dtype : str
        "float16", "bfloat16", "float32", "float64", "int64", "uint8", "bool", "complex64" and so on, without
        the byte order; "void16" for two bytes without a type.
    attributes : Mapping
        Values that the container attaches to the array, such as attributes of HDF5; mostly empty.
    """

    shape: tuple[int, ...]
    dtype: str
    attributes: Mapping[str, Value] = _NO_ATTRIBUTES

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @abstractmethod
    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return the values of a selection, or all of them.

        Parameters
        ----------
        selection : tuple of int or slice
            One entry per leading axis, with steps of 1 and within the shape. An integer removes its axis.

        Returns
        -------
        numpy.ndarray
            In native byte order; bfloat16 as `schema.BFLOAT16`. A view of the mapped file where the container
            allows it, which may be read-only and not contiguous. Other readers decode only what is selected
            where their container can.

        Raises
        ------
        InvalidInputError
            If the values are damaged, or exceed the limits of the file.
        """


class NumpyArray(Array):
    """An array in memory or in a mapped file; what is read of it is charged."""

    def __init__(self, array: np.ndarray, charge: Charge = no_charge) -> None:
        self._array, self._charge = array, charge
        self.shape, self.dtype = array.shape, dtype_name(array.dtype)

    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return the values of a selection as a view."""
        part = self._array[selection] if selection else self._array
        self._charge(0, part.nbytes, 0)
        return native(np.asarray(part, self._array.dtype))


class StackedArray(Array):
    """Arrays of one shape as one array with an axis more, which is the first."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts, self.shape = parts, (len(parts), *parts[0].shape)
        names = sorted({part.dtype for part in parts})
        self.dtype = names[0] if len(names) == 1 else np.result_type(*names).name

    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return the values of a selection: a view if it takes one part, else a copy of what it takes."""
        first, inner = (selection[0], selection[1:]) if selection else (slice(None), ())
        if isinstance(first, slice):
            return np.stack([part.read(inner) for part in self._parts[first]])
        return self._parts[first].read(inner)


class Group(Mapping[Any, Value]):
    """An ordered mapping of names to values, which are opened when they are used.

    Attributes
    ----------
    attributes : Mapping
        Values that the container attaches to the group: attributes of HDF5, the metadata of safetensors and of
        the schema of Arrow; otherwise empty.
    """

    __slots__ = ()
    attributes: Mapping[str, Value] = _NO_ATTRIBUTES

    def at_hand(self, keys: Sequence[Any]) -> list[Any]:
        """Return, for each key, what the reader has made already: a text, a number, an array of NumPy, a list of them.

        NotImplemented stands for every other value, which is opened by its key. A list holds texts or arrays.
        """
        return [NotImplemented] * len(keys)


class MappingGroup(Group):
    """A group of a mapping in memory.

    Parameters
    ----------
    values : Mapping
        Values by their keys: str, int, float, bool or tuples of them.
    open_value : callable
        Return a value of the mapping as a value of the tree; called at each access.
    attributes : Mapping, optional
        The attributes of the group.
    """

    __slots__ = ("_open", "_values", "attributes")

    def __init__(
        self,
        values: Mapping[Any, Any],
        open_value: Callable[[Any], Value],
        attributes: Mapping[str, Value] = _NO_ATTRIBUTES,
    ) -> None:
        self._values, self._open, self.attributes = values, open_value, attributes

    def __getitem__(self, key: Any) -> Value:
        return self._open(self._values[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class Items(ABC):
    """Values behind each other: items of a list, rows of a table, lines, consecutive pickles.

    Attributes
    ----------
    length : int or None
        Number of items; None if it is known only at the end.
    is_stream : bool
        Whether the items can be iterated once only, from the first on. The others can be indexed, too.
    is_lent : bool
        Whether arrays are views of large buffers, such as a batch of rows, which they keep alive.
    attributes : Mapping
        Values that the container attaches to the items, such as the metadata of the schema of Arrow.
    """

    length: int | None = None
    is_stream: bool = True
    is_lent: bool = False
    attributes: Mapping[str, Value] = _NO_ATTRIBUTES

    @abstractmethod
    def __iter__(self) -> Iterator[Value]:
        """Yield the items. The reader keeps none after the next is asked for."""

    def __getitem__(self, k: int) -> Value:
        """Return item `k`, from 0."""
        raise TypeError("items of a stream cannot be indexed")


class StreamItems(Items):
    """Items that a reader yields once.

    Parameters
    ----------
    items : Iterable
        Values of the tree.
    attributes : Mapping, optional
        The attributes of the items.
    is_lent : bool
        As for `Items`.
    """

    def __init__(
        self, items: Iterable[Value], attributes: Mapping[str, Value] = _NO_ATTRIBUTES, *, is_lent: bool = False
    ) -> None:
        self._items, self.attributes, self.is_lent = iter(items), attributes, is_lent

    def __iter__(self) -> Iterator[Value]:
        return self._items


class ListItems(Items):
    """Items of a sequence in memory.

    Parameters
    ----------
    values : Sequence
        The sequence, such as a list of a pickle or of JSON.
    open_value : callable
        Return an entry of the sequence as a value of the tree; called at each access.
    charge : callable, optional
        Called by `as_array` with the number of values, instead of `open_value` for each.
    """

    is_stream = False

    def __init__(self, values: Sequence[Any], open_value: Callable[[Any], Value], charge: Charge = no_charge) -> None:
        self.values, self._open, self.charge, self.length = values, open_value, charge, len(values)

    def __iter__(self) -> Iterator[Value]:
        return map(self._open, self.values)

    def __getitem__(self, k: int) -> Value:
        return self._open(self.values[k])

    def __len__(self) -> int:
        return len(self.values)


def nested_group(
    values: Mapping[str, Any], open_value: Callable[[Any], Value], attributes: Mapping[str, Value] = _NO_ATTRIBUTES
) -> Group:
    """Return values whose names are paths as groups in each other: the name "a/b" becomes ["a"]["b"].

    A name that is also the beginning of another's path leaves the longer name whole. No value is a dict.
    """

    def opened(value: Any) -> Value:
        return MappingGroup(value, opened) if isinstance(value, dict) else open_value(value)

    found: dict[str, Any] = {}
    for name, value in values.items():
        parts = name.split("/")
        whole = ["/".join(parts[:k]) for k in range(1, len(parts))]
        if any(prefix in values for prefix in whole) or not all(parts):
            found[name] = value
            continue
        inner = found
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
        inner[parts[-1]] = value
    return MappingGroup(found, opened, attributes)


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype) -> str:
    """Return the name of a dtype in the tree; see `Array`."""
    return "bfloat16" if dtype == schema.BFLOAT16 else dtype.newbyteorder("=").name


def native(array: np.ndarray) -> np.ndarray:
    """Return an array in native byte order, unchanged if it has it."""
    is_native = array.dtype.isnative or array.dtype.fields is not None
    return array if is_native else array.astype(array.dtype.newbyteorder("="))


def array_value(array: Any, charge: Charge = no_charge) -> Value:
    """Return an array or number of NumPy as a value of the tree.

    Numbers without axes become scalars, texts become items of str, records become items of groups.

    Raises
    ------
    InvalidInputError
        If bytes of text are not UTF-8.
    """
    array = np.asarray(array)
    kind = array.dtype.kind

    def open_part(part: Any) -> Value:
        charge(getattr(part, "nbytes", 0) if kind in "SU" else 0)
        return array_value(part, charge)

    if array.dtype.names and array.dtype != schema.BFLOAT16:
        if array.ndim:
            return ListItems(cast(Sequence[Any], array), open_part)
        return MappingGroup({name: array[name] for name in array.dtype.names}, open_part)
    if kind in "SU":
        return ListItems(cast(Sequence[Any], array), open_part) if array.ndim else text_of(array.item())
    if array.ndim:
        return NumpyArray(array, charge)
    if array.dtype == schema.BFLOAT16:
        return float((array["bfloat16"].astype("<u4") << 16).view("<f4"))
    number: Value = array.item() if kind in "biuf" else NumpyArray(array.reshape(1), charge)
    return number


def text_of(data: str | bytes) -> str:
    """Return text or its bytes in UTF-8 as str; raise InvalidInputError if it is not UTF-8."""
    if isinstance(data, str):
        return str(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError("found bytes that are not UTF-8 text") from None


def as_array(value: Value, depth: int = 0) -> Array | None:
    """Return an array, or nested items as one: numbers or arrays of one shape at each position.

    Parameters
    ----------
    value : Value
        A value of the tree. Items of a stream are not read.
    depth : int
        Number of lists around the value that are read as axes.

    Returns
    -------
    Array or None
        Items of integers give int64, booleans bool and other numbers float64. None for a value that is no
        array: texts, groups, missing values, items of different shapes, no items.
    """
    if isinstance(value, Array):
        return value
    if not isinstance(value, Items) or value.is_stream or not value.length or depth == _MAX_AXES:
        return None
    if isinstance(value, ListItems) and isinstance(value.values, list | tuple):
        array = _plain_array(value.values, value.charge)
        if array is not None:
            return NumpyArray(array, value.charge)
    parts: list[Array] = []
    for item in value:
        part = as_array(item, depth + 1)
        if part is None or (parts and part.shape != parts[0].shape):
            return None
        parts.append(part)
    names = {part.dtype for part in parts}
    if len(names) > 1 and not all(name.startswith(_NUMBERS) for name in names):
        return None
    return StackedArray(parts)


def _plain_array(values: Sequence[Any], charge: Charge) -> np.ndarray | None:
    """Return nested lists of Python numbers as an array; None if they hold anything else."""
    leaves: Any = values
    shape = [len(values)]
    charge(count=len(values))
    while (kinds := set(map(type, leaves))) <= {list, tuple}:
        lengths = set(map(len, leaves))
        if len(lengths) != 1 or len(shape) == _MAX_AXES:
            return None
        shape += lengths
        charge(count=len(leaves) * shape[-1])  # before the lists of one list that is named many times are joined
        leaves = [item for inner in leaves for item in inner]
    if not kinds <= {int, float, bool} or (bool in kinds and len(kinds) > 1):
        return None
    dtype = "?" if kinds == {bool} else "<i8" if kinds == {int} else "<f8"
    with suppress(OverflowError):
        return np.array(leaves, dtype).reshape(shape)
    return None
