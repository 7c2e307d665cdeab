"""Find the parts of traces in an object: values by id, layer and token in names, keys and records."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.keys import (
    ID_KEYS,
    LISTS_OF_LAYERS,
    LISTS_OF_TOKENS,
    OF_TOKENS,
    id_of_name,
    parse_key,
)
from tracestore.ingest.layouts.parts import Part, Place, is_same, join_parts, parse_path
from tracestore.ingest.roles.columns import is_id, singular
from tracestore.ingest.roles.keys import OTHER_NAMES, normalized
from tracestore.ingest.roles.layout import is_counted_from_last, layer_number, layout, opened

_LAYERS = ("layer", "layer_idx", "layer_index", "layer_id", "layer_number", "layer_name", "module")
_TOKENS = (
    "position", "pos", "token_position", "token_pos", "token_index", "token_idx", "token_number", "t",
    "step", "step_idx", "step_index", "generation_step", "decoding_step",
)  # fmt: skip
_NUMBERED = frozenset((*_LAYERS, *_TOKENS))
_TOKEN_IDS = ("token_id", "input_id", "token_ids", "generated_token_id", "next_token_id")
_TOKEN_TEXTS = ("text", "word")
_MAX_DEPTH = 4
_MAX_LEAVES = 1 << 20


def by_names(fields: Mapping[Any, Any]) -> list[dict[str, Any]] | None:
    """Return the traces of a dict whose keys name field, layer or token outside of the id, or together with it.

    Such dicts are `{"layer_3": {"q1": array}}`, `{"hidden_states": {"q1": array}}`, `{"q1_layer_3": array}` and
    `{("q1", 3): array}`. Of other dicts, as a dict of traces by id, None is returned.
    """
    hidden = opened(fields.get("hidden_states"))
    if (hidden is not None and not isinstance(hidden, dict)) or not any(map(_is_part_name, fields)):
        return None
    if any(is_counted_from_last(value) for value in fields.values()):
        return None
    leaves = []
    for leaf in _leaves(fields, (), 0):
        leaves.append(leaf)
        if len(leaves) > _MAX_LEAVES:
            return None
    if all(len(path) == 1 and isinstance(path[0], tuple) for path, _ in leaves):
        return _by_tuples([(path[0], value) for path, value in leaves])
    parts, shared = [], {}
    for path, value in leaves:
        if not all(isinstance(key, str) or type(key) is int for key in path):
            return None
        place = parse_path(*_names(path))
        is_array = place.is_states or place.field == "attentions"
        if is_array and ((shape := layout(value)) is None or shape.kind != "f"):
            shared["_".join(map(str, path))] = value
        elif place.trace and place.has_role:
            parts.append(Part(place.trace, place._replace(trace=""), value))
        elif is_array:
            return None
        else:
            shared["_".join(map(str, path))] = value
    traces = {part.trace for part in parts if part.place.is_states}
    if not traces or not {part.trace for part in parts} <= traces:
        return None
    if all(str(trace).isdecimal() for trace in traces) and not all(part.place.layer is not None for part in parts):
        # Numbers below hidden states are those of layers, unless texts have them, too.
        texts = {part.trace for part in parts if isinstance(part.value, str) and not part.place.is_states}
        if texts != traces:
            return None
    found = join_parts(parts).items()
    return [id_of_name(str(trace)) | shared | {singular(k): v for k, v in values.items()} for trace, values in found]


def _is_part_name(key: Any) -> bool:
    """Return whether a key states a field, layer or token, alone or next to an id with a digit."""
    if isinstance(key, tuple):
        return len(key) in (2, 3) and any(isinstance(part, str) for part in key)
    if not isinstance(key, str):
        return False
    place = parse_path(*key.split("/"))
    is_role = place.is_states or place.field == "attentions"
    return is_role and (place.trace == "" or any(c.isdigit() for c in place.trace))


def _leaves(fields: Mapping[Any, Any], path: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in fields.items():
        value = opened(value)
        names = tuple(key.split("/")) if isinstance(key, str) else (key,)
        if isinstance(value, dict) and value and depth < _MAX_DEPTH:
            yield from _leaves(value, path + names, depth + 1)
        else:
            yield path + names, value


def _names(path: Sequence[str | int]) -> list[str]:
    """Return the keys of a path as names; next to the name of a trace, numbers are layers unless another key is one."""
    texts = [parse_path(key) for key in path if isinstance(key, str) and not key.isdecimal()]
    is_kind = {int: True, str: not any(isinstance(key, int) for key in path)}
    is_open = any(place.trace for place in texts) and all(place.layer is None for place in texts)
    return [f"layer_{k}" if is_open and is_kind[type(k)] and str(k).isdecimal() else str(k) for k in path]


def _by_tuples(leaves: Sequence[tuple[tuple[Any, ...], Any]]) -> list[dict[str, Any]] | None:
    """Return the traces of values by (id, layer) or (id, layer, token), in any order."""
    size = len(leaves[0][0])
    if any(len(key) != size for key, _ in leaves):
        return None
    columns = [[key[k] for key, _ in leaves] for k in range(size)]
    return joined_columns(columns, [value for _, value in leaves])


def joined_columns(columns: Sequence[Sequence[Any]], values: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Return the traces of values that a column of ids and one or two columns of integers number; None for others.

    Raises
    ------
    InvalidInputError
        If nothing shows which numbers are those of layers.
    """
    texts = [k for k, column in enumerate(columns) if all(isinstance(value, str) for value in column)]
    layers = {k: [layer_number(value) for value in columns[k]] for k in texts}
    names = [k for k in texts if None not in layers[k] and any("layer" in v or "block" in v for v in columns[k])]
    ids = [k for k in texts if k not in names]
    numbers = [k for k in range(len(columns)) if k not in texts]
    if len(ids) != 1 or not all(isinstance(v, int | np.integer) for k in numbers for v in columns[k]):
        return None
    keys = columns[ids[0]]
    if len(set(keys)) == len(keys) or len(names) + len(numbers) not in (1, 2):
        return None
    by_number = {k: layers[k] for k in names} | {k: [int(v) for v in columns[k]] for k in numbers}
    sizes = {
        k: {len({n for n, key in zip(column, keys, strict=True) if key == one}) for one in set(keys)}
        for k, column in by_number.items()
    }
    shapes = {len(shape.shape) for value in values if (shape := layout(value)) is not None and shape.kind == "f"}
    if len(shapes) != 1:
        return None
    rank = shapes.pop()
    of_layers = names or [k for k in numbers if len(sizes[k]) == 1]
    others = [k for k in by_number if k not in of_layers[:1]]
    if len(by_number) == 1 and (names or rank > 1):
        of_layers, others = list(by_number), []
    elif len(by_number) == 1 and rank == 1 and not of_layers:
        others = list(by_number)
    elif len(of_layers) != 1:
        raise InvalidInputError(
            "found numbers next to ids, which may be those of layers or of tokens; save dicts with the keys "
            "question_id, layer, position and hidden_states",
            field="hidden_states",
        )
    elif len(by_number) == 1:
        return None  # refused with the axes that fit
    parts = []
    for k, value in enumerate(values):
        layer = by_number[of_layers[0]][k] if of_layers else None
        token = by_number[others[0]][k] if others else None
        parts.append(Part(keys[k], Place(layer=layer, token=token), opened(value)))
    return [{"question_id": str(trace)} | fields for trace, fields in join_parts(parts).items()]


