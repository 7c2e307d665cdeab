"""Arrays in files of joblib: a wrapper in the pickle, and behind it the bytes of the array."""

import math
from typing import Any

from tracestore._core.pickle import ByteReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.pickled_values import (
    NDARRAY,
    PickledArray,
    PickledDtype,
    SafeFunction,
    SafeGlobal,
    checked_shape,
    make_array,
)

WRAPPER = ("joblib.numpy_pickle", "NumpyArrayWrapper")


class JoblibArray(PickledArray):
    """A NumpyArrayWrapper of joblib. Its state describes an array whose bytes follow in the file."""

    __slots__ = ("_source",)

    def __init__(self, source: ByteReader) -> None:
        super().__init__()
        self._source = source

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


def joblib_wrapper(source: ByteReader) -> SafeGlobal:
    """Return the class NumpyArrayWrapper; `source` is the file behind the pickle."""
    name = ".".join(WRAPPER)

    def new(args: tuple[Any, ...]) -> JoblibArray:
        if args:
            raise InvalidInputError(f"found {name} made with arguments")
        return JoblibArray(source)

    return SafeFunction(name, new, is_class=True, is_called=False)
