"""Plain values of the tree: keys as text, numbers, JSON below texts, and values in a few words."""

import json
import math
import unicodedata
from typing import Any

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.layout.addresses import ItemValue
from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.tree import Array, Group, Items, ListItems, MappingGroup, Value, as_array

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
