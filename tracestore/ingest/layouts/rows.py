"""Rows of a table: one per trace, or several of one trace that hold a layer, a token or a number each."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Arena, Unit
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.containers.keys import ID_KEYS, ID_NAME, OF_TOKENS, is_state_name, locate
from tracestore.ingest.layouts.array_names import WEAK, is_list_of_floats, with_vector
from tracestore.ingest.layouts.parts import Part, Place, is_same, join_parts
from tracestore.ingest.layouts.values import STATES, array_of, set_arrays
from tracestore.ingest.roles.keys import OTHER_NAMES
from tracestore.store.format import schema

_NUMBER = r"(?:_?(?:idx|index|id|no|num|number))?"
_LAYER = re.compile(rf"(?:hidden_?|model_?)?(?:layers?|lyr|blocks?){_NUMBER}", re.IGNORECASE)
_TOKEN = re.compile(
    r"(?:tok(?:en)?|word|gen(?:eration)?|decod(?:e|ing)|time)_?(?:position|pos|idx|index|no|num|number|step)"
    r"|seq(?:uence)?_?pos(?:ition)?|pos(?:ition)?|(?:time)?step|t",
    re.IGNORECASE,
)
# Names of the number of an answer to a question, in rows with the text of an answer.
_SAMPLE = re.compile(r"(?:gen(?:eration)?|completion|rollout|attempt)_?(?:idx|index|no|num|number)", re.IGNORECASE)
_ANSWERS = frozenset((*schema.ANSWER_FIELDS, *OTHER_NAMES["generated_answer"]))
_DIM = re.compile(rf"(?:dim(?:ension)?|neuron|feature|feat|unit|channel|component|hidden_?dim){_NUMBER}", re.IGNORECASE)
_VALUE = re.compile(r"values?|val|activations?|act|x", re.IGNORECASE)
# Texts that tell the rows of different traces apart where no id does.
_QUESTIONS = ("prompt", "question", "query", "statement", "text", "sentence", "input")
# Ids that may number the rows of a table.
_COUNTERS = ("id", "uid", "idx", "index")
_TOKEN_IDS = ("token_id", "input_id", "tok_id", "tokens", "token", "tok")
_TOKEN_TEXTS = ("token", "tok", "token_text", "token_str", "word", "piece", "text", "tokens")
# Names of arrays that are no states.
_OTHERS = re.compile(
    r".*(?:logit|prob|score|att(?:ention|n)|entrop|rank|grad|shape|dtype|mask|span|label).*", re.IGNORECASE
)
_MAX_CELLS = 10_000_000
Row = dict[str, Any]


class Coordinates(NamedTuple):
    """The columns that place a row in a trace: id, layer, token and dimension; None for missing ones."""

    id: str | None = None
    layer: str | None = None
    token: str | None = None
    dim: str | None = None

    @property
    def names(self) -> set[str]:
        """Names of the columns that number a part of a trace."""
        return {name for name in self[1:] if name is not None}


def units_of_rows(
    rows: Iterator[Row],
    reopen: Callable[[list[str]], Iterator[Row]],
    arena: Arena,
) -> Iterator[Unit]:
    """Yield a unit for each trace of a table: one row, or the rows of one id with a layer, token or number each.

    Parameters
    ----------
    rows : iterator of dict
        The rows.
    reopen : callable
        Return the rows once more, with at least the named columns.
    arena : Arena
        Memory for the arrays of rows that do not follow each other.

    Raises
    ------
    InvalidInputError
        If two rows of a trace hold the same layer and token, or tokens between its first and last one are missing.
    """
    first = next(rows, None)
    if first is None:
        return
    columns = coordinates_of(_fields(first))
    if not columns.names:
        for row in chain([first], rows):
            yield Unit(_fields(row), is_trace=True)
        return
    order = _order(reopen([name for name in columns if name is not None]), columns)
    found = (_fields(row) for row in chain([first], rows))
    if order == "rows":
        groups: Iterable[list[Row]] = ([row] for row in found)
    elif order == "groups":
        groups = (list(group) for _, group in groupby(found, lambda row: _key(row, columns)))
    else:
        groups = _gathered(found, columns, arena)
    for group in groups:
        yield Unit(joined(group, columns), is_trace=True)


def coordinates_of(row: Mapping[str, Any]) -> Coordinates:
    """Return the columns that place a row in a trace."""
    numbers = [name for name, value in row.items() if type(value) is int]
    layer, token, dim = (_first(numbers, pattern) for pattern in (_LAYER, _TOKEN, _DIM))
    if token is None and layer is not None and "token" in numbers:
        token = "token"
    if "hidden_states" not in row or _shape(row)[:-2] not in ((), (1,)):
        return Coordinates()  # such as the layers and tokens of a trace in each row, and the step of a training
    if dim is not None and not isinstance(row["hidden_states"], float | int):
        dim = None
    key = id_column(row, {layer, token, dim})
    if key is None:
        key = next((name for name in _QUESTIONS if isinstance(row.get(name), str)), None)
    if (
        token is None
        and dim is None
        and layer is None
        and key is not None
        and _has_token(row)
        and len(_shape(row)) == 1
    ):
        token = ""  # the order of the rows
    return Coordinates(key, layer, token, dim)


def has_dimension(names: list[str]) -> bool:
    """Return whether a table with these columns has a number in each row: a layer or token, a dimension and a value."""
    found = [_first(names, pattern) for pattern in (_DIM, _VALUE)]
    return None not in found and any(_first(names, pattern) for pattern in (_LAYER, _TOKEN))


def id_column(row: Mapping[str, Any], others: set[str | None] | None = None) -> str | None:
    """Return the column of the id of a trace, whose rows may have a counter of their own; None without one."""
    texts = [name for name, v in row.items() if isinstance(v, str | int) and not isinstance(v, bool) and v != ""]
    texts = [name for name in texts if name not in (others or ())]
    named = next((name for name in ID_KEYS if name in texts and name not in _COUNTERS), None)
    found = [name for name in texts if ID_NAME.fullmatch(name)]
    counter = next((name for name in _COUNTERS if name in texts), None)
    return named or (found[0] if len(found) == 1 or not counter else counter) if found or named else counter


def _first(names: Iterable[str], pattern: re.Pattern[str]) -> str | None:
    return next((name for name in names if pattern.fullmatch(name)), None)


def _has_token(row: Mapping[str, Any]) -> bool:
    return any(isinstance(row.get(name), str) for name in ("token", "tok", "token_text", "token_str", "word"))


def _shape(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the states of a row, or of its first layer; () if they are no array."""
    hidden = row["hidden_states"]
    hidden = next(iter(hidden.values()), None) if isinstance(hidden, Mapping) else hidden
    return getattr(array_of(hidden), "shape", ())


