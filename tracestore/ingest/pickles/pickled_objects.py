"""Values of the standard library, objects of unknown classes, outputs of transformers and frames of pandas, as plain data.

A class of a file is never imported. What its pickle holds is read like a dict or list; an object that has no
value as data (a cache, a configuration, an enumeration) is a PickledObject, which no field of a store accepts. Neither
pandas nor pyarrow is needed.
"""

import datetime
import re
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.pickled_values import PickledArray, PickledValue, SafeClass, SafeFunction, SafeGlobal

# Modules whose names are refused unless they are in a table: a file of data has no other use for them.
_KNOWN_MODULES = frozenset(
    (*sys.stdlib_module_names, "__builtin__", "commands", "copy_reg", "distutils", "imp", "lib2to3", "nt", "popen2")
)
_LIBRARIES = frozenset(("numpy", "torch", "torch_geometric", "tracestore"))
# Also the outputs of tokenizers, which hold their dict as the attribute "data".
_MODEL_OUTPUT = re.compile(r"[A-Za-z0-9_]*Output[A-Za-z0-9_]*|Batch(?:Encoding|Feature)")
_MAX_NAME = 200
_MAX_RANGE = 4096  # a longer range is kept as text
_OFFSETS: dict[str, np.dtype[Any]] = {"string": np.dtype("<i4"), "large_string": np.dtype("<i8")}
_SLICE = re.compile(r"slice\((\d+), (\d+), (\d+)\)")
_MAX_COLUMNS = 1 << 16
# What the pickles of frames call, besides classes.
_FUNCTIONS = ("_unpickle_block", "_new_Index", "__pyx_unpickle_NDArrayBacked")
_ADVICE = "write it with to_parquet(), a series with to_frame().to_parquet(), and convert that file"


class PickledObject(PickledValue):
    """An object of a class that is not known, as data: its attributes and the items of a dict.

    Attributes
    ----------
    name : str
        Module and name of the class.
    fields : dict[str, Any]
        Attributes and items with a name.
    args : tuple
        Values without a name, such as those of a namedtuple.
    """

    __slots__ = ("args", "fields", "name")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.fields: dict[str, Any] = {}

    def build(self, state: Any) -> None:
        """Add the attributes in a state: a dict, or for a class with slots a pair of dicts."""
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if type(part) is dict:
                self.fields |= {k: v for k, v in part.items() if isinstance(k, str)}

    def add_items(self, items: list[Any]) -> None:
        """Add keys and values of a subclass of dict: key, value, key, value."""
        pairs = zip(items[::2], items[1::2], strict=True)
        self.fields |= {k: v for k, v in pairs if isinstance(k, str)}

    def plain(self) -> Any:
        """Return the object as a text if it has one, else the object."""
        number = self.fields.get("int") if self.name == "uuid.UUID" else None
        if type(number) is not int or not 0 <= number < 1 << 128:
            return self
        from uuid import UUID  # few pickles hold one

        return str(UUID(int=number))


class PickledDict(PickledObject):
    """An output of transformers: a dict, whose attributes repeat its items."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Add the attributes if there are no items."""
        if not self.fields:
            is_user_dict = type(state) is dict and type(state.get("data")) is dict
            super().build(state["data"] if is_user_dict else state)


class UnknownClass(SafeGlobal):
    """A name outside of the standard library and of the libraries whose data are read."""

    def __init__(self, name: str) -> None:
        self.name = name[:_MAX_NAME]

    def call(self, args: tuple[Any, ...]) -> PickledObject:
        """Return an object with the items of dicts among the arguments: nothing is called."""
        made = PickledObject(self.name)
        for part in args:
            if type(part) is dict:
                made.build(part)
        return made

    def new(self, args: tuple[Any, ...]) -> PickledObject:
        """Return an object with the values of a tuple, or without fields, which the opcode BUILD fills."""
        return PickledObject(self.name, args)


class _ModelOutput(UnknownClass):
    """A class of outputs of transformers, whose items follow the call."""

    def call(self, args: tuple[Any, ...]) -> PickledObject:
        return PickledDict(self.name)

    def new(self, args: tuple[Any, ...]) -> PickledObject:
        return PickledDict(self.name, args)


def unknown_class(module: str, name: str) -> UnknownClass | None:
    """Return the stand-in of a name that no table has; None if it is refused."""
    package = module.partition(".")[0]
    if not package.isidentifier() or not package.isascii() or not all(map(str.isidentifier, name.split("."))):
        return None
    if (package in _KNOWN_MODULES and package != "__main__") or package in _LIBRARIES:
        return None
    if package in ("transformers", "transformers_modules") and _MODEL_OUTPUT.fullmatch(name):
        return _ModelOutput(f"{module}.{name}")
    return UnknownClass(f"{module}.{name}")


