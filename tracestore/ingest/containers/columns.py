"""Arrays of a container, which are read whole or trace by trace."""

import ast
import io
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import schema
from tracestore.store.io.scratch import Scratch

# Kinds of dtypes that an array may have: bool, integers, floats, complex numbers, texts.
DTYPE_KINDS = "biufcSU"
NPY_MAGIC = b"\x93NUMPY"
MAX_NPY_HEADER_BYTES = 10_000
_CHUNK_BYTES = 4 << 20
_BLOCK_BYTES = 16 << 20
_MAX_VALUES = 5_000_000


@dataclass
class Input:
    """The files of a source, and memory for its arrays.

    Attributes
    ----------
    path : Path
        The file, or the folder of `parts`.
    name : str
        Name of the source in messages.
    parts : tuple of Path
        Files of a source that consists of several.
    scratch : Scratch
        Memory for large arrays.
    """

    path: Path
    name: str
    parts: tuple[Path, ...]
    scratch: Scratch


@dataclass
class Unit:
    """Fields of one trace, or of several traces stacked along the first axis.

    Attributes
    ----------
    fields : dict[str, Any]
        Columns and plain values by their names in the container.
    trace : str
        Name of the trace in the container; "" if it has none.
    is_trace : bool
        Whether this is certainly one trace.
    is_token_major : bool
        Whether hidden states are (S, L, D), as vLLM writes them.
    is_stack : bool
        Whether the first axis of each array certainly counts traces.
    """

    fields: dict[str, Any]
    trace: str = ""
    is_trace: bool = False
    is_token_major: bool = False
    is_stack: bool = False


class Column:
    """An array in memory or in a mapped file."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape: tuple[int, ...] = array.shape
        self.dtype = array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def whole(self) -> np.ndarray:
        """Return the array."""
        return self._array

    def row(self, k: int) -> np.ndarray:
        """Return row `k`. Rows are requested in ascending order."""
        row: np.ndarray = self.part(0, k, k + 1)[0]
        return row

    def part(self, axis: int, begin: int, end: int) -> np.ndarray:
        """Return the values from `begin` to `end` of an axis, the first or the second."""
        part: np.ndarray = self._array[_index(axis, begin, end)]
        return part


class TableColumn(Column):
    """An array whose values are looked up in a table of 256, such as 8-bit floats."""

    def __init__(self, codes: np.ndarray, table: np.ndarray) -> None:
        super().__init__(codes)
        self._table, self.dtype = table, table.dtype

    def whole(self) -> np.ndarray:
        """Return the array of values."""
        values: np.ndarray = self._table[super().whole()]
        return values

    def part(self, axis: int, begin: int, end: int) -> np.ndarray:
        """Return the values from `begin` to `end` of an axis."""
        values: np.ndarray = self._table[super().part(axis, begin, end)]
        return values


class StreamColumn(Column):
    """A C-contiguous array that is inflated from front to back.

    Parameters
    ----------
    open_values : callable
        Return a stream at the first value.
    """

    def __init__(
        self, open_values: Callable[[], IO[bytes]], shape: tuple[int, ...], dtype: np.dtype, scratch: Scratch
    ) -> None:
        self._open, self._scratch = open_values, scratch
        self.shape, self.dtype = shape, dtype
        self._stream: IO[bytes] | None = None
        self._next = 0
        self._whole: np.ndarray | None = None

    def _read(self, stream: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
        out = self._scratch.empty(shape, self.dtype)
        view, begin = memoryview(out.reshape(-1).view("u1").data), 0
        while begin < len(view):
            chunk = stream.read(min(_CHUNK_BYTES, len(view) - begin))
            if not chunk:
                raise InvalidInputError("truncated: an array ends early")
            view[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        return out

    def whole(self) -> np.ndarray:
        """Inflate the array."""
        with self._open() as stream:
            array = self._read(stream, self.shape)
            if stream.read(1):
                raise InvalidInputError("trailing bytes after an array")
        return array

    def part(self, axis: int, begin: int, end: int) -> np.ndarray:
        """Inflate rows, from the beginning if a later one was read before; of the second axis, the whole array once."""
        if axis:
            self._whole = self.whole() if self._whole is None else self._whole
            part: np.ndarray = self._whole[_index(axis, begin, end)]
            return part
        if self._stream is None or self._next > begin:
            self._stream, self._next = self._open(), 0
        while self._next < begin:
            self._read(self._stream, self.shape[1:])
            self._next += 1
        self._next = end
        return self._read(self._stream, (end - begin, *self.shape[1:]))


class ObjectColumn(Column):
    """Arrays or texts, one per trace, of an array of Python objects."""

    def __init__(self, values: list[Any], shape: tuple[int, ...]) -> None:
        self.values, self.shape, self.dtype = values, shape, np.dtype(object)

    def whole(self) -> Any:
        """Return the values as a list, or the only one of an array without dimensions."""
        return self.values if self.shape else self.values[0]

    def row(self, k: int) -> Any:
        """Return value `k`."""
        return self.values[k]


def _index(axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(begin, end))


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raise InvalidInputError unless a dtype is that of numbers or texts, or of records of them."""
    is_record = dtype.names and all(dtype[n].base.kind in DTYPE_KINDS for n in dtype.names)
    if not is_record and (dtype.kind not in DTYPE_KINDS or dtype.subdtype is not None):
        raise InvalidInputError(f"found dtype {str(dtype)[:60]}, expected numbers or texts", field=name)