def _key(row: Mapping[str, Any], columns: Coordinates) -> tuple[Any, Any]:
    return (None if columns.id is None else row.get(columns.id)), (
        row.get("sample") if columns.id != "sample" else None
    )


def _order(rows: Iterator[Row], columns: Coordinates) -> str:
    """Return "groups" if the rows of a trace follow each other, "apart" if not, "rows" if each row is a trace."""
    finished: set[Any] = set()
    cells: set[Any] = set()
    last: Any = None
    is_apart = False
    for row in rows:
        key = _key(row, columns)
        if columns.id is None:
            cell = tuple(row.get(name) for name in columns[1:] if name)
            if cell in cells or len(cells) > _MAX_CELLS:
                return "rows"
            cells.add(cell)
        elif key != last:
            is_apart = is_apart or key in finished
            finished.add(key)
            last = key
    if columns.id is None and columns.token and columns.layer is None:
        tokens = sorted(cell[0] for cell in cells if type(cell[0]) is int)
        return "groups" if tokens and tokens == list(range(tokens[0], tokens[0] + len(cells))) else "rows"
    return "apart" if is_apart else "groups"


def _gathered(rows: Iterator[Row], columns: Coordinates, arena: Arena) -> Iterator[list[Row]]:
    """Yield the rows of each trace, which do not follow each other, in the order of their first rows."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        set_arrays(row)
        groups.setdefault(_key(row, columns), []).append(arena.kept(row))
    for key in list(groups):
        yield groups.pop(key)


def _fields(row: Row) -> Row:
    """Return the fields of a row by the names of the schema."""
    for key, value in row.items():
        if isinstance(value, str) and _LAYER.fullmatch(key) and (number := _layer_number(value)) is not None:
            row = row | {key: number}
    sample = _first((key for key, value in row.items() if type(value) is int), _SAMPLE)
    if sample is not None and "sample" not in row and has_answer(row):
        row = {("sample" if key == sample else key): value for key, value in row.items()}
    if not any(is_state_name(key) for key in row):
        row = with_states(_without_nesting(with_vector(row)))
    units = list(units_of({key: value for key, value in row.items() if value is not None}))
    if len(units) != 1 or units[0].trace:
        return row
    return units[0].fields


def has_answer(row: Mapping[str, Any]) -> bool:
    """Return whether a row has the text of an answer."""
    return any(isinstance(row.get(name), str) for name in _ANSWERS)


def _layer_number(text: str) -> int | None:
    """Return the number of a layer by its name, such as model.layers.3; None for another text."""
    key = locate(text)
    if key is not None and key.is_layer and not key.trace:
        return key.number
    match = re.fullmatch(r"[a-z]{0,2}(\d{1,4})", text, re.IGNORECASE)
    return None if match is None else int(match[1])


def with_states(row: Row) -> Row:
    """Return a row in which the only array has the name hidden_states, if its name or the columns next to it tell that."""
    if any(is_state_name(key) for key in row):
        return row
    arrays = [k for k, v in row.items() if is_list_of_floats(v) and not _OTHERS.fullmatch(k) and locate(k) is None]
    weak = [key for key in arrays if WEAK.fullmatch(key)]
    numbers = [key for key, value in row.items() if type(value) is int]
    is_part = any(_first(numbers, pattern) for pattern in (_LAYER, _TOKEN)) or (_has_token(row) and bool(arrays))
    name = weak[0] if len(weak) == 1 else arrays[0] if len(arrays) == 1 and is_part else None
    if name is None and not arrays and is_part:
        data = [key for key, value in row.items() if isinstance(value, bytes | bytearray | memoryview)]
        name = data[0] if len(data) == 1 else None
    if name is None and not arrays and _first(numbers, _DIM):
        values = [key for key, value in row.items() if isinstance(value, float) and _VALUE.fullmatch(key)]
        name = values[0] if len(values) == 1 else None
    if name is None:
        return row
    return {("hidden_states" if key == name else key): value for key, value in row.items()}


def _without_nesting(row: Row) -> Row:
    """Return a row in which layers, and the states of a model's output, are no longer in a nested dict."""
    flat: Row = {}
    for key, value in row.items():
        inner = value if isinstance(value, Mapping) and all(isinstance(k, str) for k in value) else {}
        if inner and all(is_state_name(f"{key}/{k}") for k in inner):
            flat |= {f"{key}/{k}": layer for k, layer in inner.items()}
        elif any(is_state_name(k) for k in inner):
            flat |= inner
        else:
            flat[key] = value
    return flat


