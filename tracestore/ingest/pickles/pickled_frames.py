"""Frames of pandas in pickles, as columns: pandas is not needed, and nothing of it is called."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.pickled_values import PickledArray, PickledValue, SafeFunction, SafeGlobal, functions

_SLICE = re.compile(r"slice\((\d+), (\d+), (\d+)\)")
_MAX_COLUMNS = 1 << 16
# What the pickles of frames call, besides classes.
_FUNCTIONS = ("_unpickle_block", "_new_Index", "__pyx_unpickle_NDArrayBacked")
_ADVICE = "write it with to_parquet(), a series with to_frame().to_parquet(), and convert that file"


class PandasObject(PickledValue):
    """An object of a class of pandas: its arguments and its state.

    Attributes
    ----------
    full_name, name : str
        Name of the class with and without its module.
    args : tuple
        Arguments of the call that makes it.
    state : Any
        State that the opcode BUILD sets.
    """

    __slots__ = ("args", "full_name", "name", "state")

    def __init__(self, full_name: str, args: tuple[Any, ...]) -> None:
        self.full_name, self.name = full_name, full_name.rpartition(".")[2]
        self.args = args
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Set the state."""
        self.state = state

    def values(self) -> dict[str, Sequence[Any]] | Sequence[Any]:
        """Return the columns of a frame by name, or another object as a list of values.

        Raises
        ------
        InvalidInputError
            If the object has another structure than those that pandas 2 and 3 write.
        """
        try:
            return _columns(self) if self.name == "DataFrame" else _values(self)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError):
            raise InvalidInputError(f"found an object of {self.full_name} of another structure; {_ADVICE}") from None


def pandas_class(module: str, name: str) -> SafeGlobal | None:
    """Return the stand-in of a class of pandas, or of what pickles of frames call; None for other names.

    Its objects keep their arguments: nothing is called.
    """
    if module.partition(".")[0] != "pandas" or not (name[:1].isupper() or name in _FUNCTIONS):
        return None
    full_name = f"{module}.{name}"
    return SafeFunction(full_name, lambda args: PandasObject(full_name, args), is_class=True)


def _columns(frame: PandasObject) -> dict[str, Sequence[Any]]:
    """Return the columns of a frame by name, and before them those of its index."""
    blocks, (columns, index) = frame.state["_mgr"].args
    names = _values(columns)
    if len(names) > _MAX_COLUMNS or not all(isinstance(name, str | int | np.integer) for name in names):
        raise ValueError
    found: dict[int, Sequence[Any]] = {}
    for values, placement in (block.args[:2] for block in blocks):
        places = _places(placement)
        items = _values(values)
        is_rows = isinstance(values, PickledArray) or (isinstance(items, np.ndarray) and items.ndim == 2)
        if not is_rows and len(places) != 1:
            raise ValueError
        found |= dict(zip(places, items if is_rows else [items], strict=True))
    if sorted(found) != list(range(len(names))):
        raise ValueError
    named = {str(name): found[k] for k, name in enumerate(names)}
    count = len(next(iter(named.values()), ()))
    named = _index_columns(index, count, set(named)) | named
    if len({len(column) for column in named.values()}) > 1 or len(named) == 0:
        raise ValueError
    return named


def _places(placement: Any) -> list[int]:
    """Return the numbers of the columns of a block."""
    if isinstance(placement, str):
        match = _SLICE.fullmatch(placement)
        if match is None:
            raise ValueError
        numbers = range(*map(int, match.groups()))
        if len(numbers) > _MAX_COLUMNS:
            raise ValueError
        return list(numbers)
    return [int(n) for n in placement.resolve()]


def _index_columns(index: Any, count: int, names: set[str]) -> dict[str, Sequence[Any]]:
    """Return the columns of an index, by their names; none of an index that counts the rows.

    Texts without a name are ids.
    """
    kind, fields = index.args
    if kind.name.endswith(".RangeIndex"):
        return {}
    values = _values(index)
    name = fields.get("name")
    if len(values) != count:
        raise ValueError
    if isinstance(name, str):
        return {name: values}
    is_texts = all(isinstance(value, str) for value in values)
    return {"question_id": values} if is_texts and "question_id" not in names else {}


