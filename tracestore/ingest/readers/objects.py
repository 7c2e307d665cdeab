"""The tree of pickles and files of torch.save, over the values that the reader of untrusted pickles makes."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tracestore._core.pickle import BufferReader, ByteReader, SafeUnpickler
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.pickles import torch_file
from tracestore.ingest.pickles.pickle_reader import pickle_reader
from tracestore.ingest.pickles.pickled_frames import PandasObject
from tracestore.ingest.pickles.pickled_objects import PickledDict, PickledObject, UnknownClass
from tracestore.ingest.pickles.pickled_torch import PickledGraph, PickledTensor
from tracestore.ingest.pickles.pickled_values import PickledArray, PickledDtype, SafeClass
from tracestore.ingest.pickles.sparse import PickledSparse
from tracestore.ingest.readers.content import FAULTS, Content, bytes_value, refusals
from tracestore.ingest.readers.tree import (
    Array,
    Charge,
    ListItems,
    MappingGroup,
    Selection,
    StreamItems,
    Value,
    array_value,
    dtype_name,
)

_PROTO = 0x80
_SCALARS = frozenset((int, float, bool, type(None)))
_KEYS = frozenset((str, int, float, bool, tuple))
# A pickle whose root is a list ends with APPENDS or APPEND, and STOP.
_ENDS_OF_LISTS = (b"e.", b"a.")
_STOP = b"."
_BEGIN_OF_LIST = re.compile(rb"\x80.(\x95.{8})?\]", re.DOTALL)  # PROTO, FRAME, EMPTY_LIST


class ObjectOpener:
    """Return values of a pickle as values of the tree, each charged when it is opened."""

    def __init__(self, limits: Limits) -> None:
        self.charge: Charge = limits.charge

    def __call__(self, value: Any) -> Value:
        """Return a value of the tree."""
        kind = type(value)
        self.charge(len(value) if kind is str else 0)
        if kind is str or kind in _SCALARS:
            return value  # type: ignore[no-any-return]
        if kind is dict:
            return ObjectGroup(_keyed(value), self)
        if kind is list or kind is tuple:
            return ListItems(value, self, self.charge)
        with refusals(FAULTS):
            return self._special(value)

    def _special(self, value: Any) -> Value:
        if isinstance(value, PickledArray | PickledTensor):
            array = value.resolve()
            return self(array) if isinstance(array, list) else array_value(array, self.charge)
        if isinstance(value, np.ndarray | np.generic):
            return array_value(value, self.charge)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes_value(value, self.charge)
        if isinstance(value, PickledSparse):
            return SparseArray(value, self.charge)
        if isinstance(value, PandasObject):
            columns = value.values()
            return self._rows(columns) if isinstance(columns, dict) else self(columns)
        if isinstance(value, PickledGraph):
            return MappingGroup(value.fields(), self, {"class": "torch_geometric.data.data.Data"})
        if isinstance(value, PickledObject):
            return self._object(value)
        if isinstance(value, SafeClass | UnknownClass):
            return value.name
        if isinstance(value, PickledDtype):
            return str(value.dtype)
        raise InvalidInputError(f"found a {type(value).__name__.removeprefix('Pickled')}, expected a value")

    def _rows(self, columns: dict[str, Sequence[Any]]) -> Value:
        """Return columns of one length as rows."""
        rows = range(len(next(iter(columns.values()))))
        return ListItems(rows, lambda k: MappingGroup(columns, lambda column: self(column[k])), self.charge)

    def _object(self, value: PickledObject) -> Value:
        text = value.plain()
        if text is not value:
            return self(text)
        if value.args and not value.fields:
            return ListItems(value.args, self, self.charge)
        fields = value.fields if isinstance(value, PickledDict) else {**dict(enumerate(value.args)), **value.fields}
        return MappingGroup(fields, self, {"class": value.name})


class ObjectGroup(MappingGroup):
    """A group of a dict of a pickle."""

    __slots__ = ()
    _open: ObjectOpener

    def at_hand(self, keys: Sequence[Any]) -> list[Any]:
        """Return what the parser has made for each key; NotImplemented for values that are opened by their key."""
        text_bytes = array_bytes = 0
        count, values = len(keys), self._values
        found = []
        for key in keys:
            value = values[key]
            kind = type(value)
            if kind is str:
                text_bytes += len(value)
            elif kind in _ARRAYS or (kind is list and value):
                items = value if kind is list else [value]
                first = type(items[0])
                count += len(items) if kind is list else 0
                if first in _ARRAYS and (arrays := _arrays_of_one_dtype(items)) is not None:
                    value = arrays if kind is list else arrays[0]
                    array_bytes += sum([array.nbytes for array in arrays])
                elif first is str and set(map(type, items)) == _TEXTS:
                    text_bytes += sum(map(len, items))
                else:
                    value = NotImplemented
            elif kind not in _SCALARS:
                value = NotImplemented
            found.append(value)
        self._open.charge(text_bytes, array_bytes, count)
        return found


_TEXTS, _ARRAYS = {str}, (PickledArray, PickledTensor)


def _arrays_of_one_dtype(values: list[Any]) -> list[np.ndarray] | None:
    """Return arrays of numbers in native byte order that share one dtype, as the layers of a trace; None for others."""
    arrays: list[Any] = [
        value.array if type(value) is PickledArray else value.resolve() if type(value) is PickledTensor else None
        for value in values
    ]
    dtype = getattr(arrays[0], "dtype", None)
    if dtype is None or dtype.kind not in "fiu" or not dtype.isnative:
        return None
    is_other = [type(array) is not np.ndarray or array.dtype is not dtype or not array.ndim for array in arrays]
    return None if True in is_other else arrays


class SparseArray(Array):
    """A sparse matrix, which becomes dense when it is read."""

    def __init__(self, matrix: PickledSparse, charge: Charge) -> None:
        if matrix.size is None:
            raise InvalidInputError("found a sparse matrix without values")
        self._matrix, self._charge, self.shape = matrix, charge, matrix.size
        values = matrix.values.dtype
        self.dtype = "float32" if values.kind == "V" else dtype_name(values)

    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return a selection of the dense matrix."""
        self._charge(0, math.prod(self.shape) * 8, 0)
        with refusals():
            return np.asarray(self._matrix.resolve()[selection])


