"""Names of arrays without the name of a field: q1, layer_0/q1, hidden_states/q1, h0, X."""

import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tracestore.ingest.containers.columns import Column
from tracestore.ingest.containers.keys import SECTIONS, SPLITS, locate, without_step
from tracestore.ingest.layouts.values import leaf_of

ARRAYS = ("hidden_states", "attentions", "last_token")
_LAYER_FIRST = re.compile(r"((?:layers?|blocks?)[._/\-]?\d+)[/.](.+)", re.IGNORECASE)
# Short names of layers with a number: h0, L12.
_SHORT = re.compile(r"(?:(?P<trace>.*?)[./_\-])?(?:h|hs|hid|l|lyr|state|out)_?(?P<number>\d+)", re.IGNORECASE)
# Names that mean hidden states where an array is the only one of its trace.
WEAK = re.compile(
    r"(?:(?P<trace>.+)[./])?(?:arr_0|x|h|hid|states?|embs?|embeds?|embeddings?|vectors?|features?|feats?|latents?|values?|data|array|tensor|samples)",
    re.IGNORECASE,
)
_MARKS = re.compile(r"__+|::?|[|@#>\\\\]")
_SPLIT_OF = re.compile(rf"(?P<field>\w+?)_(?P<split>{'|'.join(sorted(SPLITS))})", re.IGNORECASE)
_OF_SPLIT = re.compile(rf"(?P<split>{'|'.join(sorted(SPLITS))})_(?P<field>\w+)", re.IGNORECASE)
_PROMPT_PART = re.compile(r"(?P<before>(?:.+/)?)(?:prompt|prefill)/(?P<after>.+)", re.IGNORECASE)
_GENERATED_PART = re.compile(
    r"(?P<before>(?:.+/)?)(?:gen(?:erat(?:ed|ion))?|decode|step|token)[_/]?(?P<number>\d+)/(?P<after>.+)", re.IGNORECASE
)
_PROMPT = re.compile(r"(?:prompt|prefill|context|input)[_./](?P<field>.+)", re.IGNORECASE)
_ANSWER = re.compile(
    r"(?:answer|response|generated|generation|completion|output|gen|decode)[_./](?P<field>.+)", re.IGNORECASE
)


# hidden_states_q1: the trace begins with a letter and has a digit.
_ENDING = re.compile(r"(?P<field>[a-z]+(?:_[a-z]+)*)_(?P<trace>[a-z]+[_\-]?\d\w*)", re.IGNORECASE)
_DIMENSION = re.compile(r"(?:.*[^\d])?(\d+)")
_DIMENSION_WORD = re.compile(r"[_.\-]?(?:dim|d|feature|feat|f|h|unit|v|x)?[_.\-]?$", re.IGNORECASE)
# Columns with numbers that begin alike make a vector from this number on.
MIN_DIMENSIONS = 8


