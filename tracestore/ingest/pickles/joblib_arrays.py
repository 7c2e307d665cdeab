"""Arrays in files of joblib: a wrapper in the pickle, and behind it the bytes of the array."""

import math
from typing import Any

import numpy as np

from tracestore._core.pickle import ByteReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.pickled_values import (
    NDARRAY,
    PickledDtype,
    PickledValue,
    SafeGlobal,
    checked_shape,
    make_array,
)

WRAPPER = ("joblib.numpy_pickle", "NumpyArrayWrapper")


class JoblibArray(PickledValue):
    """A NumpyArrayWrapper of joblib. Its state describes an array whose bytes follow in the file."""

    __slots__ = ("_source", "array")

    def __init__(self, source: ByteReader) -> None:
        self._source = source
        self.array: np.ndarray | None = None

    def build(self, state: Any) -> None:
        """Read the array that a state describes."""
        if type(state) is not dict or not {"subclass", "shape", "order", "dtype"} <= state.keys():
            raise InvalidInputError("found a joblib array whose state is not (subclass, shape, order, dtype)")
        if self.array is not None or state["subclass"] is not NDARRAY or state["order"] not in ("C", "F"):
            raise InvalidInputError("found a joblib array of a class other than numpy.ndarray")
        if not isinstance(state["dtype"], PickledDtype) or state["dtype"].dtype is None:
            raise InvalidInputError("found a joblib array of objects, expected numbers or strings")
        if state.get("numpy_array_alignment_bytes") is not None:
            self._source.read(self._source.read(1)[0])  # padding
        dtype, shape = state["dtype"].dtype, checked_shape(state["shape"])
        self.array = make_array(self._source.read(math.prod(shape) * dtype.itemsize), dtype, shape, state["order"])

    def resolve(self) -> np.ndarray:
        """Return the array."""
        if self.array is None:
            raise InvalidInputError("found a joblib array that was never filled")
        return self.array


class JoblibWrapper(SafeGlobal):
    """The class NumpyArrayWrapper; `source` is the file behind the pickle."""

    name = ".".join(WRAPPER)

    def __init__(self, source: ByteReader) -> None:
        self._source = source

    def new(self, args: tuple[Any, ...]) -> JoblibArray:
        """Return an array that the opcode BUILD fills."""
        if args:
            raise InvalidInputError(f"found {self.name} made with arguments")
        return JoblibArray(self._source)
