"""Values of a trace that are no arrays: keys as text, numbers, JSON below texts, labels and scores."""

import contextlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.layout.addresses import ItemsStep, ItemValue
from tracestore.ingest.layout.fields import LABELS, MISSING_WORD, STATES, rule_of, score_of
from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.readers.text import json_tree
from tracestore.ingest.readers.tree import Array, Group, Items, ListItems, MappingGroup, Value, array_value, as_array
from tracestore.store.format.labels import HALLUCINATION
from tracestore.store.vocabulary import FIELDS, WORDS
from tracestore.store.write import field_values

_MAX_INTEGER_FLOAT = 2.0**53
# Words that follow the field.
_RELATIVE = {**dict.fromkeys(("yes", "true", "1", "1.0"), 1.0), **dict.fromkeys(("no", "false", "0", "0.0"), 0.0)}
_ROUNDED = ", which a float of this size rounds: write integers or texts"
_NUMBER, _MAX_TEXT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"), 4 << 20
_MAX_PROBES = 64
_MISSING = ("", "nan", "none", "null", "na", "n/a", "-")


def item_value(item: Value, value_of: ItemValue) -> Value:
    """Return what an item says at a path, None if it says nothing."""
    is_itself = value_of.path == ("",) and isinstance(item, str | int)
    value = item if is_itself else member(item, (Pattern(part).literal or part for part in value_of.path))
    if value is None or isinstance(value, str | int | float | bool):
        return None if value != value else value  # NaN
    array = as_array(value)
    if array is None or math.prod(array.shape) != 1 or array.dtype == "uint8":  # a byte
        return None
    number: bool | int | float = array.read().reshape(-1)[0].item()
    return number


def member(value: Value, path: Iterable[str]) -> Value:
    """Return the value at a path of keys and numbers of members, None if there is none."""
    for name in path:
        k = int(name) if name.lstrip("-").isdecimal() else None
        if isinstance(value, Group):
            found = value.get(name)
            value = value.get(k) if found is None and k is not None else found
        elif isinstance(value, Items) and not value.is_stream and k is not None:
            count = value.length or 0
            value = value[k % count] if -count <= k < count else None
        else:
            return None
    return value


def rows_of(value: Items | Array) -> Items:
    """Return the items of a list, or of an array along its first axis."""
    if isinstance(value, Items):
        return value
    return ListItems(range(value.shape[0]), lambda k: array_value(value.read((k,))))


def table_of(
    value: Group, names: Container[str], steps: Iterable[ItemsStep], where: str, source: str
) -> tuple[Items, set[Any]]:
    """Return the rows of the lists of a mapping that are as long as those of the names, and the keys of these lists.

    The items are told apart by what `steps` say.

    Raises
    ------
    InvalidInputError
        If the mapping has no such list, or several of different lengths.
    """
    lists = {key: rows_of(found) for key in value if isinstance(found := value[key], Items | Array)}
    sizes = {key: None if rows.is_stream else rows.length for key, rows in lists.items()}
    wanted = {key: size for key, size in sizes.items() if str(key) in names}
    if len(set(wanted.values())) != 1 or None in wanted.values():
        found = ", ".join(f"{key} of {size}" for key, size in wanted.items())
        what = f"lists of different lengths: {found}" if found else f"{describe(value)}, and none is a named list"
        raise InvalidInputError(f"{where}: found a mapping with {what}; rows are items of a list", source=source)
    joining = {column for step in steps for column in step.columns}
    for key in wanted:
        if str(key) in joining:
            check_ids_exact(value[key])
    size = next(iter(wanted.values()))
    columns = {key: key for key in lists if sizes[key] == size}
    return ListItems(range(size or 0), lambda k: MappingGroup(columns, lambda key: lists[key][k])), set(columns)


def key_text(value: Any) -> str:
    """Return a key as text: NFC, stripped; integral floats below 2**53 as integers."""
    if type(value) is str and value.isascii():
        return value.strip()
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_INTEGER_FLOAT:
        value = int(value)
    return unicodedata.normalize("NFC", str(value).strip())


def id_text(value: Any) -> str:
    """Return an id as text; raise InvalidInputError for a truth value, for NaN and for a rounded number."""
    is_rounded = isinstance(value, float) and abs(value) >= _MAX_INTEGER_FLOAT
    if type(value) is bool or value != value or is_rounded:
        raise InvalidInputError(f"found {value}, expected an id{_ROUNDED * is_rounded}", field="question_id")
    return key_text(value)


