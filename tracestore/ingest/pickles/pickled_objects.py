"""Values of the standard library, objects of unknown classes, and the outputs of transformers, as plain data.

A class of a file is never imported. What its pickle holds is read like a dict or list; an object that has no
value as data (a cache, a configuration, an enumeration) is a PickledObject, which no field of a store accepts.
"""

import datetime
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles.pickled_values import PickledValue, SafeClass, SafeFunction, SafeGlobal

# Modules whose names are refused unless they are in a table: a file of data has no other use for them.
_KNOWN_MODULES = frozenset(
    (*sys.stdlib_module_names, "__builtin__", "commands", "copy_reg", "distutils", "imp", "lib2to3", "nt", "popen2")
)
_LIBRARIES = frozenset(("numpy", "torch", "torch_geometric", "tracestore"))
# Also the outputs of tokenizers, which hold their dict as the attribute "data".
_MODEL_OUTPUT = re.compile(r"[A-Za-z0-9_]*Output[A-Za-z0-9_]*|Batch(?:Encoding|Feature)")
_MAX_NAME = 200
_MAX_RANGE = 4096  # a longer range is kept as text


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


_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_LISTS, _ZONES = (list, tuple), (bytes, str, PickledObject, type(None))
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
        "complex": ((float, int), lambda real, imaginary: np.array(complex(real, imaginary), "<c16")),
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
