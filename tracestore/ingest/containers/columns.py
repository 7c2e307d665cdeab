"""Arrays of a container, which are read whole or trace by trace."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.npz import RowStream
from tracestore.store.io.scratch import Scratch

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
    """A C-contiguous array that is inflated from front to back."""

    def __init__(self, rows: RowStream) -> None:
        self._rows = rows
        self.shape, self.dtype = rows.shape, rows.dtype

    def whole(self) -> np.ndarray:
        """Inflate the array."""
        return self._rows.whole()

    def part(self, axis: int, begin: int, end: int) -> np.ndarray:
        """Inflate rows, from the beginning if a later one was read before; of the second axis, the whole array once."""
        if axis:
            part: np.ndarray = self._rows.kept()[_index(axis, begin, end)]
            return part
        return self._rows.part(begin, end)


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
