"""The tree of .npy files and .npz archives."""

import math
from typing import IO

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.npz import DAMAGE, StoredArray, damaged, stored_arrays, stored_npy
from tracestore.ingest.pickles.pickle_reader import load_objects
from tracestore.ingest.readers.content import Content, refusals
from tracestore.ingest.readers.objects import ObjectOpener
from tracestore.ingest.readers.tree import (
    Array,
    Charge,
    Selection,
    Value,
    array_value,
    dtype_name,
    native,
    nested_group,
)
from tracestore.store.io.scratch import Scratch

# A compressed array of texts, records or no axes is read when it is opened.
_MAX_EAGER_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20


def read_npy(content: Content) -> Value:
    """Return the array of a file: a lazy one, items of texts or records, or the objects of its pickle."""
    return _opened(stored_npy(content.mapped, 0, len(content.mapped), content.name), content)


def read_npz(content: Content) -> Value:
    """Return the arrays of an archive by name."""
    arrays = stored_arrays(content.mapped, content.limits.file_bytes)
    return nested_group(arrays, lambda array: _opened(array, content))


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
        return array_value(CompressedArray(array, content.scratch, charge).whole(), charge)


def _objects(array: StoredArray, content: Content) -> Value:
    values = load_objects(array.pickle(content.scratch), array.name)
    count = math.prod(array.shape[:1])
    if len(values) != count:
        raise InvalidInputError(f"found {len(values)} objects, expected those of shape {array.shape}", field=array.name)
    return ObjectOpener(content.limits)(values if array.shape else values[0])


class CompressedArray(Array):
    """An array that is inflated from front to back: rows one after the other, other selections from the whole array."""

    def __init__(self, array: StoredArray, scratch: Scratch, charge: Charge) -> None:
        self._stored, self._scratch, self._charge = array, scratch, charge
        self.shape, self.dtype = array.shape, dtype_name(array.dtype)
        self._stream: IO[bytes] | None = None
        self._next = 0  # row of the stream
        self._whole: np.ndarray | None = None

    def read(self, selection: Selection = ()) -> np.ndarray:
        """Return the values of a selection."""
        with refusals():
            if not selection:
                part = self.whole()
            elif self._stored.is_fortran or selection[0] == slice(None):
                self._whole = self.whole() if self._whole is None else self._whole  # it is inflated once
                part = self._whole[selection]
            else:
                places = range(self.shape[0])[selection[0]]
                rows = self._rows(*((places.start, places.stop) if isinstance(places, range) else (places, places + 1)))
                part = rows[(slice(None) if isinstance(places, range) else 0, *selection[1:])]
        self._charge(0, part.nbytes, 0)
        return native(np.asarray(part, self._stored.dtype))

    def whole(self) -> np.ndarray:
        """Inflate the array."""
        with self._stored.stream() as stream:
            array = self._inflated(stream, self.shape[::-1] if self._stored.is_fortran else self.shape)
            if stream.read(1):
                raise InvalidInputError("trailing bytes after an array")
        return array.T if self._stored.is_fortran else array

    def _rows(self, begin: int, end: int) -> np.ndarray:
        """Inflate rows, from the beginning if a later one was read before."""
        if self._stream is None or self._next > begin:
            self._stream, self._next = self._stored.stream(), 0
        while self._next < begin:
            self._inflated(self._stream, self.shape[1:])
            self._next += 1
        self._next = end
        return self._inflated(self._stream, (end - begin, *self.shape[1:]))

    def _inflated(self, stream: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
        out = self._scratch.empty(shape, self._stored.dtype)
        view, begin = memoryview(out.reshape(-1).view("u1").data), 0
        try:
            while begin < len(view):
                chunk = stream.read(min(_CHUNK_BYTES, len(view) - begin))
                if not chunk:
                    raise InvalidInputError("truncated: an array ends early")
                view[begin : begin + len(chunk)] = chunk
                begin += len(chunk)
        except DAMAGE as error:
            raise damaged(error) from None
        return out