def _values(value: Any) -> Sequence[Any]:
    """Return the items of an array, index or extension array."""
    items: Sequence[Any] = value.resolve() if isinstance(value, PickledArray) else value
    if isinstance(items, list | np.ndarray):
        return items
    if not isinstance(value, PandasObject):
        raise ValueError
    if value.name == "_new_Index":
        return _values(value.args[1]["data"])
    state = value.state
    if isinstance(state, dict) and "_pa_array" in state:
        return _values(state["_pa_array"])
    if isinstance(state, tuple):
        arrays = [part for part in state if isinstance(part, PickledArray)]
        others = [part.state for part in state if isinstance(part, PandasObject) and isinstance(part.state, dict)]
        if len(arrays) == 1 and not any("categories" in other for other in others):
            return _values(arrays[0])
    raise ValueError


# Arrays of texts of pyarrow, which pandas 3 uses


def _restore_array(args: tuple[Any, ...]) -> list[str | None]:
    """Return the texts of an array of pyarrow: type, length, number of nulls, offset, buffers, ..."""
    data = args[0] if len(args) == 1 else args
    if not isinstance(data, tuple) or len(data) < 5 or data[0] not in _OFFSETS or not isinstance(data[4], list):
        raise InvalidInputError(f"found an array of pyarrow that holds no texts; {_ADVICE}")
    kind, length, _, begin, buffers = data[:5]
    if len(buffers) != 3 or any(type(n) is not int or n < 0 for n in (length, begin)):
        raise InvalidInputError("found an array of pyarrow without buffers")
    return _texts_of_arrow(_OFFSETS[kind], length, begin, buffers)


def _texts_of_arrow(dtype: np.dtype, length: int, begin: int, buffers: list[Any]) -> list[str | None]:
    """Return the texts of the buffers of validity, offsets and bytes."""
    valid, offsets, text = (b if isinstance(b, bytes | bytearray | memoryview) else b"" for b in buffers)
    end = begin + length
    if length == 0:
        return []
    if (end + 1) * dtype.itemsize > len(offsets) or (buffers[0] is not None and end > 8 * len(valid)):
        raise InvalidInputError("found an array of pyarrow with too few bytes")
    ends = np.frombuffer(offsets, dtype, end + 1)[begin:]
    if (np.diff(ends) < 0).any() or ends[0] < 0 or ends[-1] > len(text):
        raise InvalidInputError("found an array of pyarrow with texts outside of its bytes")
    is_valid = np.ones(end, bool)
    if buffers[0] is not None:
        is_valid = np.unpackbits(np.frombuffer(valid, "u1"), bitorder="little")[:end].astype(bool)
    try:
        return [
            str(bytes(text[ends[k] : ends[k + 1]]), "utf-8") if is_valid[begin + k] else None for k in range(length)
        ]
    except UnicodeDecodeError:
        raise InvalidInputError("found texts of pyarrow that are not UTF-8") from None


def _chunked_array(args: tuple[Any, ...]) -> list[Any]:
    if not args or not isinstance(args[0], list) or not all(isinstance(chunk, list) for chunk in args[0]):
        raise InvalidInputError(f"found an array of pyarrow that holds no texts; {_ADVICE}")
    return [item for chunk in args[0] for item in chunk]


def _only(args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or not isinstance(args[0], bytes | bytearray | memoryview | str):
        raise InvalidInputError("found bytes of pyarrow with other arguments than their own")
    return args[0]


def _bytes(args: tuple[Any, ...]) -> bytes:
    if len(args) != 1 or not isinstance(args[0], bytes):
        raise InvalidInputError("found builtins.bytearray of something else than bytes")
    return args[0]


_OFFSETS: dict[str, np.dtype[Any]] = {"string": np.dtype("<i4"), "large_string": np.dtype("<i8")}
GLOBALS = functions("pyarrow.lib", _restore_array=_restore_array, chunked_array=_chunked_array)
GLOBALS |= functions("pyarrow.lib", type_for_alias=_only, py_buffer=_only) | functions("builtins", bytearray=_bytes)