def joined(rows: list[Row], columns: Coordinates) -> Row:
    """Return the fields of a trace from its rows.

    Raises
    ------
    InvalidInputError
        If the rows do not hold each token of each layer once.
    """
    if columns.dim is not None:
        rows, columns = _with_dimensions(rows, columns), columns._replace(dim=None)
    for row in rows:
        set_arrays(row)
        if columns.layer and getattr(row["hidden_states"], "ndim", 0) == 3 and len(row["hidden_states"]) == 1:
            row["hidden_states"] = row["hidden_states"][0]
    hidden = rows[0]["hidden_states"]
    first = next(iter(hidden.values())) if isinstance(hidden, dict) else hidden
    by_layer, by_token = columns.layer, columns.token
    ndim = getattr(first, "ndim", 0)
    if ndim > 2:
        by_layer = None  # of something else
    shapes = {np.shape(row["hidden_states"]) for row in rows} if ndim == 2 and not isinstance(hidden, dict) else set()
    is_all_layers = ndim == 2 and by_layer is None and len(shapes) == 1 and len(rows) > 1
    if by_token is not None and (len(rows) == 1 or not (ndim == 1 or is_all_layers or _are_single(shapes))):
        by_token = None  # the position of the only token, or of something else
    if by_layer is None and by_token is None:
        if len(rows) > 1:
            name = columns.token or columns.layer
            raise InvalidInputError(f"found {len(rows)} rows of one id, expected a vector per token", field=name)
        return _with_id(rows[0], columns)
    numbers: list[tuple[Any, Any]] = [
        (row[by_layer] if by_layer else 0, row[by_token] if by_token else k if by_token == "" else None)
        for k, row in enumerate(rows)
    ]
    parts = []
    for (layer, token), row in zip(numbers, rows, strict=True):
        states = row["hidden_states"]
        layers = {layer: states}
        if by_layer is None and (isinstance(states, dict) or is_all_layers):
            layers = states if isinstance(states, dict) else dict(enumerate(states))
        parts += [Part("", Place(layer=number, token=token), value) for number, value in layers.items()]
    found = join_parts(parts)[""]["hidden_states"]
    fields = _common(rows, columns)
    if by_token is not None:
        first = sorted((token, k) for k, (layer, token) in enumerate(numbers) if layer == min(numbers)[0])
        fields |= _of_tokens([rows[k] for _, k in first], fields, columns)
    fields["hidden_states"] = found if min(found) >= 0 else list(found.values())
    return _with_id(fields, columns)


