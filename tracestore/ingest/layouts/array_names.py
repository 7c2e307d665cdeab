"""Names of arrays without the name of a field: q1, layer_0/q1, hidden_states/q1, h0, X."""

import re
from collections.abc import Mapping
from typing import Any

from tracestore.ingest.containers.columns import Column
from tracestore.ingest.containers.keys import locate, without_step

ARRAYS = ("hidden_states", "attentions", "last_token")
_LAYER_FIRST = re.compile(r"((?:layers?|blocks?)[._/\-]?\d+)[/.](.+)", re.IGNORECASE)
# Short names of layers with a number: h0, L12.
_SHORT = re.compile(r"(?:(?P<trace>.*?)[./_\-])?(?:h|hs|hid|l|lyr|state|out)_?(?P<number>\d+)", re.IGNORECASE)
# Names that mean hidden states where an array is the only one of its trace.
WEAK = re.compile(
    r"(?:(?P<trace>.+)[./])?(?:arr_0|x|h|hid|states?|embeds?|embeddings?|vectors?|features?|feats?|latents?|values?|data|array|tensor)",
    re.IGNORECASE,
)
_PROMPT = re.compile(r"(?:prompt|prefill|context|input)[_./](?P<field>.+)", re.IGNORECASE)
_ANSWER = re.compile(
    r"(?:answer|response|generated|generation|completion|output|gen|decode)[_./](?P<field>.+)", re.IGNORECASE
)


def with_field_names(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields in which arrays of hidden states without such a name have one, if their shapes leave no doubt.

    Arrays named by traces have one number of layers and one hidden size, different numbers of tokens, and a digit in
    each name; other arrays may be anything, such as prompt and answer.

    Examples
    --------
    `layer_0/q1` and `hidden_states/layer_0/q1` become `q1/layer_0`, `q1` becomes `q1/hidden_states`.
    """
    if (moved := _of_segments(fields)) is not None:
        return moved
    if any(key.field in ARRAYS for key in map(locate, fields) if key):
        return fields
    for names in (_by_field(fields), _by_layer(fields), _by_short_name(fields), _by_step(fields)):
        if names:
            return {names.get(name, name): value for name, value in fields.items()}
    columns = {name: value for name, value in fields.items() if isinstance(value, Column) and is_states(value)}
    shapes = {(c.ndim, c.shape[-1], c.shape[0] if c.ndim == 3 else 0) for c in columns.values()}
    others = [v for n, v in fields.items() if isinstance(v, Column) and v.ndim > 1 and n not in columns]
    if not columns:
        return fields
    weak = {name: match["trace"] or "" for name in columns if (match := WEAK.fullmatch(name))}
    if len(weak) == len(columns) == len(set(weak.values())) and not others:
        names = {name: f"{trace}/hidden_states".lstrip("/") for name, trace in weak.items()}
    elif len(shapes) > 1 or others:
        return fields
    else:
        tokens = {column.shape[-2] for column in columns.values()}
        if len(tokens) < 2 or not all(re.search(r"\d", name) for name in columns):
            return fields
        names = {name: f"{name}/hidden_states" for name in columns}
    return {names.get(name, name): value for name, value in fields.items()}


def is_states(value: Column) -> bool:
    """Return whether an array may hold hidden states of a trace or of last tokens."""
    return value.ndim in (2, 3) and value.dtype.kind in "fV" and 0 not in value.shape


def _of_segments(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields of a trace whose prompt and answer are arrays of their own; None for others."""
    parts = [
        {match["field"]: name for name in fields if (match := pattern.fullmatch(name))}
        for pattern in (_PROMPT, _ANSWER)
    ]
    both = parts[0].keys() & parts[1].keys()
    states = [f for f in both if (key := locate(f)) and key.field == "hidden_states" and not key.trace]
    if not states or not all(isinstance(fields[p[f]], Column) for p in parts for f in states):
        return None
    names = {part[field]: f"step_{k}/{_TOKENS.get(field, field)}" for k, part in enumerate(parts) for field in both}
    first = fields[parts[0][states[0]]]
    return {names.get(n, n): v for n, v in fields.items()} | {"prompt_length": int(first.shape[-2])}


_TOKENS = {"ids": "tokens"}


def _by_field(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return new names of arrays below their field: q1/hidden_states for hidden_states/q1."""
    found = {}
    for name in fields:
        parts = re.split(r"[./]", name) if "/" in name or "." in name else []
        for k in range(len(parts) - 1, 0, -1):
            lead, trace = "/".join(parts[:k]), "/".join(parts[k:])
            key = locate(lead)
            if key is not None and not key.trace and (key.number is None or key.field == "attentions" or k > 1):
                if locate(trace) is None:
                    found[name] = f"{trace}/{lead}"
                break
    return found if any(locate(name).field in ARRAYS for name in found.values()) else {}  # type: ignore[union-attr]


def _by_layer(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return new names of arrays below their layer: q1/layer_0 for layer_0/q1."""
    return {name: f"{match[2]}/{match[1]}" for name in fields if (match := _LAYER_FIRST.fullmatch(name))}


def _by_short_name(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return new names of arrays such as h0 and h1, which have one shape per trace."""
    found: dict[str, str] = {}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    counts: dict[str, int] = {}
    for name, value in fields.items():
        match = _SHORT.fullmatch(name)
        is_array = isinstance(value, Column) and value.dtype.kind in "fV" and value.ndim in (2, 3)
        if match and (is_array or is_list_of_floats(value)):
            trace = match["trace"] or ""
            shape = value.shape if isinstance(value, Column) else (len(value),)
            shapes.setdefault(trace, set()).add(shape)
            counts[trace] = counts.get(trace, 0) + 1
            found[name] = f"{trace}/layer_{match['number']}".lstrip("/")
    return found if found and all(len(s) == 1 for s in shapes.values()) and min(counts.values()) > 1 else {}


def is_list_of_floats(value: Any) -> bool:
    """Return whether a value is an array or nested list of floats in memory."""
    if hasattr(value, "dtype") and not isinstance(value, Column):
        return value.dtype.kind in "fV" and value.ndim > 0
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, float)


def _by_step(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return new names of arrays that are named by their step alone: step_0 and q1/step_0."""
    found = {}
    for name, value in fields.items():
        rest, step = without_step(name)
        if step is not None and isinstance(value, Column) and value.dtype.kind in "fV" and value.ndim:
            if locate(rest) is not None or "/" in rest:
                return {}
            found[name] = f"{name}/hidden_states"
    return found
