"""Look at the values of a file: the first items of everything, a bounded number of values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from tracestore.ingest.execute.values import key_text
from tracestore.ingest.readers.text import json_tree
from tracestore.ingest.readers.tree import Array, Group, Items, Value

MAX_ITEMS = 12  # items of a list that are looked at
_MAX_KEYS = 96
_MAX_VALUES = 4096  # numbers or texts of one axis that are kept
_MAX_DEPTH = 12
_MAX_TEXT = 1 << 20
_KINDS = {"f": "f", "i": "i", "u": "i", "b": "b"}


@dataclass(frozen=True)
class Seen:
    """The part of a value that was seen.

    Attributes
    ----------
    kind : str
        "f", "i", "b": numbers; "s": texts; "v": bits without a type; "map"; "list": items that are no array;
        "none".
    dims : tuple of int or None
        Extents; None where they differ between the items of one value.
    value : Any
        A scalar, or the values along one axis; None if they were not read.
    keys : Mapping
        Values by key of a map, attributes as "@name".
    items : tuple
        The first items of a list.
    """

    kind: str
    dims: tuple[int | None, ...] = ()
    value: Any = None
    keys: Mapping[Any, "Seen"] = field(default_factory=dict)
    items: tuple["Seen", ...] = ()


def look(value: Value, depth: int = 0) -> Seen:
    """Return what a look at a value shows."""
    if value is None or depth > _MAX_DEPTH:
        return Seen("none")
    if isinstance(value, str):
        return _text(value, depth)
    if isinstance(value, bool | int | float):
        return Seen(_kind_of_scalars([value]), value=value)
    attributes = {f"@{key}": look(found, depth + 1) for key, found in islice(value.attributes.items(), _MAX_KEYS)}
    if isinstance(value, Group):
        keys = {key: look(value[key], depth + 1) for key in islice(value, _MAX_KEYS)}
        return Seen("map", keys=keys | attributes)
    return replace(_array(value) if isinstance(value, Array) else _items(value, depth), keys=attributes)


def _text(value: str, depth: int) -> Seen:
    if value[:1] in ("[", "{") and len(value) <= _MAX_TEXT:
        with suppress(ValueError, RecursionError):
            seen = look(json_tree(json.loads(value)), depth + 1)
            if (seen.dims and seen.kind in "fib") or seen.kind == "map":
                return seen
    return Seen("s", value=value)


def _array(array: Array) -> Seen:
    kind = "f" if array.dtype == "bfloat16" else _KINDS.get(array.dtype[:1], "v")
    is_read = array.ndim == 1 and kind != "v" and array.shape[0] <= _MAX_VALUES
    return Seen(kind, array.shape, array.read().tolist() if is_read else None)


def _items(items: Items, depth: int) -> Seen:
    """Return items of numbers, arrays or texts as one array; others as a list."""
    count = items.length
    first: list[Value] = []
    for item in items:
        if len(first) == (_MAX_VALUES if _is_scalar(item) else MAX_ITEMS):
            break
        first.append(item)
    else:
        count = len(first)
    if first and all(map(_is_scalar, first)) and (kind := _kind_of_scalars(first)):
        return Seen(kind, (count,), first if count == len(first) else None)
    # Of a short list every item counts, of a long one those at both ends.
    looked = first[:MAX_ITEMS]
    if not items.is_stream and count is not None and count > MAX_ITEMS:
        looked = [*first[: MAX_ITEMS - 2], items[count // 2], items[count - 1]]
    seen = tuple(look(item, depth + 1) for item in looked)
    if len({(one.kind, len(one.dims)) for one in seen}) == 1 and seen[0].dims and seen[0].kind in "fibsv":
        columns = zip(*(one.dims for one in seen), strict=True)
        merged = tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in columns)
        return Seen(seen[0].kind, (count, *merged), items=seen)
    return Seen("list", (count,), items=seen)


def _is_scalar(value: Value) -> bool:
    return value is None or isinstance(value, str | int | float)


def _kind_of_scalars(values: Sequence[Value]) -> str:
    """Return the kind of texts or numbers, "" for both among each other."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds or (str in kinds and len(kinds) > 1):
        return ""
    return "s" if str in kinds else "f" if float in kinds else "b" if kinds == {bool} else "i"


def texts_of(values: Iterable[Any]) -> list[str]:
    """Return scalars as texts, as keys are compared."""
    return [key_text(value) for value in values if value is not None and not isinstance(value, np.ndarray)]
