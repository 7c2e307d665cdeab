"""Values that a pickle may hold: NumPy dtypes, arrays and scalars, and plain objects.

Each class records what the pickle gives, checks it, and only then makes an array. Nothing
here imports or calls a name from a file; `pickle_reader` collects the accepted names.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tracestore._core.pickle import plain_array
from tracestore.errors import InvalidInputError

MAX_NDIM = 16
# An array without bytes may claim any length; no axis of a real trace is longer than this.
MAX_EMPTY_AXIS = 1 << 20
# Tuples, because isinstance would build a new union for every array.
_BUFFERS, _SEQUENCES = (bytes, bytearray, memoryview), (tuple, list)
_DTYPE = re.compile(r"([<>|=]?)(?:([biufc])(1|2|4|8|16)|([SU])(\d{1,6}))")
_SIZES = {("b", 1)} | {(k, s) for k in "iu" for s in (1, 2, 4, 8)} | {("f", s) for s in (2, 4, 8, 16)}
_SIZES |= {("c", 8), ("c", 16)}


class SafeGlobal:
    """Stand-in for an accepted name. Subclasses override the uses that they allow."""

    name = "?"

    def call(self, args: tuple[Any, ...]) -> Any:
        """Return the value of the opcode REDUCE."""
        raise InvalidInputError(f"{self.name} is called, which no trace file does")

    def new(self, args: tuple[Any, ...]) -> Any:
        """Return the value of the opcode NEWOBJ."""
        raise InvalidInputError(f"{self.name} is instantiated, which no trace file does")


class SafeClass(SafeGlobal):
    """A class that is only ever passed as a value."""

    def __init__(self, name: str) -> None:
        self.name = name


class SafeFunction(SafeGlobal):
    """A function or class whose uses give a value; `function` takes the tuple of arguments.

    A pickle may call a function. With `is_class` a pickle may also instantiate it, without `is_called` only that.
    """

    def __init__(
        self, name: str, function: Callable[[tuple[Any, ...]], Any], *, is_class: bool = False, is_called: bool = True
    ) -> None:
        self.name = name
        if is_called:
            self.call = function  # type: ignore[method-assign, assignment]
        if is_class:
            self.new = function  # type: ignore[method-assign, assignment]


def functions(module: str, **named: Callable[[tuple[Any, ...]], Any]) -> dict[tuple[str, str], SafeGlobal]:
    """Return the stand-ins of functions of a module by module and name."""
    return {(module, name): SafeFunction(f"{module}.{name}", function) for name, function in named.items()}


class PickledValue:
    """An object that the opcodes BUILD and SETITEMS may complete."""

    __slots__ = ()

    def add_items(self, items: list[Any]) -> None:
        """Add keys and values of a dict."""
        raise InvalidInputError("not a well-formed pickle: items are added to an object that is not a dict")

    def build(self, state: Any) -> None:
        """Set the state of the object."""
        raise InvalidInputError("an object gets a state that it cannot have")


class PickledDtype(PickledValue):
    """A numpy.dtype: a string, followed by a state with the byte order."""

    def __init__(self, text: str) -> None:
        match = _DTYPE.fullmatch(text)
        self.plain_itemsize = 0  # nonzero if every bit pattern is a valid value
        if text == "O" or text == "O8":
            self.dtype: np.dtype | None = None
            return
        if match is None:
            raise InvalidInputError(f"found dtype {text[:40]!r}, expected numbers or strings")
        kind = match[2] or match[4]
        size = int(match[3] or match[5])
        if (kind, size) not in _SIZES and kind not in "SU":
            raise InvalidInputError(f"found dtype {text[:40]!r}, which does not exist")
        self.dtype = np.dtype(f"{match[1] or '<'}{kind}{size}" if kind + str(size) != "b1" else "?")
        if kind in "iufc":
            self.plain_itemsize = size

    def build(self, state: Any) -> None:
        """Set the byte order; reject structured dtypes."""
        if not isinstance(state, tuple) or len(state) < 8 or any(part is not None for part in state[2:5]):
            raise InvalidInputError("found a structured dtype, expected plain numbers")
        if not isinstance(state[1], str) or state[1] not in ("<", ">", "|", "="):
            raise InvalidInputError("found a dtype without a byte order")
        if self.dtype is not None and state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class PickledArray(PickledValue):
    """A numpy.ndarray; its state is (version, shape, dtype, is_fortran, data)."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | list[Any] | None = None

    def build(self, state: Any) -> None:
        """Make the array, or for dtype object a list."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise InvalidInputError("found an ndarray whose state is not (version, shape, dtype, order, data)")
        if type(state) is tuple and type(state[-3]) is PickledDtype:
            pickled = state[-3]
            if pickled.plain_itemsize and pickled.dtype is not None:
                self.array = plain_array(state, pickled.dtype, pickled.plain_itemsize)
                if self.array is not None:
                    return
        shape, dtype, fortran, data = state[-4:]
        shape = checked_shape(shape)
        if not isinstance(dtype, PickledDtype):
            raise InvalidInputError("found an ndarray without a dtype")
        if dtype.dtype is None:
            self.array = _object_list(shape, data)
            return
        if isinstance(data, str):
            data = _encode_latin1(data)
        if not isinstance(data, _BUFFERS):
            raise InvalidInputError(f"found ndarray data of type {type(data).__name__}, expected bytes")
        self.array = make_array(data, dtype.dtype, shape, "F" if fortran else "C")

    def resolve(self) -> Any:
        """Return the array."""
        if self.array is None:
            raise InvalidInputError("found an ndarray that was never filled")
        return self.array


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of non-negative integers."""
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, _SEQUENCES) or len(shape) > MAX_NDIM:
        raise InvalidInputError("found a shape that is not a tuple of integers")
    for n in shape:
        if type(n) is not int or n < 0:
            raise InvalidInputError("found a shape with a value that is not a non-negative integer")
    return shape if type(shape) is tuple else tuple(shape)


