"""Values of a trace that may be its hidden states, attention or id under an unknown name: for the advice of errors, ids and the default attention."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.containers.keys import parse_key
from tracestore.ingest.roles.keys import INPUTS_PAGE, OTHER_NAMES, SAME, TOKENS_KEYS, normalized
from tracestore.store.write.values import as_array

# Keys of token ids that other programs use, for suggestions of --map.
_TOKEN_NAMES = ("ids", "tok")
_MAX_DEPTH = 6
_MAX_ID_CHARACTERS = 80


def _first_shape(value: Any, depth: int = 0) -> tuple[int, ...] | None:
    """Return the shape of an array of floats, or of nested lists of them by their first items; None for others."""
    array = as_array(value)
    if array is not None:
        return array.shape if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else None
    if isinstance(value, float | np.floating):
        return ()
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple) or not value or depth > _MAX_DEPTH:
        return None
    inner = _first_shape(value[0], depth + 1)
    return None if inner is None else (len(value), *inner)


def states_in(trace: Mapping[Any, Any]) -> list[str]:
    """Return the keys, or paths to keys, whose values have a shape of hidden states: (L, S, D) or more axes first."""
    found = [
        (name, shape)
        for name, shape in _shapes(trace)
        if len(shape) in (3, 4) and shape[-1] > 1 and _field_of(name) in (None, "hidden_states")
    ]
    return [name for name, shape in found if shape[-1] != shape[-2]] or [name for name, _ in found]


def vectors_in(trace: Mapping[Any, Any]) -> list[str]:
    """Return the keys, or paths to keys, whose values are vectors of floats, or a matrix of those of the last token."""
    shapes = list(_shapes(trace))
    found = [name for name, shape in shapes if len(shape) == 2 and "last" in name.lower()]
    return found or [name for name, shape in shapes if len(shape) == 1 and shape[0] > 2]


def attention_in(trace: Any) -> list[str]:
    """Return the keys whose values have a shape of attention, (L, H, S, S) or (L, S, S), and no name of another field."""
    shapes = _shapes(trace) if isinstance(trace, Mapping) else ()
    squares = [name for name, shape in shapes if len(shape) in (3, 4, 5) and shape[-1] == shape[-2] > 1]
    return [name for name in squares if _field_of(name) is None]


def ids_in(trace: Mapping[Any, Any]) -> list[str]:
    """Return the keys whose values are texts of one word."""
    texts = ((key, value) for key, value in trace.items() if isinstance(key, str) and isinstance(value, str))
    return [key for key, value in texts if 0 < len(value) <= _MAX_ID_CHARACTERS and len(value.split()) == 1]


def _field_of(name: str) -> str | None:
    """Return the field that the last part of a path names; None without one."""
    key = parse_key(normalized(name.rpartition(".")[2]))
    return None if key is None else key.field


def _shapes(trace: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, value in trace.items():
        if isinstance(key, str) and (shape := _first_shape(value)) is not None:
            yield key, shape
        elif isinstance(key, str) and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", s) for name, v in value.items() if (s := _first_shape(v)) is not None)


def keys_found(trace: Mapping[Any, Any]) -> str:
    """Return the first keys of a trace for a message."""
    names = [str(key)[:40] for key in trace]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "no key"


def with_advice(error: InvalidInputError, trace: Any) -> InvalidInputError:
    """Return the error with the closest fix at the end of its message: a mapping, or a place in the documentation."""
    name = (error.field or "").partition("[")[0].partition(".")[0]
    if INPUTS_PAGE in error.reason or ("--" in error.reason and not error.reason.startswith("missing key")):
        return error
    advice = f"see {INPUTS_PAGE}#keys"
    if error.reason.startswith("missing key") and isinstance(trace, Mapping):
        wanted = ("hidden_states", "attentions") if name in ("hidden_states", "attentions") else (name,)
        keys = {field: key for field in (*wanted, "tokens") if (key := _similar_key(field, trace)) is not None}
        if name == "attentions" and not keys and (found := attention_in(trace)):
            keys[name] = found[0]
        if name == "hidden_states" and name not in keys:
            advice = _advice_for_states(trace)
        elif keys:
            advice = f"try --map {','.join(f'{field}={key}' for field, key in keys.items())}"
    return InvalidInputError(
        f"{error.reason}; {advice}", source=error.source, position=error.position, field=error.field
    )


def _advice_for_states(trace: Mapping[Any, Any]) -> str:
    """Return the options that name hidden states, and the id if one value alone may be it."""
    ids = [] if any(key in trace for key in SAME["question_id"]) else ids_in(trace)
    more = f",question_id={ids[0]}" if len(ids) == 1 and normalized(ids[0]) not in OTHER_NAMES["question_id"] else ""
    fields = {key: "last_token" if "last" in key else "hidden_states" for key in states_in(trace)[:4]}
    maps = [f"--map {name}={key}{more}" for key, name in fields.items()]
    maps = maps or [f"--map last_token={key}{more}" for key in vectors_in(trace)[:2]]
    found = f"found {keys_found(trace)}"
    return f"{found}; try {' or '.join(maps)}" if maps else f"{found}; name it with --map hidden_states=KEY"


def _similar_key(field_name: str, trace: Mapping[Any, Any]) -> str | None:
    """Return a key, or a path to a key, that may be a missing field; None if the field is not missing."""
    if field_name in trace or (field_name == "tokens" and any(key in trace for key in TOKENS_KEYS)):
        return None
    if field_name == "tokens" and (key := next((key for key in _TOKEN_NAMES if key in trace), None)):
        return key
    names = (field_name, *(TOKENS_KEYS if field_name == "tokens" else ()))
    for key, value in trace.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            for name in names:
                if name in value:
                    return f"{key}.{name}"
    return None
