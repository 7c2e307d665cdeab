"""The tree of HDF5 files, which a process of its own reads."""

import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.extras import needs
from tracestore.ingest.readers.content import Content, refusals
from tracestore.ingest.readers.hdf5_process import CRASHED, HDF5Process, Idle
from tracestore.ingest.readers.tree import (
    Array,
    Group,
    Items,
    ListItems,
    Selection,
    Value,
    array_value,
    dtype_name,
    native,
)

_DTYPE = re.compile(r"[<>|](?:[biufc](?:1|2|4|8|16)|[SV]\d{1,7})")
_PAGE_BYTES = 4 << 20
_MAX_MEMBERS = 400_000  # of a group
_idle = Idle()


def read_hdf5(content: Content) -> Value:
    """Return the groups and arrays of a file by name; attributes are attributes."""
    with needs("inputs"):
        if importlib.util.find_spec("h5py") is None:
            raise ModuleNotFoundError("No module named 'h5py'", name="h5py")
    return HDF5Group(_File(content), "/")


class _File:
    """A file that the process has open."""

    def __init__(self, content: Content) -> None:
        self.content, self.charge = content, content.limits.charge
        if content.is_inflated:
            raise InvalidInputError("found a compressed file of HDF5, which is read from the disk; inflate it")
        self._process: HDF5Process = _idle.take()
        self._is_answering, self._has_failed = True, False
        content.resources.callback(self.close)
        self.request(open=os.path.abspath(content.path))

    def request(self, **message: Any) -> dict[str, Any]:
        """Send a request and return the answer. After an error, the process reads no other file."""
        if not self._is_answering:
            raise InvalidInputError(CRASHED)
        self._is_answering = False
        with refusals():
            answer = self._process.ask(**message)
        self._is_answering = True
        if "error" in answer:
            self._has_failed = True
            raise InvalidInputError(str(answer["error"]), field=answer.get("field"))
        return answer

    def receive(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the array whose bytes follow an answer."""
        self._is_answering = False
        self.charge(0, math.prod(shape) * dtype.itemsize, 0)
        out = self.content.scratch.empty(shape, dtype)
        self._process.receive_into(memoryview(out.reshape(-1).view("u1").data))
        self._is_answering = True
        return out

    def close(self) -> None:
        """Close the file, and keep the process for the next one unless something went wrong."""
        with suppress(InvalidInputError):
            self.request(close=True)
        if self._is_answering and not self._has_failed:
            _idle.put(self._process)
        else:
            self._process.end()


class _HDF5Value:
    """A group or array of a file."""

    def __init__(self, file: _File, path: str) -> None:
        self._file, self._path = file, path

    @property
    def attributes(self) -> Mapping[str, Value]:
        """Texts and numbers that the file attaches to it."""
        found = self._file.request(path=self._path, attributes=True)["attributes"]
        return {name: array_value(np.asarray(v)) if isinstance(v, list) else v for name, v in found.items()}


class HDF5Group(_HDF5Value, Group):  # type: ignore[override]
    """A group of a file."""

    @cached_property
    def _entries(self) -> dict[str, list[Any]]:
        entries: dict[str, list[Any]] = {}
        begin: int | None = 0
        while begin is not None:
            answer = self._file.request(path=self._path, list=begin)
            entries |= {name: entry for name, *entry in answer["entries"]}
            begin = answer["next"]
            if len(entries) > _MAX_MEMBERS:
                raise InvalidInputError(f"found more than {_MAX_MEMBERS:,} objects in a group", field=self._path[:60])
        return entries

    def __getitem__(self, key: Any) -> Value:
        kind, *description = self._entries[key]
        path = f"{self._path.rstrip('/')}/{key}"
        self._file.charge()
        if kind == "group":
            return HDF5Group(self._file, path)
        if kind == "refused":
            raise InvalidInputError(description[0], field=path[:60])
        shape = tuple(map(int, description[0]))
        if kind == "array":
            return _array(self._file, path, shape, _dtype(description[1]))
        items = HDF5Items(self._file, path, shape)
        return items if shape else items[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _dtype(description: Any) -> np.dtype:
    """Return the dtype of a description: its text, or a list of names and descriptions of the fields."""
    if isinstance(description, str) and _DTYPE.fullmatch(description):
        return np.dtype(description)
    if isinstance(description, list) and description:
        return np.dtype([(str(name), _dtype(inner), tuple(map(int, shape))) for name, inner, shape in description])
    raise InvalidInputError(CRASHED)


def _array(file: _File, path: str, shape: tuple[int, ...], dtype: np.dtype) -> Value:
    array = HDF5Array(file, path, shape, dtype)
    if dtype.kind in "biufc" and shape:
        return array
    if not shape:
        return array_value(array.read(), file.charge)
    return HDF5Items(file, path, shape, array)


class HDF5Array(_HDF5Value, Array):  # type: ignore[override]
    """An array of a file; a selection is read by the process."""

    def __init__(self, file: _File, path: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        super().__init__(file, path)
        self._dtype = dtype
        self.shape, self.dtype = shape, dtype_name(dtype)

    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return the values of a selection."""
        whole = [slice(None)] * (self.ndim - len(selection))
        parts = [range(extent)[part] for part, extent in zip((*selection, *whole), self.shape, strict=True)]
        places = [[part.start, part.start + len(part)] if isinstance(part, range) else part for part in parts]
        expected = tuple(len(part) for part in parts if isinstance(part, range))
        answer = self._file.request(path=self._path, selection=places)
        if tuple(answer["shape"]) != expected:
            raise InvalidInputError(CRASHED, field=self._path[:60])
        return native(self._file.receive(expected, self._dtype))


class HDF5Items(_HDF5Value, Items):  # type: ignore[override]
    """Texts, lists or records of a file, which are read page by page."""

    is_stream = False

    def __init__(self, file: _File, path: str, shape: tuple[int, ...], array: HDF5Array | None = None) -> None:
        super().__init__(file, path)
        self._array = array
        self.length = shape[0] if shape else 1
        row_bytes = 1 if array is None else max(1, math.prod(shape[1:]) * array._dtype.itemsize)
        self._page_rows = max(1, _PAGE_BYTES // row_bytes)

    def __len__(self) -> int:
        assert self.length is not None
        return self.length

    def __getitem__(self, k: int) -> Value:
        k = range(len(self))[k]
        return self._page(k, k + 1)[0]

    def __iter__(self) -> Iterator[Value]:
        begin = 0
        while begin < len(self):
            page = self._page(begin, min(len(self), begin + self._page_rows))
            if not page:
                raise InvalidInputError(CRASHED, field=self._path[:60])
            begin += len(page)
            yield from page

    def _page(self, begin: int, end: int) -> list[Value]:
        if self._array is not None:
            values = self._array.read((slice(begin, end),))
            return [array_value(value, self._file.charge) for value in values]
        answer = self._file.request(path=self._path, rows=[begin, end])
        if "texts" in answer:
            return [self._text(text) for text in answer["texts"]]
        dtype = _dtype(answer["dtype"])
        self._file.charge(count=len(answer["sizes"]))
        return [array_value(self._file.receive((int(size),), dtype), self._file.charge) for size in answer["sizes"]]

    def _text(self, text: Any) -> Value:
        if isinstance(text, list):
            return ListItems(text, self._text)
        self._file.charge(len(text))
        return str(text)