def make_array(data: Any, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    """Return a read-only array over `data`, whose length must match the shape exactly."""
    needed = math.prod(shape) * dtype.itemsize
    view = memoryview(data)
    if needed != view.nbytes:
        raise InvalidInputError(
            f"an array of shape {shape} and dtype {dtype} needs {needed:,} bytes, found {view.nbytes:,}"
        )
    if needed == 0 and (dtype.itemsize == 0 or max(shape, default=0) > MAX_EMPTY_AXIS):
        raise InvalidInputError(f"found an empty array of shape {shape}")
    if needed == 0:
        return np.empty(shape, dtype)
    if dtype.kind == "U" and (np.frombuffer(data, dtype.str[0] + "u4") > 0x10FFFF).any():
        raise InvalidInputError("found text with a code point beyond Unicode")
    array = np.ndarray(shape, dtype, data, 0, None, order)  # type: ignore[arg-type]
    if not view.readonly:
        array.flags.writeable = False
    return array


def _object_list(shape: tuple[int, ...], data: Any) -> list[Any]:
    """Return the items of an object array as a list; rows of several axes as nested lists."""
    if not isinstance(data, list) or len(data) != math.prod(shape) or len(shape) > 2:
        raise InvalidInputError("found an object array, expected at most two axes and as many items")
    if len(shape) < 2:
        return list(data)
    return [data[begin : begin + shape[1]] for begin in range(0, len(data), shape[1])] if shape[1] else []


def _encode_latin1(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise InvalidInputError("found bytes written as text beyond latin1") from None


def _dtype(args: tuple[Any, ...]) -> PickledDtype:
    if not args or not isinstance(args[0], str):
        raise InvalidInputError("found a numpy.dtype whose argument is not a string")
    return PickledDtype(args[0])


def _reconstruct(args: tuple[Any, ...]) -> PickledArray:
    if len(args) != 3 or args[0] is not NDARRAY:
        raise InvalidInputError("found _reconstruct with a class other than numpy.ndarray")
    return PickledArray()


def _scalar(args: tuple[Any, ...]) -> Any:
    if len(args) != 2 or not isinstance(args[0], PickledDtype) or args[0].dtype is None:
        raise InvalidInputError("found a numpy scalar without a plain dtype")
    data = _encode_latin1(args[1]) if isinstance(args[1], str) else args[1]
    if not isinstance(data, _BUFFERS):
        raise InvalidInputError("found a numpy scalar without bytes")
    return make_array(data, args[0].dtype, (), "C")[()]


def _from_buffer(args: tuple[Any, ...]) -> PickledArray:
    if len(args) != 4 or not isinstance(args[1], PickledDtype) or args[1].dtype is None or args[3] not in ("C", "F"):
        raise InvalidInputError("found _frombuffer whose arguments are not (bytes, dtype, shape, order)")
    if not isinstance(args[0], _BUFFERS):
        raise InvalidInputError("found an array whose bytes are not in the file")
    pickled = PickledArray()
    pickled.array = make_array(args[0], args[1].dtype, checked_shape(args[2]), args[3])
    return pickled


def _encode(args: tuple[Any, ...]) -> bytes:
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise InvalidInputError("found _codecs.encode with a codec other than latin1")
    return _encode_latin1(args[0])


def _empty(kind: Callable[[], Any], refusal: str, args: tuple[Any, ...]) -> Any:
    """Return a value of a kind that is made of nothing, or of an empty list."""
    if args and not (len(args) == 1 and isinstance(args[0], list) and not args[0]):
        raise InvalidInputError(refusal)
    return kind()


_ordered_dict = partial(_empty, dict, "found an OrderedDict made from values")
_empty_bytes = partial(_empty, bytes, "found bytes() of a value, expected empty bytes")


OBJECT, NDARRAY = SafeClass("builtins.object"), SafeClass("numpy.ndarray")

GLOBALS: dict[tuple[str, str], SafeGlobal] = {
    ("numpy", "ndarray"): NDARRAY,
    **functions("numpy", dtype=_dtype),
    **functions("_codecs", encode=_encode),
    ("collections", "OrderedDict"): SafeFunction("collections.OrderedDict", _ordered_dict, is_class=True),
}
for _module in ("builtins", "__builtin__"):  # Python 3 and 2
    GLOBALS[_module, "object"] = OBJECT
    GLOBALS[_module, "bytes"] = SafeFunction("bytes", _empty_bytes)
for _module in ("numpy.core", "numpy._core"):  # NumPy 1 and 2
    GLOBALS |= functions(f"{_module}.multiarray", _reconstruct=_reconstruct, scalar=_scalar)
    GLOBALS |= functions(f"{_module}.numeric", _frombuffer=_from_buffer)