def with_field_names(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields in which arrays of hidden states without such a name have one, if their shapes leave no doubt.

    Arrays named by traces have one number of layers and one hidden size, different numbers of tokens, and a digit in
    each name; other arrays may be anything, such as prompt and answer.

    Examples
    --------
    `layer_0/q1` and `hidden_states/layer_0/q1` become `q1/layer_0`, `q1` becomes `q1/hidden_states`.
    """
    fields = _with_slashes(_of_splits(_of_prompts(fields)))
    if (moved := _of_segments(fields)) is not None:
        return moved
    fields = _without_sections(fields)
    if names := _layers_first(fields):
        return {names.get(name, name): value for name, value in fields.items()}
    if any(key.field in ARRAYS for key in map(locate, fields) if key):
        return _with_weak_states(fields)
    for names in (_by_ending(fields), _by_field(fields), _by_layer(fields), _by_short_name(fields), _by_step(fields)):
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
        return _with_weak_states(fields)
    else:
        tokens = {column.shape[-2] for column in columns.values()}
        if len(tokens) < 2 or not all(re.search(r"\d", name) for name in columns):
            return fields
        names = {name: f"{name}/hidden_states" for name in columns}
    return {names.get(name, name): value for name, value in fields.items()}


def _with_weak_states(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields in which the only array with a weak name is (L, S, D), if attention (..., S, S) or S tokens are next to it."""
    keys = {name: locate(name) for name in fields}
    weak = [
        name for name, value in fields.items() if WEAK.fullmatch(name) and isinstance(value, Column) and value.ndim == 3
    ]
    found = {key.field for key in keys.values() if key is not None}
    if len(weak) != 1 or "/" in weak[0] or keys[weak[0]] is not None or found & {"hidden_states", "last_token"}:
        return fields
    size = fields[weak[0]].shape[1]
    others = [fields[n] for n, key in keys.items() if key is not None and not key.trace]
    shapes = [value.shape for value in others if isinstance(value, Column)]
    if fields[weak[0]].dtype.kind not in "fV" or not any(shape[-2:] in ((size,), (size, size)) for shape in shapes):
        return fields
    return {("hidden_states" if name == weak[0] else name): value for name, value in fields.items()}


def _without_sections(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields whose names have no sections in front, or behind the trace: outputs/layer_0, q1/inputs/input_ids.

    Names that would become equal keep them.
    """
    names: dict[str, str] = {}
    for name in fields:
        parts = re.split(r"[./]", name)
        k = 0 if parts[0].lower() in SECTIONS else 1
        if len(parts) > k + 1 and parts[k].lower() in SECTIONS and (k == 0 or _is_trace_of(parts)):
            names[name] = "/".join((*parts[:k], *parts[k + 1 :]))
    counts = Counter(names.get(name, name) for name in fields)
    return {new if counts[new := names.get(name, name)] == 1 else name: value for name, value in fields.items()}


def _is_trace_of(parts: list[str]) -> bool:
    """Return whether the first part of a name is a trace, and the parts behind a section name an array or its ids."""
    return any(c.isdigit() for c in parts[0]) and locate(parts[0]) is None and locate("/".join(parts[2:])) is not None


def is_states(value: Column) -> bool:
    """Return whether an array may hold hidden states of a trace or of last tokens."""
    return value.ndim in (2, 3) and value.dtype.kind in "fV" and 0 not in value.shape


def _with_slashes(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields in which other marks between the parts of a name are slashes: q1__layer_3, q1:layer:3."""
    names = {name: _MARKS.sub("/", name) for name in fields if _MARKS.search(name) and locate(name) is None}
    names |= {name: _MARKS.sub("/", name) for name in fields if "__" in name.strip("_")}
    names = {name: new for name, new in names.items() if (key := locate(new)) and key.field in ARRAYS}
    return {names.get(name, name): value for name, value in fields.items()}


def _of_splits(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields in which the arrays of splits are below the split: X_train and y_train become train/X and train/y."""
    found = names_of_splits(tuple(fields))
    if not all(isinstance(fields[name], Column) for name in found):
        return fields
    return {"/".join(found.get(name, (name,))): value for name, value in fields.items()}


@lru_cache(maxsize=1 << 10)
def names_of_splits(names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Return (split, field) of the names that state a split, such as X_train, if all do or several splits are there."""
    whole = {name: match for name in names if (match := _OF_SPLIT.fullmatch(name))}  # train_layer_8, train_labels
    behind = {name: match for name in names if (match := _SPLIT_OF.fullmatch(name))}
    is_behind = len({match["split"] for match in behind.values()}) > 1
    found = whole if len(whole) == len(names) else behind if is_behind else {}
    return {name: (match["split"], match["field"]) for name, match in found.items()}


def _of_prompts(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields in which the prompt is step 0 and gen_0 step 1, if both are next to each other."""
    prompts = {name: match for name in fields if (match := _PROMPT_PART.fullmatch(name))}
    steps = {name: match for name in fields if (match := _GENERATED_PART.fullmatch(name))}
    if not prompts or {m["before"] for m in prompts.values()} != {m["before"] for m in steps.values()}:
        return fields
    first = min(int(match["number"]) for match in steps.values())
    names = {name: f"{m['before']}step_0/{m['after']}" for name, m in prompts.items()}
    names |= {n: f"{m['before']}step_{int(m['number']) - first + 1}/{m['after']}" for n, m in steps.items()}
    return {names.get(name, name): value for name, value in fields.items()}


def _layers_first(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return new names of layers whose short names are before the field, L00_hidden, and which have one shape."""
    found, shapes = {}, set()
    for name, value in fields.items():
        key = locate(name)
        if key is None or key.field not in ARRAYS:
            continue
        match = _SHORT.fullmatch(key.trace)
        if match is None or match["trace"] or key.number is not None or not isinstance(value, Column):
            return {}
        found[name] = f"layer_{match['number']}/{key.field}"
        shapes.add((key.field, value.shape))
    return found if len(found) > 1 and len(shapes) == len({field for field, _ in shapes}) else {}


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


def _by_ending(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return new names of arrays with the trace behind the field: q1/hidden_states for hidden_states_q1."""
    matches = {name: match for name in fields if (match := _ENDING.fullmatch(name))}
    matches = {n: m for n, m in matches.items() if locate(m["field"]) and not _SHORT.fullmatch(m["trace"])}
    found = {name: f"{match['trace']}/{match['field']}" for name, match in matches.items()}
    fields_of: dict[str, set[str]] = {}
    for match in matches.values():
        fields_of.setdefault(match["trace"], set()).add(match["field"])
    is_regular = len(fields_of) > 1 and len({frozenset(names) for names in fields_of.values()}) == 1
    return found if is_regular and any(locate(name).field in ARRAYS for name in found.values()) else {}  # type: ignore[union-attr]


def _by_layer(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return new names of arrays below their layer: q1/layer_0 for layer_0/q1."""
    return {name: f"{match[2]}/{match[1]}" for name in fields if (match := _LAYER_FIRST.fullmatch(name))}


def _by_short_name(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return new names of arrays such as h0 and h1, which have one shape per trace."""
    found: dict[str, str] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, value in fields.items():
        match = _SHORT.fullmatch(name)
        is_array = isinstance(value, Column) and value.dtype.kind in "fV" and value.ndim in (2, 3)
        if match and (is_array or is_list_of_floats(value)):
            trace = match["trace"] or ""
            shapes.setdefault(trace, []).append(value.shape if isinstance(value, Column) else (len(value),))
            found[name] = f"{trace}/layer_{match['number']}".lstrip("/")
    return found if all(len(set(of_trace)) == 1 < len(of_trace) for of_trace in shapes.values()) else {}


def is_list_of_floats(value: Any) -> bool:
    """Return whether a value is an array or nested list of floats in memory."""
    if hasattr(value, "dtype") and not isinstance(value, Column):
        return value.dtype.kind in "fV" and value.ndim > 0
    return isinstance(leaf_of(value)[0], float)


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


def with_vector(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which columns of numbers such as dim_0, dim_1 and so on are one vector, or one per layer."""
    groups: dict[str, dict[int, str]] = {}
    for key, value in row.items():
        match = _DIMENSION.fullmatch(key)
        if match and isinstance(value, int | float) and not isinstance(value, bool):
            groups.setdefault(key[: match.start(1)], {})[int(match[1])] = key
    groups = {prefix: names for prefix, names in groups.items() if len(names) >= MIN_DIMENSIONS}
    layers = {prefix: locate(_DIMENSION_WORD.sub("", prefix)) for prefix in groups}
    is_by_layer = len(groups) > 1 and all(key and key.number is not None and not key.trace for key in layers.values())
    if len(groups) != 1 and not is_by_layer:
        return row
    used = {key for names in groups.values() for key in names.values()}
    found = {key: value for key, value in row.items() if key not in used}
    for prefix, names in groups.items():
        numbers = sorted(names)
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[0] not in (0, 1):
            return row
        name = f"layer_{layers[prefix].number}" if is_by_layer else "hidden_states"  # type: ignore[union-attr]
        found[name] = [row[names[n]] for n in numbers]
    return found
