"""The tree of .npy files and .npz archives."""

import math
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.npz import StoredArray, stored_arrays, stored_npy
from tracestore.ingest.pickles.pickle_reader import load_objects
from tracestore.ingest.readers.content import Content, refusals
from tracestore.ingest.readers.objects import ObjectOpener
from tracestore.ingest.tree import (
    Array,
    Charge,
    Folder,
    MappingGroup,
    Selection,
    Value,
    array_value,
    dtype_name,
    native,
    nested,
)
from tracestore.store.io.scratch import Scratch

# A compressed array of texts, records or no axes is read when it is opened.
_MAX_EAGER_BYTES = 64 << 20


def read_npy(content: Content) -> Value:
    """Return the array of a file: a lazy one, items of texts or records, or the objects of its pickle."""
    return _opened(stored_npy(content.mapped, 0, len(content.mapped), content.name), content)


def read_npz(content: Content) -> Value:
    """Return the arrays of an archive by name."""

    def opened(value: Any) -> Value:
        return MappingGroup(value, opened) if isinstance(value, Folder) else _opened(value, content)

    return MappingGroup(nested(stored_arrays(content.mapped, content.limits.file_bytes)), opened)


def _opened(array: StoredArray, content: Content) -> Value:
    charge = content.limits.charge
    charge()
    with refusals():
        if array.dtype.kind == "O":
            return _objects(array, content)
        if array.data is not None:
            return array_value(array.view(), charge)
        if array.dtype.kind in "biufcV" and array.dtype.names in (None, ("bfloat16",)) and array.shape:
            return CompressedArray(array, content.scratch, charge)
        if array.num_bytes > _MAX_EAGER_BYTES:
            raise InvalidInputError(
                f"found {array.num_bytes:,} compressed bytes of texts or records, expected at most "
                f"{_MAX_EAGER_BYTES >> 20} MiB; write them with numpy.savez",
                field=array.name,
            )
        values = array.rows(content.scratch).whole()
        return array_value(values.T if array.is_fortran else values, charge)


def _objects(array: StoredArray, content: Content) -> Value:
    values = load_objects(array.pickle(content.scratch), array.name)
    count = math.prod(array.shape[:1])
    if len(values) != count:
        raise InvalidInputError(f"found {len(values)} objects, expected those of shape {array.shape}", field=array.name)
    return ObjectOpener(content.limits)(values if array.shape else values[0])


class CompressedArray(Array):
    """An array that is inflated from front to back: rows one after the other, other selections from the whole array."""

    def __init__(self, array: StoredArray, scratch: Scratch, charge: Charge) -> None:
        self._rows, self._charge, self._is_fortran = array.rows(scratch), charge, array.is_fortran
        self.shape, self.dtype = array.shape, dtype_name(array.dtype)
        self._itemsize = array.dtype.itemsize

    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return the values of a selection."""
        with refusals():
            if self._is_fortran:
                part = self._rows.kept().T[selection]
            elif not selection:
                part = self._rows.whole()
            elif selection[0] == slice(None):
                part = self._rows.kept()[selection]
            else:
                begin, end = _bounds(selection[0], self.shape[0])
                rows = self._rows.part(begin, end)
                part = (
                    rows[(0, *selection[1:])] if isinstance(selection[0], int) else rows[(slice(None), *selection[1:])]
                )
        self._charge(0, part.nbytes, 0)
        return native(np.asarray(part, self._rows.dtype))


def _bounds(first: int | slice, extent: int) -> tuple[int, int]:
    if isinstance(first, slice):
        begin, end, _ = first.indices(extent)
        return begin, max(begin, end)
    k = range(extent)[first]
    return k, k + 1
