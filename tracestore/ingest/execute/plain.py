"""Plain values of the tree: keys as text, numbers, JSON below texts, and values in a few words."""

import json
import math
import unicodedata
from collections.abc import Container, Mapping
from typing import Any

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.layout.addresses import ItemValue
from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.tree import Array, Group, Items, ListItems, MappingGroup, Value, array_value, as_array

_MAX_INTEGER_FLOAT = 2.0**53


def item_value(item: Value, value_of: ItemValue) -> Value:
    """Return what an item says at a path, None if it says nothing."""
    value = item
    for part in value_of.path:
        name = Pattern(part).literal or part
        if isinstance(value, Group):
            found = value.get(name)
            value = value.get(int(name)) if found is None and name.lstrip("-").isdecimal() else found
        elif isinstance(value, Items) and not value.is_stream and name.lstrip("-").isdecimal():
            k, count = int(name), value.length or 0
            value = value[k % count] if -count <= k < count else None
        else:
            return None
    if isinstance(value, float) and math.isnan(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else _scalar(value)


def _scalar(value: Value) -> Value:
    array = as_array(value)
    if array is None or math.prod(array.shape) != 1:
        return None
    number: bool | int | float = array.read().reshape(-1)[0].item()
    return number


def rows_of(value: Items | Array) -> Any:
    """Return the items of a list, or of an array along its first axis."""
    if isinstance(value, Items):
        return value
    return ListItems(range(value.shape[0]), lambda k: array_value(value.read((k,))))


def columns_of(value: Group, names: Container[str], where: str, source: str) -> dict[Any, Items | Array]:
    """Return the lists of a mapping that are as long as those of the names, which are the columns of one table.

    Raises
    ------
    InvalidInputError
        If the mapping has no such list, or several of different lengths.
    """
    lists = {key: found for key in value if isinstance(found := value[key], Items | Array)}
    sizes = {key: _length(found) for key, found in lists.items()}
    named = {key: size for key, size in sizes.items() if str(key) in names}
    if len(set(named.values())) != 1 or None in named.values():
        found = ", ".join(f"{key} of {size}" for key, size in named.items())
        what = f"lists of different lengths: {found}" if found else f"{describe(value)}, and none is a named list"
        raise InvalidInputError(f"{where}: found a mapping with {what}; rows are items of a list", source=source)
    size = next(iter(named.values()))
    return {key: found for key, found in lists.items() if sizes[key] == size}


def table_of(columns: Mapping[Any, Items | Array]) -> Items:
    """Return lists of one length as the rows of a table."""
    rows = {key: rows_of(column) for key, column in columns.items()}
    size = len(next(iter(rows.values())))
    return ListItems(
        range(size), lambda k: MappingGroup({key: (rows[key], k) for key in rows}, lambda at: at[0][at[1]])
    )


def _length(value: Items | Array) -> int | None:
    return value.shape[0] if isinstance(value, Array) else None if value.is_stream else value.length


def key_text(value: Any) -> str:
    """Return a key as text: NFC, stripped; integral floats below 2**53 as integers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_INTEGER_FLOAT:
        value = int(value)
    return unicodedata.normalize("NFC", str(value).strip())


def number(value: Any, name: str) -> int:
    """Return the number that a name binds; raise InvalidInputError if the value is none."""
    text = key_text(value)
    if not (text.isascii() and text.lstrip("-").isdecimal()):
        raise InvalidInputError(f"found {escape_unprintable(text, 40)!r}, expected the number of a {name}")
    return int(text)


def json_value(text: str, field: str, source: str | None = None) -> Value:
    """Return a text of JSON as a value of the tree; it parses whole, or is refused."""
    try:
        return plain_value(json.loads(text))
    except (ValueError, RecursionError):
        shown = escape_unprintable(text, 40)
        raise InvalidInputError(f"found the text {shown!r}, which is no JSON", source=source, field=field) from None


def plain_value(value: Any) -> Value:
    """Return a value of JSON as a value of the tree."""
    if isinstance(value, dict):
        return MappingGroup(value, plain_value)
    return ListItems(value, plain_value) if isinstance(value, list) else value


def plain_of(value: Value) -> Any:
    """Return a value as lists, dicts, texts and numbers."""
    if isinstance(value, Group):
        return {str(key): plain_of(value[key]) for key in value}
    if isinstance(value, Items):
        return [plain_of(item) for item in value]
    return value.read().tolist() if isinstance(value, Array) else value


def describe(value: Value) -> str:
    """Return a value in a few words."""
    if isinstance(value, Array):
        return f"an array {value.shape}"
    if isinstance(value, Group):
        return f"a mapping of {', '.join(str(key)[:20] for key in list(value)[:4]) or 'nothing'}"
    if isinstance(value, Items):
        return f"{value.length if value.length is not None else 'some'} items"
    return f"{type(value).__name__} {escape_unprintable(str(value), 40)!r}" if value is not None else "no value"