def _keyed(values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a dict whose keys are keys of the tree: bytes become text, None "None", integers of NumPy int."""
    if _KEYS.issuperset(map(type, values)):
        return values
    keys = [_key(key) for key in values]
    if len(set(keys)) != len(keys):
        raise InvalidInputError("found two keys of a dict that mean the same name")
    return dict(zip(keys, values.values(), strict=True))


def _key(key: Any) -> Any:
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    return int(key) if isinstance(key, np.integer) else "None" if key is None else key


def read_pickle(
    source: ByteReader, limits: Limits, *, is_list: bool, persistent_load: Callable[[Any], Any] | None = None
) -> Value | None:
    """Return the tree of a pickle, or of several behind each other as one stream of items.

    The items of a list come one by one if `is_list`: its bytes end like those of a list. A list among several
    pickles stands for its items. Nothing follows a pickle with a `persistent_load`: that of `pickle_reader`.

    Returns
    -------
    Value or None
        None for a stream whose first item has no names. The list may be one of several columns in another object,
        so the caller reads it again as a whole; `is_list` is then known.
    """
    open_value = ObjectOpener(limits)
    reader = _reader(source, persistent_load)
    may_follow = persistent_load is None
    first = next(reader, _NOTHING) if is_list else _NOTHING
    if first is _NOTHING:
        root = open_value(reader.result if is_list else reader.load())
        if source.is_eof():
            return root
        behind = _pickles(source, open_value, may_follow=may_follow)
        return StreamItems(chain(root if isinstance(root, ListItems) else (root,), behind))
    if not isinstance(first, dict | PickledObject | PickledGraph) and not isinstance(source, BufferReader):
        return None
    behind = _pickles(source, open_value, may_follow=may_follow)
    return StreamItems(chain(iter([open_value(first)]), _items(reader, open_value), behind))


_NOTHING = object()


def _reader(source: ByteReader, persistent_load: Callable[[Any], Any] | None = None) -> SafeUnpickler:
    reader = pickle_reader(source, persistent_load=persistent_load, load_bytes=torch_file.load_bytes)
    iter(reader)  # from here on, next() returns the items of a list
    return reader


def _items(reader: SafeUnpickler, open_value: ObjectOpener) -> Iterator[Value]:
    yield from map(open_value, reader)
    if reader.result is not reader.root:
        raise InvalidInputError(
            "the list of traces is inside another object; save the list alone", is_whole_source=True
        )


def _pickles(source: ByteReader, open_value: ObjectOpener, *, may_follow: bool) -> Iterator[Value]:
    """Yield the objects, and the items of lists, of the pickles that follow, if any may."""
    while not source.is_eof():
        if source.peek() != _PROTO or not may_follow:
            raise InvalidInputError("trailing bytes after the pickle")
        reader = _reader(source)
        first = next(reader, _NOTHING)
        if first is not _NOTHING:
            yield open_value(first)
            yield from _items(reader, open_value)
        elif reader.result is not reader.root:
            yield open_value(reader.result)


def read_mapped_pickle(content: Content) -> Value:
    """Return the tree of a pickle, or of a legacy file of torch.save."""
    view = memoryview(content.mapped)
    if torch_file.is_legacy(view):
        return ObjectOpener(content.limits)(torch_file.read_legacy(view))
    # Of a file that is cut, the items before the cut can be read.
    return read_pickle(BufferReader(content.mapped), content.limits, is_list=_is_list(view))


def _is_list(pickle: memoryview) -> bool:
    """Return whether a pickle ends like that of a list, or is cut."""
    return bytes(pickle[-2:]) in _ENDS_OF_LISTS or pickle[-1:] != _STOP


def read_torch_zip(content: Content) -> Value:
    """Return the tree of a zip archive of torch.save."""
    pickle, load = torch_file.open_zip(content.mapped)
    is_list = _is_list(pickle) and _BEGIN_OF_LIST.match(pickle) is not None
    return read_pickle(BufferReader(pickle), content.limits, is_list=is_list, persistent_load=load)
