"""Group the arrays of a container by trace, field and layer, and take stacked traces apart."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.columns import Column, StreamColumn, Unit, plain
from tracestore.ingest.containers.keys import (
    LENGTHS,
    SPLITS,
    Key,
    column_name,
    layer_kind,
    locate,
    outputs_of_layers,
    split_key,
    without_step,
)
from tracestore.ingest.layouts.array_names import ARRAYS, with_field_names
from tracestore.ingest.layouts.steps import joined_heads, joined_steps

_NUMBERED_NAME = re.compile(r"(.+?)[._/\-]?(\d+)")
_NUMBER_AT_END = re.compile(r"(\d+)$")
_TOKEN_NAMES = ("tokens", "token_ids", "input_ids", "sequences")


def units_of(fields: Mapping[str, Any], **options: bool) -> Iterator[Unit]:
    """Yield a unit for each trace name in the names of `fields`, in natural order; `options` are those of Unit."""
    fields = with_field_names(fields)
    keys = {name: locate(name) for name in fields}
    traces = {key.trace for key in keys.values() if key and key.field in ARRAYS and key.trace}
    groups: dict[str, dict[str, tuple[Key | None, Any]]] = defaultdict(dict)
    for name, value in fields.items():
        key, trace, field = keys[name], "", name
        if key is None or key.field == "tokens":
            trace, field = split_key(name, traces)
            key = locate(field) if trace else key
        if key is not None and not trace:
            trace = key.trace
        groups[trace][field] = (key, value)
    shared = groups.pop("", {}) if len(groups) > 1 else {}
    if any(key and key.field in ARRAYS for key, _ in shared.values()):
        raise InvalidInputError(f"found arrays of named traces and others ({', '.join(list(shared)[:3])[:80]})")
    units = []
    for trace in sorted(groups, key=natural_key):
        for number, group in _by_number(groups[trace]):
            name = trace if number is None else f"{trace}_{number}".strip("_")
            values = {field: value for field, (_, value) in shared.items()} | _fields(group)
            units.append(Unit(values, name, **(options | ({"is_stack": True} if _is_split(name, values) else {}))))
    _divide_shared(units)
    yield from units


def _divide_shared(units: list[Unit]) -> None:
    """Give traces that are numbered without gaps their items of the arrays that have one for each, such as labels."""
    count = len(units)
    numbers = [int(match[1]) for unit in units if (match := _NUMBER_AT_END.search(unit.trace))]
    if count < 2 or numbers not in (list(range(count)), list(range(1, count + 1))):
        return
    for field, value in list(units[0].fields.items()):
        is_one_each = isinstance(value, Column) and value.shape == (count,) and not field.startswith("layer")
        if is_one_each and all(unit.fields.get(field) is value for unit in units):
            for k, unit in enumerate(units):
                unit.fields[field] = plain(np.asarray(value.row(k)))


def _is_split(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether the fields of a split, such as train, have a column as long as the states."""
    states = next((values[field] for field in ("hidden_states", "last_token") if field in values), None)
    return name.lower() in SPLITS and any(
        isinstance(value, Column) and isinstance(states, Column) and value.ndim == 1 and value.shape == states.shape[:1]
        for value in values.values()
    )


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts q2 before q10."""
    return [(1, int(p), p) if p.isdecimal() else (0, 0, p) for p in re.split(r"(\d+)", name)]


def _by_number(group: dict[str, tuple[Key | None, Any]]) -> list[tuple[int | None, dict[str, tuple[Key | None, Any]]]]:
    """Return the groups of the traces that names like hidden_states_3 and tokens_3 number; else one group."""
    numbered = [(key, value) for key, value in group.values() if key is not None and key.number is not None]
    # Ids or a mask of all rows (N, S) show that the arrays (N, S, D) with numbers are layers.
    rows = {v.shape for n, (_, v) in group.items() if n in (*_TOKEN_NAMES, "attention_mask") and isinstance(v, Column)}
    is_trace = any(key.field == "tokens" for key, _ in numbered) or any(
        key.field == "hidden_states" and not key.is_layer and isinstance(value, Column) and _is_stack(value)
        for key, value in numbered
        if not isinstance(value, Column) or value.shape[:2] not in rows
    )
    if not is_trace:
        return [(None, group)]
    found: dict[int, dict[str, tuple[Key | None, Any]]] = defaultdict(dict)
    shared = {}
    for name, (key, value) in group.items():
        match = _NUMBERED_NAME.fullmatch(name)
        if match is None:
            shared[name] = (key, value)
        else:
            found[int(match[2])][match[1]] = (key._replace(number=None) if key else None, value)
    return [(number, shared | found[number]) for number in sorted(found)]


def _is_stack(value: Column) -> bool:
    return value.ndim == 3 and value.shape[0] > 1 and value.shape[1] > 1


def _fields(group: dict[str, tuple[Key | None, Any]]) -> dict[str, Any]:
    """Return fields by name: whole arrays, dicts of arrays by layer, passes of generation, and other values."""
    if any(key is not None and key.step is not None for key, _ in group.values()):
        return _fields_of_steps(group)
    fields: dict[str, Any] = {}
    heads: dict[tuple[str, int | None, str], dict[int, Any]] = defaultdict(dict)
    for key, value in group.values():
        if key is not None and key.head is not None:
            heads[key.field, key.number, key.kind][key.head] = value
    if heads:
        group = {name: item for name, item in group.items() if item[0] is None or item[0].head is None}
        for (field, number, kind), arrays in heads.items():
            group[f"{field}.{number}.heads"] = (Key(field, number, kind=kind), joined_heads(arrays))
    layers: dict[str, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    wholes: dict[str, list[str]] = defaultdict(list)
    for name, (key, value) in group.items():
        if key is None:
            fields[name] = value
        elif key.number is not None:
            layers[key.field][layer_kind(key)][key.number] = value
        else:
            wholes[key.field].append(name)
    for field, names in wholes.items():
        if field in layers:
            raise InvalidInputError(f"found whole ({names[0][:60]}) and by layer, expected one of them", field=field)
        order = {name: k for k, name in enumerate(_TOKEN_NAMES)}
        first, *others = sorted(names, key=lambda n: order.get(n, -1 if n == field else len(order)))
        fields[field] = group[first][1]
        fields |= {name: group[name][1] for name in others}
    for field, kinds in layers.items():
        fields[field] = outputs_of_layers(kinds)
        if len(kinds) > 1:  # a cache of TransformerLens, whose other arrays are not states of a layer
            fields = {name: value for name, value in fields.items() if "hook_" not in name}
    return fields


def _fields_of_steps(group: dict[str, tuple[Key | None, Any]]) -> dict[str, Any]:
    """Return the fields of a trace whose arrays belong to steps of generation, joined; values of no step are kept."""
    steps: dict[int, dict[str, tuple[Key | None, Any]]] = defaultdict(dict)
    others: dict[str, tuple[Key | None, Any]] = {}
    for name, (key, value) in group.items():
        rest, step = without_step(name)
        if step is None:
            others[name] = (key, value)
        else:
            steps[step][rest or name] = (None if key is None else key._replace(step=None), value)
    return _fields(others) | joined_steps({step: _fields(steps[step]) for step in sorted(steps)})


class _SecondAxis(Column):
    """An array whose second axis counts traces."""

    def __init__(self, column: Column) -> None:
        self._column, self.dtype = column, column.dtype
        self.shape = (column.shape[1], column.shape[0], *column.shape[2:])

    def row(self, k: int) -> np.ndarray:
        """Return the values of trace `k`."""
        return self._column.part(1, k, k + 1)[:, 0]


def count_by_axes(unit: Unit, axes: str) -> tuple[int | None, str]:
    """Return the number of stacked traces, None for one trace, and the axes of the states of each, as `--axes` names them.

    Layers that have names are no axis.

    Raises
    ------
    InvalidInputError
        If the states have another number of axes.
    """
    name = next((field for field in ("hidden_states", "last_token") if field in unit.fields), None)
    if name is None:
        return None, axes
    value = unit.fields.pop(name)
    columns = value if isinstance(value, dict) else {0: value}
    letters = axes.replace("L", "") if isinstance(value, dict) else axes
    first = next(iter(columns.values()))
    shape = first.shape if isinstance(first, Column) else np.shape(first)
    if len(shape) == len(letters) - 1:
        letters = letters.replace("N", "")
    if len(shape) != len(letters):
        raise InvalidInputError(f"found shape {shape}, which --axes {axes} does not name", field=name)
    axis = letters.find("N")
    if axis == 1:
        columns = {number: _SecondAxis(column) for number, column in columns.items()}
    unit.fields["hidden_states"] = columns if isinstance(value, dict) else columns[0]
    return (None if axis < 0 else shape[axis]), letters.replace("N", "")


def set_by_axes(values: dict[str, Any], letters: str) -> None:
    """Bring the states of a trace with these axes into the form of the pickle schema."""
    hidden = values.pop("hidden_states")
    if isinstance(hidden, dict):
        values["hidden_states" if "S" in letters else "last_token"] = hidden
    elif "S" not in letters:
        values["last_token"] = hidden.T if letters == "DL" else hidden if "L" in letters else hidden[None]
    else:
        hidden = hidden.transpose(1, 0, 2) if letters == "SLD" else hidden
        values["hidden_states"] = list(hidden) if "L" in letters else [hidden]


def stacked_count(unit: Unit, num_rows: int | None) -> tuple[int | None, str]:
    """Return the number of stacked traces, None for one trace, and what a row of hidden_states is.

    Parameters
    ----------
    unit : Unit
        The fields.
    num_rows : int or None
        Number of rows of a table that belongs to the unit alone.

    Returns
    -------
    count : int or None
        Number of traces.
    kind : str
        "trace"; "layer" for one layer (S, D) of each trace; "last_token" for (L, D), the last token of each layer;
        "sequences" for the same with labels, 1: hallucination.
    """
    fields = unit.fields
    if unit.is_trace:
        return None, "trace" if "hidden_states" in fields else "last_token"
    # A name with a prefix may be that of layers, and a mask that of tokens.
    names = [name for name in fields if column_name(name) == name.lower() and not name.endswith("mask")]
    counts = {fields[name].shape[0] for name in names if _ndim(fields[name]) == 1}
    _check_ids(fields, counts)
    counts |= {num_rows} if num_rows is not None and num_rows > 1 else set()
    hidden, tokens = fields.get("hidden_states"), fields.get("tokens")
    if hidden is None:
        last = fields.get("last_token")
        if last is None and isinstance(tokens, Column) and tokens.ndim == 3 and tokens.dtype.kind == "f":
            fields["last_token"] = fields.pop("tokens")
            return tokens.shape[0], "sequences"  # as in preprocessed_*.pt
        if isinstance(last, dict):
            layer = next(iter(last.values()))
            return (layer.shape[0] if isinstance(layer, Column) and layer.ndim == 2 else None), "last_token"
        if isinstance(last, Column) and (last.ndim == 3 or last.shape[0] in counts):
            return last.shape[0], "last_token"
        return None, "last_token"
    rank = 3 if isinstance(hidden, dict) else 4
    first = next(iter(hidden.values())) if isinstance(hidden, dict) else hidden
    if not isinstance(first, Column):
        return None, "trace"
    if first.dtype.kind == "O" and first.ndim == 1:
        return first.shape[0], "trace"
    tokens = tokens if isinstance(tokens, Column) else fields.get("attention_mask")
    shape, ids = first.shape, tokens.shape if isinstance(tokens, Column) else ()
    if unit.is_stack and not isinstance(hidden, dict) and first.ndim in (2, 3):
        return shape[0], "layer" if len(ids) == 2 and ids == shape[:2] else "last_token"
    if first.ndim == rank == 4 and ids == shape[1:3] and (shape[0] != shape[1] or _is_padded_by_second(first, fields)):
        for name in ("hidden_states", "attentions"):
            column = fields.get(name)
            if isinstance(column, Column) and column.shape[:2] == shape[:2]:
                fields[name] = _SecondAxis(column)
        return shape[1], "trace"
    if first.ndim == rank:
        is_batch_of_one = shape[0] != 1 and shape[1] == 1 and shape[0] not in counts and ids[:1] != shape[:1]
        return (None if is_batch_of_one and rank == 4 else shape[0]), "trace"
    if first.ndim == rank - 1 and shape[0] > 1:
        if rank == 4 and len(ids) == 2 and ids == shape[:2]:
            return shape[0], "layer"
        if shape[0] in counts and len(ids) != 1:
            return shape[0], "last_token"
    if first.ndim == rank - 2 and shape[0] in counts and shape[0] > 1:
        return shape[0], "last_token"
    return None, "trace"


def _is_padded_by_second(states: Column, fields: Mapping[str, Any]) -> bool:
    """Return whether the padding of a mask (N, S) is zero if the second axis of states counts traces, and not the first."""
    mask = fields.get("attention_mask")
    if not isinstance(mask, Column) or isinstance(states, StreamColumn) or states.dtype.kind != "f":
        return False
    padding = mask.whole() == 0
    for k in np.flatnonzero(padding.any(axis=1))[:1].tolist():
        return bool(states.row(k)[:, padding[k]].any()) and not states.part(1, k, k + 1)[:, 0, padding[k]].any()
    return False


def _check_ids(fields: dict[str, Any], counts: set[int]) -> None:
    """Take integers called ids that repeat for the tokens of one trace; refuse those that may be ids of tokens or of traces.

    This concerns states (X, D) by layer. Ids of traces increase, or are next to other values of as many traces.
    """
    ids = fields.get("ids")
    if not isinstance(ids, Column) or ids.ndim != 1 or ids.dtype.kind not in "iu" or "tokens" in fields:
        return
    hidden = fields.get("hidden_states")
    first = next(iter(hidden.values())) if isinstance(hidden, dict) and hidden else None
    if not isinstance(first, Column) or first.ndim != 2 or ids.shape[0] != first.shape[0]:
        return
    values, others = (
        ids.whole(),
        [n for n, v in fields.items() if n != "ids" and _ndim(v) == 1 and v.shape == ids.shape],
    )
    if others or (np.diff(values.astype("i8")) > 0).all():
        return
    if len(np.unique(values)) == len(values):
        raise InvalidInputError(
            f"found {len(values)} integers for states of shape {first.shape}: ids of the tokens of one trace, or of "
            f"{len(values)} traces; choose --map tokens=ids or --map question_id=ids",
            field="ids",
        )
    fields["tokens"] = fields.pop("ids")
    counts.discard(len(values))


def check_one_trace(unit: Unit) -> None:
    """Raise InvalidInputError if states may be those of one trace or the last tokens of several, and nothing tells which.

    Tokens, attention, texts and ids of one trace tell it.
    """
    hidden = unit.fields.get("hidden_states")
    first = next(iter(hidden.values())) if isinstance(hidden, dict) else hidden
    # A name without a number may be that of a data set, whose rows have layers.
    is_named = unit.trace and (re.search(r"\d", unit.trace) or not isinstance(hidden, dict))
    if unit.is_trace or is_named or not isinstance(first, Column):
        return
    if first.ndim != (2 if isinstance(hidden, dict) else 3) or 1 in first.shape[:-1]:
        return
    known = set(unit.fields) - {"hidden_states"}
    if known & {"tokens", "attentions", "attention_mask", "tokens_decoded", "prompt_length", *LENGTHS}:
        return
    if any(column_name(n) and isinstance(plain(unit.fields[n]), str | int) for n in known):
        return
    one, several = ("tokens", "") if isinstance(hidden, dict) else ("layers", "L, ")
    raise InvalidInputError(
        f"found shape {first.shape}, the {first.shape[0]} {one} of one trace, or the last tokens ({several}D) of "
        f"{first.shape[0]} traces; for one trace --map hidden_states=hidden_states, for several "
        "--map last_token=hidden_states",
        field="hidden_states",
    )


def _ndim(value: Any) -> int:
    return value.ndim if isinstance(value, Column) else -1


def row_fields(fields: Mapping[str, Any], count: int, k: int) -> dict[str, Any]:
    """Return the fields of trace `k` of `count` stacked ones. Values of another length belong to every trace."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name in ARRAYS:
            values[name] = {number: layer.row(k) for number, layer in value.items()}
        elif isinstance(value, Column):
            values[name] = value.row(k) if value.ndim and value.shape[0] == count else value.whole()
        else:
            values[name] = value
    return values