def _checked(name: str, kinds: tuple[type, ...], read: Callable[..., Any]) -> SafeFunction:
    """Return the stand-in of a class of arguments of some types; `read` returns its value or raises ValueError."""

    def call(args: tuple[Any, ...]) -> Any:
        try:
            if not all(isinstance(part, kinds) and type(part) is not bool for part in args):
                raise ValueError
            return read(*args)
        except (ValueError, TypeError, OverflowError, struct.error):
            raise InvalidInputError(f"found {name} with other arguments than its own") from None

    return SafeFunction(name, call, is_class=True)


def _range(*numbers: int) -> Any:
    found = range(*numbers)
    return list(found) if len(found) <= _MAX_RANGE else str(found)


def _datetime(data: bytes, zone: str | PickledObject | None = None) -> str:
    year, month, day, hour, minute, second, high, low = struct.unpack(">H6BH", data)
    moment = datetime.datetime(year, month & 127, day, hour, minute, second, high << 16 | low)
    return moment.isoformat() + (zone if isinstance(zone, str) else "")


def _timezone(offset: float, name: str = "") -> str:
    """Return the offset as isoformat() writes it."""
    if not abs(offset) < 86400:
        raise ValueError
    minutes = round(offset / 60)
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"


def _restore_array(*args: Any) -> list[str | None]:
    """Return the texts of an array of pyarrow, which pandas 3 uses: type, length, number of nulls, offset, buffers, ..."""
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


def _chunked_array(chunks: Any, *_: Any) -> list[Any]:
    if not isinstance(chunks, list) or not all(isinstance(chunk, list) for chunk in chunks):
        raise InvalidInputError(f"found an array of pyarrow that holds no texts; {_ADVICE}")
    return [item for chunk in chunks for item in chunk]


_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_LISTS, _ZONES = (list, tuple), (bytes, str, PickledObject, type(None))
_BYTES = (bytes, bytearray, memoryview, str)
# The types of the arguments of a class, and how they become a plain value, by module and name.
_VALUES: dict[str, dict[str, tuple[tuple[type, ...], Callable[..., Any]]]] = {
    "datetime": {
        "datetime": (_ZONES, _datetime),
        "date": ((bytes,), lambda data: datetime.date(*struct.unpack(">HBB", data)).isoformat()),
        "timedelta": ((int,), lambda d, s, us: datetime.timedelta(d, s, us).total_seconds()),
        "timezone": ((float, str), _timezone),
    },
    "decimal": {"Decimal": ((str,), lambda text: text)},
    "collections": {
        "deque": ((*_LISTS, int, type(None)), lambda items=(), _=None: [*items]),
        "Counter": ((dict,), lambda counts: dict(counts)),
        "defaultdict": ((SafeGlobal, type(None)), lambda _: {}),
    },
    "builtins": {
        "set": (_LISTS, lambda items=(): [*items]),
        "frozenset": (_LISTS, lambda items=(): [*items]),
        "range": ((int,), _range),
        "slice": ((int, type(None)), lambda begin, end, step: str(slice(begin, end, step))),
        "bytearray": ((bytes,), lambda data: data),
        "complex": ((float, int), lambda real, imaginary: np.array(complex(real, imaginary), "<c16")),
    },
    "pyarrow.lib": {
        "_restore_array": ((object,), _restore_array),
        "chunked_array": ((object,), _chunked_array),
        **dict.fromkeys(("type_for_alias", "py_buffer"), (_BYTES, lambda data: data)),
    },
    "pathlib": dict.fromkeys(_PATHS, ((str,), lambda *parts: "/".join(part.rstrip("/") for part in parts) or ".")),
}
_VALUES |= {"__builtin__": _VALUES["builtins"], "pathlib._local": _VALUES["pathlib"]}  # Python 2, Python 3.13
_FACTORIES = ("list", "dict", "int", "float", "str", "tuple", "bool")  # of defaultdict
_NAMESPACES = (("types", "SimpleNamespace"), ("argparse", "Namespace"))
_OBJECTS = (*_NAMESPACES, ("uuid", "UUID"), ("torch.utils.data.dataset", "TensorDataset"))
GLOBALS: dict[tuple[str, str], SafeGlobal] = {
    (module, name): _checked(f"{module}.{name}", *found)
    for module, readers in _VALUES.items()
    for name, found in readers.items()
}
GLOBALS |= {key: UnknownClass(".".join(key)) for key in _OBJECTS}
GLOBALS |= {
    (module, name): SafeClass(f"{module}.{name}") for module in ("builtins", "__builtin__") for name in _FACTORIES
}


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
