"""Rows of a table: nested dicts, and the rows of one trace that hold a layer or a token each."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Unit
from tracestore.ingest.containers.grouping import units_of
from tracestore.ingest.containers.keys import ID_KEYS, parse_key
from tracestore.ingest.layouts.values import STATES, array_of, set_arrays

_LAYER_COLUMNS = ("layer", "layer_idx", "layer_index", "layer_id", "layer_number")
_TOKEN_COLUMNS = ("position", "pos", "token_position", "token_pos", "token_index", "token_idx")
_TOKEN_IDS = ("token_id", "input_id")
_DIMENSION = re.compile(r"(?:.*[^\d])?(\d+)")
# Columns with numbers that begin alike make a vector from this number on.
MIN_DIMENSIONS = 8


def units_of_rows(rows: Iterator[dict[str, Any]]) -> Iterator[Unit]:
    """Yield a unit for each trace of a table: one row, or consecutive rows of one id with a layer or token each.

    Raises
    ------
    InvalidInputError
        If two rows of a trace hold the same layer and token, or tokens between its first and last one are missing.
    """
    pending: list[dict[str, Any]] = []
    name: Any = None
    for row in rows:
        fields = _fields(row)
        is_part = bool(_numbers(fields))
        key = _id(fields) if is_part else None
        if pending and (key is None or key != name):
            yield Unit(_joined(pending), is_trace=True)
            pending = []
        if key is None:
            yield Unit(_joined([fields]) if is_part else fields, is_trace=True)
        else:
            pending.append(fields)
            name = key
    if pending:
        yield Unit(_joined(pending), is_trace=True)


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row by the names of the schema."""
    if not any(_is_state(key) for key in row):
        row = _without_nesting(_with_vector(row))
    units = list(units_of({key: value for key, value in row.items() if value is not None}))
    if len(units) != 1 or units[0].trace:
        return row
    return units[0].fields


def _is_state(key: str) -> bool:
    parsed = parse_key(key)
    return parsed is not None and parsed.field in ("hidden_states", "last_token") and not parsed.trace


def _without_nesting(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which layers, and the states of a model's output, are no longer in a nested dict."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        inner = value if isinstance(value, Mapping) and all(isinstance(k, str) for k in value) else {}
        if inner and all(_is_state(f"{key}/{k}") for k in inner):
            flat |= {f"{key}/{k}": layer for k, layer in inner.items()}
        elif any(_is_state(k) for k in inner):
            flat |= inner
        else:
            flat[key] = value
    return flat


def _with_vector(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which columns of numbers such as dim_0, dim_1 and so on are one vector."""
    groups: dict[str, dict[int, str]] = {}
    for key, value in row.items():
        match = _DIMENSION.fullmatch(key)
        if match and isinstance(value, int | float) and not isinstance(value, bool):
            groups.setdefault(key[: match.start(1)], {})[int(match[1])] = key
    groups = {prefix: names for prefix, names in groups.items() if len(names) >= MIN_DIMENSIONS}
    if len(groups) != 1:
        return row
    names = next(iter(groups.values()))
    numbers = sorted(names)
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[0] not in (0, 1):
        return row
    rest = {key: value for key, value in row.items() if key not in names.values()}
    return rest | {"hidden_states": [row[names[n]] for n in numbers]}


def _numbers(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that number the layer and the token of a row."""
    found = [next((n for n in names if type(fields.get(n)) is int), None) for names in (_LAYER_COLUMNS, _TOKEN_COLUMNS)]
    return tuple(name for name in found if name is not None) if "hidden_states" in fields else ()


def _id(fields: Mapping[str, Any]) -> Any:
    key = next((key for key in ID_KEYS if isinstance(fields.get(key), str | int)), None)
    return None if key is None else (fields[key], fields.get("sample"))


def _joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a trace from its rows."""
    for row in rows:
        set_arrays(row)
    columns = _numbers(rows[0])
    by_layer = next((c for c in columns if c in _LAYER_COLUMNS), None)
    by_token = next((c for c in columns if c in _TOKEN_COLUMNS), None)
    first = next(iter(rows[0]["hidden_states"].values())) if isinstance(rows[0]["hidden_states"], dict) else None
    first = rows[0]["hidden_states"] if first is None else first
    if getattr(first, "ndim", 0) > 2:
        by_layer = None  # of something else
    if by_token is not None and (len(rows) == 1 or getattr(first, "ndim", 0) != 1):
        by_token = None  # the position of the only token, or of something else
    if by_layer is None and by_token is None:
        if len(rows) > 1:
            raise InvalidInputError(f"found {len(rows)} rows of one id, expected a vector per token", field=columns[0])
        return rows[0]
    cells: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        place = (row[by_layer] if by_layer else 0, row[by_token] if by_token else 0)
        if place in cells:
            names = " and ".join(filter(None, (by_layer, by_token)))
            raise InvalidInputError(f"found two rows of one id with the same {names}", field=names)
        cells[place] = row
    layers, tokens = sorted({n for n, _ in cells}), sorted({n for _, n in cells})
    if len(cells) != len(layers) * len(tokens) or tokens != list(range(tokens[0], tokens[0] + len(tokens))):
        raise InvalidInputError(
            f"found {len(rows)} rows with tokens {str(tokens)[:60]}, expected each token of each layer",
            field=by_token or by_layer,
        )
    fields = _common(rows)
    of_tokens = [cells[layers[0], n] for n in tokens]
    if by_token:
        key = next((k for k in (*_TOKEN_IDS, "tokens") if k in rows[0]), None)
        if key is not None:
            fields.pop(key, None)
            fields["tokens"] = [row[key] for row in of_tokens]
        if isinstance(rows[0].get("token"), str):
            fields.pop("token", None)
            fields["tokens_decoded"] = [row["token"] for row in of_tokens]
    if by_layer:
        fields["hidden_states"] = {
            n: _stacked([cells[n, t]["hidden_states"] for t in tokens], is_one=not by_token) for n in layers
        }
    elif isinstance(rows[0]["hidden_states"], dict):
        numbers = rows[0]["hidden_states"]
        fields["hidden_states"] = {n: _stacked([row["hidden_states"][n] for row in of_tokens]) for n in numbers}
    else:
        fields["hidden_states"] = {0: _stacked([row["hidden_states"] for row in of_tokens])}
    return fields


def _stacked(values: list[Any], *, is_one: bool = False) -> Any:
    return array_of(values[0]) if is_one else np.stack(values)


def _common(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values that all rows of a trace share, and lists of other ones, without the numbers of the rows."""
    skipped = {*STATES, *_LAYER_COLUMNS, *_TOKEN_COLUMNS}
    return {
        key: value if all(_same(row.get(key), value) for row in rows) else [row.get(key) for row in rows]
        for key, value in rows[0].items()
        if key not in skipped
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    return bool(one == other)