def check_ids_exact(value: Value) -> None:
    """Refuse an array of ids that its dtype has rounded: it cannot tell them from their neighbors."""
    ids = value.read() if isinstance(value, Array) else np.zeros(0)
    rounded = ids[abs(ids) >= 2.0 ** (np.finfo(ids.dtype).nmant + 1)] if ids.dtype.kind == "f" else ids[:0]
    if rounded.size:
        raise InvalidInputError(f"found {rounded[0]:g} as {ids.dtype}, expected an id{_ROUNDED}", field="question_id")


def number(value: Any, name: str) -> int:
    """Return the number that a name binds; raise InvalidInputError if the value is none."""
    text = key_text(value)
    if not (text.isascii() and text.lstrip("-").isdecimal()):
        raise InvalidInputError(f"found {escape_unprintable(text, 40)!r}, expected the number of a {name}")
    return int(text)


def number_of(text: str, field: str) -> int | float:
    """Return the number that a text holds; a text of something else is refused."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if "_" not in text:  # no part of a number outside Python
                return kind(text)
    raise InvalidInputError(f"found {escape_unprintable(text, 40)!r}, expected a number", field=field)


def json_value(text: str, field: str, source: str | None = None) -> Value:
    """Return a text of JSON as a value of the tree; it parses whole, or is refused."""
    try:
        return json_tree(json.loads(text))
    except (ValueError, RecursionError):
        hint = f"; shape.{field} and dtype.{field} read base64" if field in STATES else ""
        found = f"found the text {escape_unprintable(text, 40)!r}, which is no JSON{hint}"
        raise InvalidInputError(found, source=source, field=field) from None


def array_value_of(text: str, field: str) -> Value:
    """Return an array that a text of a table holds: JSON, or numbers with blanks between them, as NumPy prints a vector."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    words = inner.split() if len(text) <= _MAX_TEXT and len(text.strip()) - len(inner) in (0, 2) else []
    if len(words) > 1 and all(map(_NUMBER.fullmatch, words)):
        return ListItems([number_of(word, field) for word in words], lambda item: item)
    return json_value(text, field)


def list_value(text: str, axis: str, field: str, source: str) -> Items:
    """Return the list that a text is in JSON; raise InvalidInputError for other texts, and for an empty list."""
    value = json_value(text, field, source)
    if not isinstance(value, Items) or not value.length:
        raise InvalidInputError(f"found {describe(value)}, expected a list along {axis}", field=field, source=source)
    return value


def plain_of(
    value: Value,
    of_array: Callable[[Array], Any] = lambda array: array.read().tolist(),
    of_key: Callable[[Any], Any] = str,
) -> Any:
    """Return a value as lists, dicts, texts and numbers; `of_array` returns what stands for an array, `of_key` for a key."""
    if isinstance(value, Group):
        return {of_key(key): plain_of(value[key], of_array, of_key) for key in value}
    if isinstance(value, Items):
        return [plain_of(item, of_array, of_key) for item in value]
    return of_array(value) if isinstance(value, Array) else value