# Records


def is_part(record: Mapping[Any, Any]) -> bool:
    """Return whether a record has an id and the number of a layer, token or step, so that it may be a part of a trace."""
    return _is_numbered(tuple(record)) and _numbers(record) != (None, None) and _id(record) is not None


@lru_cache(maxsize=64)
def _is_numbered(keys: tuple[Any, ...]) -> bool:
    return any(isinstance(key, str) and normalized(key) in _NUMBERED for key in keys)


def _numbers(record: Mapping[Any, Any]) -> tuple[int | None, int | None]:
    keys = {normalized(key): key for key in reversed(record) if isinstance(key, str)}
    layer = next((n for k in _LAYERS if k in keys and (n := layer_number(_item(record[keys[k]]))) is not None), None)
    token = next((n for k in _TOKENS if k in keys and type(n := _item(record[keys[k]])) is int), None)
    return layer, token


def _item(value: Any) -> Any:
    value = opened(value)
    is_number = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1)
    return value.item() if is_number and value.dtype.kind in "iu" else value


def _id(record: Mapping[Any, Any]) -> tuple[Any, Any] | None:
    keys = {normalized(key): key for key in reversed(record) if isinstance(key, str)}
    names = ("question_id", "global_example_id", *OTHER_NAMES["question_id"], *ID_KEYS)
    key = next((keys[n] for n in names if n in keys and is_id(_item(record[keys[n]]))), None)
    return None if key is None else (_item(record[key]), _item(record.get("sample")))


