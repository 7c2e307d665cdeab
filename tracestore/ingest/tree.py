"""The tree that every reader of a container yields: groups, items, lazy arrays, texts and numbers.

A tree knows no names, roles or axes. A reader opens its groups and items when they are used, so that one item at a
time is in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Union

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import schema

Key = str | int | float | bool | tuple[Any, ...]
Value = Union["Group", "Items", "Array", str, int, float, bool, None]
Selection = tuple[int | slice, ...]
_MAX_AXES = 8
_NO_ATTRIBUTES: Mapping[str, Any] = {}


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
            as far as their container can.

        Raises
        ------
        InvalidInputError
            If the values are damaged, or exceed the limits of the file.
        """


class NumpyArray(Array):
    """An array in memory or in a mapped file."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, dtype_name(array.dtype)

    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return the values of a selection as a view."""
        return native(self._array[selection])


class Group(Mapping[Any, Value]):
    """An ordered mapping of names to values, which are opened when they are used.

    Attributes
    ----------
    attributes : Mapping
        Values that the container attaches to the group: attributes of HDF5, the metadata of safetensors and of
        the schema of Arrow; otherwise empty.
    """

    attributes: Mapping[str, Value] = _NO_ATTRIBUTES


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
    attributes : Mapping
        Values that the container attaches to the items, such as the metadata of the schema of Arrow.
    """

    length: int | None = None
    is_stream: bool = True
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
    length : int, optional
        Their number, if it is known.
    attributes : Mapping, optional
        The attributes of the items.
    """

    def __init__(
        self,
        items: Iterable[Value],
        length: int | None = None,
        attributes: Mapping[str, Value] = _NO_ATTRIBUTES,
    ) -> None:
        self._items, self.length, self.attributes = iter(items), length, attributes

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
    """

    is_stream = False

    def __init__(self, values: Sequence[Any], open_value: Callable[[Any], Value]) -> None:
        self.values, self._open, self.length = values, open_value, len(values)

    def __iter__(self) -> Iterator[Value]:
        return map(self._open, self.values)

    def __getitem__(self, k: int) -> Value:
        return self._open(self.values[k])

    def __len__(self) -> int:
        return len(self.values)


def dtype_name(dtype: np.dtype) -> str:
    """Return the name of a dtype in the tree; see `Array`."""
    return "bfloat16" if dtype == schema.BFLOAT16 else dtype.newbyteorder("=").name


def native(array: np.ndarray) -> np.ndarray:
    """Return an array in native byte order, unchanged if it has it."""
    is_native = array.dtype.isnative or array.dtype.fields is not None
    return array if is_native else array.astype(array.dtype.newbyteorder("="))


def array_value(array: np.ndarray | np.generic) -> Value:
    """Return an array of NumPy as a value of the tree.

    Numbers without axes become scalars, texts become items of str, records become items of groups.

    Raises
    ------
    InvalidInputError
        If bytes of text are not UTF-8.
    """
    array = np.asarray(array)
    kind = array.dtype.kind
    if array.dtype.names and array.dtype != schema.BFLOAT16:
        return Records(array) if array.ndim else _record(array[()])
    if kind in "SU":
        return text_of(array[()]) if not array.ndim else ListItems(array, array_value)
    if array.ndim:
        return NumpyArray(array)
    if array.dtype == schema.BFLOAT16:
        return float((array["bfloat16"].astype("<u4") << 16).view("<f4"))
    return array.item() if kind in "biuf" else NumpyArray(array.reshape(1))


class Records(ListItems):
    """Items of an array of records. Each is a group of its fields."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array, lambda item: Records(item) if isinstance(item, np.ndarray) else _record(item))


def _record(record: Any) -> Group:
    return MappingGroup({name: record[name] for name in record.dtype.names}, array_value)


def text_of(data: str | bytes) -> str:
    """Return text or its bytes in UTF-8 as str; raise InvalidInputError if it is not UTF-8."""
    if isinstance(data, str):
        return str(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError("found bytes that are not UTF-8 text") from None


def as_array(value: Value) -> Array | None:
    """Return an array, or nested items as one: numbers or arrays of one shape at each position.

    Parameters
    ----------
    value : Value
        A value of the tree. Items of a stream are not read.

    Returns
    -------
    Array or None
        Items of integers give int64, booleans bool and other numbers float64. None for a value that is no
        array: texts, groups, missing values, items of different shapes, no items.
    """
    if isinstance(value, Array):
        return value
    if not isinstance(value, Items) or value.is_stream or not value.length:
        return None
    plain = value.values if isinstance(value, ListItems) else None
    if isinstance(plain, list | tuple) and (array := _plain_array(plain)) is not None:
        return NumpyArray(array)
    parts: list[np.ndarray] = []
    for item in value:
        part = as_array(item)
        if part is None or (parts and (part.shape != parts[0].shape)):
            return None
        parts.append(part.read())
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1 and (schema.BFLOAT16 in kinds or any(kind.kind not in "biuf" for kind in kinds)):
        return None
    return NumpyArray(np.stack(parts))


def _plain_array(values: Sequence[Any]) -> np.ndarray | None:
    """Return nested lists of Python numbers as an array; None if they hold anything else."""
    leaves: Any = values
    shape = [len(values)]
    while (kinds := set(map(type, leaves))) <= {list, tuple}:
        lengths = set(map(len, leaves))
        if len(lengths) != 1 or len(shape) == _MAX_AXES:
            return None
        shape += lengths
        leaves = [item for inner in leaves for item in inner]
    if not kinds <= {int, float, bool} or (bool in kinds and len(kinds) > 1):
        return None
    dtype = "?" if kinds == {bool} else "<i8" if kinds == {int} else "<f8"
    with suppress(OverflowError):
        return np.array(leaves, dtype).reshape(shape)
    return None