def one_value(value: Value, name: str) -> Any:
    """Return a text, number or None; refuse a list, mapping or array."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise InvalidInputError(f"found {describe(value)}, expected one value per trace", field=name)


def named(names: Iterable[str], values: Iterable[Any]) -> str:
    """Return names and their values for a message, without those of wildcards."""
    return ", ".join(f"{name} {value!s:.60}" for name, value in zip(names, values, strict=True) if name[0] != "*")


def describe(value: Value) -> str:
    """Return a value in a few words."""
    if isinstance(value, Array):
        return f"an array {value.shape}"
    if isinstance(value, Group):
        return f"a mapping of {', '.join(str(key)[:20] for key in list(value)[:4]) or 'nothing'}"
    if isinstance(value, Items):
        return f"{value.length if value.length is not None else 'some'} items"
    return f"{type(value).__name__} {escape_unprintable(str(value), 40)!r}" if value is not None else "no value"


def typed_value(name: str, value: Any) -> Any:
    """Return a value as the type of its field, None for a missing text; tables hold texts."""
    rule = rule_of(name)
    kind = None if rule is None else rule.kind
    if name == "spans":
        return field_values.spans_of_labels(value) or value
    if kind == "text" and not isinstance(value, str):
        return None if value != value else key_text(value)  # pandas has NaN for None
    if kind == "number" and isinstance(value, str):
        return number_of(value, name)
    if kind == "number" and isinstance(value, float) and value.is_integer() and name != "temperature":
        return int(value)
    return value


def group_text(value: Any) -> str:
    """Return a group as text, "" where it is missing: a table has a word such as nan for an empty cell."""
    text = "" if value is None else key_text(value)
    return "" if text.casefold() in _MISSING else text


def verdict_value(value: Any, name: str, direction: str, words: Mapping[str, bool | str] | None) -> float:
    """Return a label or score, NaN where it is missing; without `words`, keys of the schema are those of `create`."""
    score = score_of(name)
    if words is None and score in FIELDS:
        of_schema = field_values.label_value if name == "label" else field_values.score_value
        known = None if value is None else of_schema(value, score)
        return math.nan if known is None else known
    value = one_value(value, name)
    return label_value(value, name, direction, words or {}) if name in LABELS else score_value(value, name)


def label_value(value: Any, name: str, direction: str, words: Mapping[str, bool | str]) -> float:
    """Return a label in the direction of its field, NaN where it is missing (rule 22a).

    Parameters
    ----------
    value : Any
        0, 1, a bool, a word, or None.
    name : str
        The field.
    direction : str
        What 1 means.
    words : Mapping
        Further words and numbers, whose truth is that of the field; "missing" for no label.

    Raises
    ------
    InvalidInputError
        If the value is another one.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    text = " ".join(key_text(value).split())
    if words and (stated := _stated(value, text, words)) is not None:
        return math.nan if stated == MISSING_WORD else float(stated)
    word, expected = text.casefold(), "0, 1 or a known word"
    if type(value) is not bool and _number(text) in (0, 1) and (other := _other_number(words)) is not None:
        expected = f"a line for each number, as for {other}"
    elif word in _MISSING:
        return math.nan
    elif word in _RELATIVE:
        return _RELATIVE[word]
    elif word in WORDS:
        return float(WORDS[word] == (direction != HALLUCINATION))
    shown = escape_unprintable(text, 40)
    lines = " or ".join(f'words."{shown}" = {meaning}' for meaning in ("true", "false", f'"{MISSING_WORD}"'))
    raise InvalidInputError(f"found {shown!r}, expected {expected}; {lines} states its meaning", field=name)


def _other_number(words: Mapping[str, bool | str]) -> str | None:
    """Return a number outside [0, 1] that is correct or not: then 0 and 1 may be other degrees than the field's."""
    found = ((word, _number(word)) for word, truth in words.items() if type(truth) is bool)
    return next((word for word, number in found if number is not None and not 0 <= number <= 1), None)


def _stated(value: Any, text: str, words: Mapping[str, bool | str]) -> bool | str | None:
    """Return what a value stands for, None if no line states it; 1, 1.0 and True are one number, True and true one word."""
    if text in words:
        return words[text]
    number, folded = float(value) if type(value) is bool else _number(text), text.casefold()
    same = [truth for word, truth in words.items() if number is not None and _number(word) == number]
    if folded in _RELATIVE or folded in WORDS:
        same += [truth for word, truth in words.items() if word.casefold() == folded]
    return next(iter(same), None)


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def score_value(value: Any, name: str) -> float:
    """Return a named score as a finite number, NaN where it is missing."""
    text = "" if value is None else str(value).strip().casefold()
    if text in _MISSING:
        return math.nan
    try:
        number = math.inf if "_" in text else float(value)
    except (ValueError, OverflowError):
        number = _RELATIVE.get(text, math.inf)
    if math.isinf(number):
        found = escape_unprintable(str(value).strip(), 40)
        raise InvalidInputError(f"found {found!r}, expected a finite number, a known word or an empty cell", field=name)
    return number


def is_missing(value: Value) -> bool:
    """Return whether a value is None, or nested items of None alone, as layers that were not kept."""
    if isinstance(value, Items) and not value.is_stream and value.length:
        return all(is_missing(value[k]) for k in range(value.length))
    return value is None


def settled(value: Any) -> Any:
    """Return a value that can be read more than once."""
    return ListItems(list(value), lambda item: item) if isinstance(value, Items) and value.is_stream else value


def holds_array(value: Value, levels: int = 4) -> bool:
    """Return whether a value is an array of numbers, or holds one in the first values of as many levels."""
    if isinstance(value, Array):
        return True
    if levels >= 0 and isinstance(value, Group):
        return any(holds_array(value[key], levels - 1) for _, key in zip(range(_MAX_PROBES), value, strict=False))
    if levels >= 0 and isinstance(value, Items) and not value.is_stream and value.length:
        return as_array(value) is not None or holds_array(value[0], levels - 1)
    return False