def check_array(name: str, shape: tuple[int, ...], dtype: np.dtype, num_bytes: int) -> np.dtype:
    """Return the dtype of an array with these bytes; raise InvalidInputError if they do not fit together.

    Two bytes without a type (`V2`) are what NumPy writes for bfloat16.
    """
    if dtype.hasobject:
        raise InvalidInputError("found Python objects in records; save numbers or texts", field=name)
    if dtype.str.lstrip("<>|") == "V2" and dtype.fields is None:
        dtype = schema.BFLOAT16
    else:
        check_dtype(name, dtype)
    if any(not 0 <= n < 1 << 48 for n in shape) or len(shape) > 8:
        raise InvalidInputError(f"found shape {str(shape)[:60]}", field=name)
    expected = math.prod(shape) * dtype.itemsize
    if expected != num_bytes:
        raise InvalidInputError(f"found {num_bytes:,} bytes, expected {expected:,} for shape {shape}", field=name)
    return dtype


def read_npy_header(head: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether the order is that of Fortran, and dtype of the array that follows in a stream."""
    try:
        version = np.lib.format.read_magic(head)
        length = struct.unpack("<H" if version == (1, 0) else "<I", head.read(2 if version == (1, 0) else 4))[0]
        if version not in ((1, 0), (2, 0), (3, 0)) or length > MAX_NPY_HEADER_BYTES:
            raise ValueError(f"version {version}, header of {length:,} bytes")
        header = ast.literal_eval(head.read(length).decode("latin1").strip())
        shape, order, description = header["shape"], header["fortran_order"], header["descr"]
        if type(order) is not bool or not isinstance(shape, tuple):
            raise ValueError("a wrong header")
        if not isinstance(description, str) and not _is_record(description):
            raise ValueError("a dtype with nested fields")
        if not all(type(n) is int for n in shape):
            raise ValueError("a wrong shape")
        return shape, order, np.dtype(description)
    except (ValueError, TypeError, KeyError, SyntaxError, struct.error, MemoryError, RecursionError) as error:
        raise InvalidInputError(f"not an array of NumPy: {' '.join(str(error).split())[:120]}", field=name) from None


def _is_record(description: Any) -> bool:
    """Return whether the dtype of a header is a list of named dtypes, each with an optional shape."""
    if not isinstance(description, list) or not description:
        return False
    return all(
        isinstance(field, tuple)
        and len(field) in (2, 3)
        and all(isinstance(part, str) for part in field[:2])
        and all(isinstance(part, tuple) and all(type(n) is int and n > 0 for n in part) for part in field[2:])
        for field in description
    )


def array_in_bytes(value: Any) -> np.ndarray | None:
    """Return the array of numbers in the content of a .npy file, a view of its bytes; None for every other value."""
    if not isinstance(value, bytes | bytearray | memoryview) or bytes(value[: len(NPY_MAGIC)]) != NPY_MAGIC:
        return None
    view = memoryview(value).cast("B")
    head = io.BytesIO(bytes(view[: MAX_NPY_HEADER_BYTES + 16]))
    try:
        shape, is_fortran, dtype = read_npy_header(head, "array")
        dtype = check_array("array", shape, dtype, len(view) - head.tell())
    except InvalidInputError:
        return None
    if dtype.kind not in "biuf" and dtype != schema.BFLOAT16:
        return None
    array = np.frombuffer(view[head.tell() :], "u1").view(dtype) if math.prod(shape) else np.empty(0, dtype)
    return array.reshape(shape[::-1]).T if is_fortran else array.reshape(shape)


def whole(value: Any) -> Any:
    """Return the array of a column, also in lists and dicts, and any other value unchanged."""
    if isinstance(value, Column):
        return value.whole()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) and _has_columns(value) else value


def _has_columns(value: list[Any]) -> bool:
    return bool(value) and (isinstance(value[0], Column) or (isinstance(value[0], list) and _has_columns(value[0])))


def plain(value: Any) -> Any:
    """Return a column or array without dimensions as a Python value, texts as str, and other values unchanged."""
    if isinstance(value, Column):
        if value.ndim and value.dtype.kind not in "SU":
            return value
        value = value.whole()
    if isinstance(value, np.ndarray) and value.dtype.kind == "S":
        try:
            value = np.char.decode(value, "utf-8")
        except UnicodeDecodeError:
            raise InvalidInputError("found bytes that are not UTF-8 text") from None
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "biufSU":
        return value.item()
    if isinstance(value, np.generic):
        return value.item()
    return value


class Arena:
    """Copies of arrays behind each other in blocks of scratch memory.

    Parameters
    ----------
    scratch : Scratch
        Memory for the blocks.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch, self._block, self._end, self._num_values = scratch, np.empty(0, "u1"), 0, 0

    def kept(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with copies of its arrays.

        Raises
        ------
        InvalidInputError
            If the other values of all rows are too many for memory.
        """
        self._num_values += len(row)
        if self._num_values > _MAX_VALUES:
            raise InvalidInputError(
                f"found more than {_MAX_VALUES:,} values in rows of traces that do not follow each other; sort the table by id"
            )
        return {key: self._copied(value) for key, value in row.items()}

    def _copied(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._copied(item) for key, item in value.items()}
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            return value
        if self._end + value.nbytes > len(self._block):
            self._block, self._end = self._scratch.empty(max(_BLOCK_BYTES, value.nbytes), "u1"), 0
        begin, self._end = self._end, self._end + -(-value.nbytes // 16) * 16
        copy = self._block[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
        copy[...] = value
        return copy