def _are_single(shapes: set[tuple[int, ...]]) -> bool:
    return bool(shapes) and all(shape[:-1] == (1,) for shape in shapes)


def _with_id(fields: Row, columns: Coordinates) -> Row:
    if columns.id in _QUESTIONS:
        return fields
    if columns.id is not None and columns.id not in ID_KEYS:
        fields["question_id"] = fields.pop(columns.id, None)
    elif columns.id is not None and columns.id != "question_id":
        fields = {"question_id": fields.get(columns.id)} | {k: v for k, v in fields.items() if k not in ID_KEYS}
    return fields


def _with_dimensions(rows: list[Row], columns: Coordinates) -> list[Row]:
    """Return the rows with a vector each of rows with a number each.

    Raises
    ------
    InvalidInputError
        If a dimension is missing or appears twice.
    """
    places: dict[Any, dict[int, Row]] = {}
    for row in rows:
        place = tuple(row.get(name) for name in (columns.layer, columns.token) if name)
        inner = places.setdefault(place, {})
        if row[columns.dim] in inner:  # type: ignore[index]
            raise InvalidInputError("found two rows of one id with the same dimension", field=columns.dim)
        inner[row[columns.dim]] = row  # type: ignore[index]
    found = []
    for inner in places.values():
        numbers = sorted(inner)
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise InvalidInputError(f"found dimensions {str(numbers)[:60]}, expected each of them", field=columns.dim)
        vector = np.array([inner[n]["hidden_states"] for n in numbers], "<f4")
        found.append({k: v for k, v in inner[numbers[0]].items() if k != columns.dim} | {"hidden_states": vector})
    return found


def _of_tokens(rows: list[Row], fields: Row, columns: Coordinates) -> Row:
    """Return the values per token of rows of one token each, and remove their columns from `fields`."""
    found: Row = {}
    for name, keys, kind in (("tokens", _TOKEN_IDS, int), ("tokens_decoded", _TOKEN_TEXTS, str)):
        key = next((k for k in keys if isinstance(_item(rows[0].get(k)), kind) and k not in columns), None)
        if key is not None:
            fields.pop(key, None)
            found[name] = [_item(row[key]) for row in rows]
    for key, name in OF_TOKENS.items():
        if isinstance(rows[0].get(key), float | int):
            fields.pop(key, None)
            found[name] = [row.get(key) for row in rows]
    return found


def _item(value: Any) -> Any:
    """Return the only item of an array or list, and any other value unchanged."""
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        return value.reshape(-1)[0].item()
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _common(rows: list[Row], columns: Coordinates) -> Row:
    """Return the values that all rows of a trace share, and lists of other ones, without the numbers of the rows."""
    skipped = {*STATES, *columns.names, *(_COUNTERS if columns.id not in _COUNTERS else ())}
    return {
        key: value if all(is_same(row.get(key), value) for row in rows) else [row.get(key) for row in rows]
        for key, value in rows[0].items()
        if key not in skipped
    }