def join_records(records: Sequence[Mapping[Any, Any]]) -> list[dict[str, Any]] | None:
    """Return the traces of records of a layer, token or step each; None if each record has an id of its own.

    Raises
    ------
    InvalidInputError
        If a record has no id or no array, or a layer or token is missing.
    """
    groups: dict[Any, list[Mapping[Any, Any]]] = {}
    for record in records:
        groups.setdefault(_id(record), []).append(record)
    if None in groups or len(groups) == len(records):
        return None
    return [trace for group in groups.values() for trace in [_trace(group)]]


def join_steps(trace: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """Return a trace whose list of tokens, steps or layers holds the hidden states of one each; None for others."""
    for key, value in trace.items():
        items, name = opened(value), normalized(key) if isinstance(key, str) else ""
        if isinstance(items, dict) and list(items) == list(range(len(items))):
            items = list(items.values())
        is_layers = LISTS_OF_LAYERS.fullmatch(name) is not None
        if not isinstance(items, list | tuple) or not items or not (is_layers or LISTS_OF_TOKENS.fullmatch(name)):
            continue
        records = [opened(item) for item in items]
        if not all(isinstance(r, dict) and _states_key(r) is not None for r in records):
            continue
        column = "layer" if is_layers else "position"
        numbered = [
            ({column: k} if _numbers(r)[not is_layers] is None else {})
            # A number is the id of the token, not of a trace.
            | {"token_id" if n == "id" and type(_item(v)) is int and not is_layers else n: v for n, v in r.items()}
            for k, r in enumerate(records)
        ]
        if any(_id(r) is not None for r in numbered):
            continue
        return {k: v for k, v in trace.items() if k != key} | _trace(numbered)
    return None


def _trace(records: Sequence[Mapping[Any, Any]]) -> dict[str, Any]:
    """Return a trace from its records."""
    parts, keys = [], set()
    numbers = [_numbers(record) for record in records]
    for record, (layer, token) in zip(records, numbers, strict=True):
        key = _states_key(record)
        if key is None:
            raise InvalidInputError(
                f"found a part of a trace with {', '.join(map(str, record))[:80]}, expected an array",
                field="hidden_states",
            )
        keys.add(key)
        parts.append(Part("", Place(field="hidden_states", layer=layer, token=token), resolved(record[key])))
        for name, value in record.items():
            parsed = parse_key(normalized(name)) if isinstance(name, str) else None
            if parsed is not None and parsed.field == "attentions" and opened(value) is not None:
                keys.add(name)
                parts.append(Part("", Place(field="attentions", layer=layer, token=token), resolved(value)))
    fields: dict[str, Any] = join_parts(parts)[""]
    names = [
        key
        for key in records[0]
        if isinstance(key, str) and key not in keys and normalized(key) not in (*_LAYERS, *_TOKENS)
    ]
    order = sorted({token for _, token in numbers if token is not None})
    of_token = {token: r for r, (_, token) in zip(reversed(records), reversed(numbers), strict=True)}
    tokens = [of_token[token] for token in order]
    for name in names:
        values = [_item(record.get(name)) for record in records]
        given = [_item(record.get(name)) for record in tokens]
        is_shared = all(is_same(value, values[0]) for value in values)
        if normalized(name) in _TOKEN_IDS and tokens and "tokens" not in fields:
            fields["tokens"] = given
        elif name == "token" and tokens:
            fields["tokens_decoded" if isinstance(given[0], str) else "tokens"] = given
        elif name in OF_TOKENS and tokens:
            fields[OF_TOKENS[name]] = given
        elif is_shared:
            fields[name] = values[0]
        elif name in _TOKEN_TEXTS and tokens:
            fields["tokens_decoded"] = given
        else:
            fields[name] = given or values
    return fields


def resolved(value: Any) -> Any:
    """Return a value with the arrays of pickles inside lists and dicts as arrays of NumPy."""
    value = opened(value)
    if isinstance(value, list | tuple):
        return type(value)(map(resolved, value)) if type(value) in (list, tuple) else list(map(resolved, value))
    return {k: resolved(v) for k, v in value.items()} if isinstance(value, dict) else value


def _states_key(record: Mapping[Any, Any]) -> str | None:
    """Return the key of hidden states in a record: by its name, or the only array of floats."""
    arrays = [
        k
        for k, v in record.items()
        if isinstance(k, str) and (s := layout(v)) is not None and s.kind == "f" and s.shape
    ]
    named = [k for k in arrays if (p := parse_path(normalized(k))).is_states and p.layer is None]
    named = named or [k for k in arrays if parse_key(normalized(k)) is None]
    return named[0] if len(named) == 1 else None
