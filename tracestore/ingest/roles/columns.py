"""Columns of a decoded object: values with one item for each trace, and names for columns without one."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tracestore.ingest.containers.keys import ID_KEYS, LENGTHS, id_of_name, parse_key
from tracestore.ingest.roles.keys import (
    COUNTERS,
    LABELS,
    MAPPABLE,
    OTHER_NAMES,
    known_name,
)
from tracestore.ingest.roles.layout import layout, opened, row, shape_of
from tracestore.store.vocabulary import SCORES, score_of_word

# Names of values of one trace; a column may have an "s" at the end.
_SINGULAR = frozenset((*MAPPABLE, *itertools.chain(*OTHER_NAMES.values()), *ID_KEYS, *SCORES, LABELS))
_PER_TOKEN = frozenset((*OTHER_NAMES["tokens"], *OTHER_NAMES["tokens_decoded"], "attention_mask", "tokens_decoded"))
_SINGULAR -= _PER_TOKEN
UNNAMED = "item_"  # begin of the names of columns without a name
# Lists under these names have one item for each layer.
_PER_LAYER = frozenset(("layers", "layer_ids"))


def is_id(value: Any) -> bool:
    """Return whether a value may be the id of one trace: text or an integer."""
    return (isinstance(value, str) and value != "") or (
        isinstance(value, int | np.integer) and not isinstance(value, bool)
    )


def has_id(fields: Mapping[Any, Any]) -> bool:
    """Return whether a trace has an id that `assign` takes."""
    return any(
        is_id(fields.get(name)) and (name not in COUNTERS or isinstance(fields[name], str))
        for name in ("global_example_id", *ID_KEYS)
    )


def are_ids(keys: Iterable[Any]) -> bool:
    """Return whether the keys of a dict look like ids: each is a number, or has a digit."""
    return all(not isinstance(key, str) or re.search(r"\d", key) for key in keys)


def id_of_key(key: Any) -> dict[str, str | int]:
    """Return the id that a key states, and the number of an answer: q1_sample_0, ("q1", 0)."""
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and type(key[1]) is int:
        return {"question_id": key[0], "sample": key[1]}
    return id_of_name(str(key))


def has_one_id(fields: Mapping[Any, Any]) -> bool:
    """Return whether a dict has one id or number, also one that `assign` does not take."""
    return any(is_id(fields.get(name)) for name in ID_KEYS)


def is_common(fields: Mapping[Any, Any]) -> bool:
    """Return whether a dict is certainly a whole trace: its own id, and hidden states as a list of layers."""
    return isinstance(fields.get("question_id"), str) and isinstance(fields.get("hidden_states"), list)


def has_own_shape(fields: Mapping[Any, Any]) -> bool:
    """Return whether states are (S, D) per layer, or (L, S, D), where S is the number of tokens, or one less."""
    tokens = opened(fields.get("tokens", fields.get("input_ids")))
    states = opened(fields.get("hidden_states"))
    if not isinstance(tokens, list | np.ndarray) or (isinstance(tokens, np.ndarray) and tokens.ndim != 1):
        return False
    sizes = (len(tokens), len(tokens) - 1)
    if isinstance(states, np.ndarray):
        is_stack = states.ndim == 3 and states.dtype.kind in "fV"
        return is_stack and states.shape[1] in sizes and states.shape[0] not in sizes
    shape = shape_of(states[0]) if states and isinstance(states, list) else ()
    return len(shape) == 2 and shape[0] in sizes


def is_header(item: Any, trace: Any) -> bool:
    """Return whether a dict before a trace holds settings: no arrays, and no key of the trace."""
    item, trace = opened(item), opened(trace)
    keys = trace.keys() if isinstance(trace, dict) else set()
    return is_settings(item) and item.keys().isdisjoint(keys)


def is_settings(value: Any, depth: int = 0) -> bool:
    """Return whether a dict holds no arrays, and no records of traces."""
    value = opened(value)
    if isinstance(value, dict):
        return depth < 4 and not has_one_id(value) and all(is_settings(v, depth + 1) for v in value.values())
    if depth == 0 or isinstance(value, np.ndarray):
        return depth > 0 and value.ndim < 2
    return not isinstance(value, list | tuple) or all(is_settings(item, depth + 1) for item in value)


def counts_of(fields: Mapping[Any, Any], key: Any, *, is_named: bool = False) -> set[int]:
    """Return how many traces the ids, texts, labels, lengths and tokens next to hidden states have.

    A dict with one id has one trace, or one question with several answers. `is_named`: the names of the values count,
    and not that they are texts, such as those of tokens.
    """
    if has_one_id(fields):
        return set()
    counts = set()
    for name, value in fields.items():
        value = opened(value)
        count = _length(value)
        if name == key or not isinstance(name, str) or name in _PER_LAYER or not count:
            continue
        is_nested = _length(opened(value[0])) is not None
        if _is_per_token(name):
            counts |= {count} if is_nested else set()
        elif (known_name(singular(name)) in _SINGULAR or (_are_texts(value) and not is_named)) and not is_nested:
            counts.add(count)
    return counts


def _length(value: Any) -> int | None:
    """Return the number of items of a list or array; None for other values."""
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


@lru_cache(maxsize=1 << 14)
def _is_per_token(name: str) -> bool:
    parsed = parse_key(name)
    return name in _PER_TOKEN or (parsed is not None and parsed.field == "tokens")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, str) for item in value)


def singular(name: Any) -> Any:
    """Return the name of one value of a column, "question_id" for "question_ids", and a key that is no text unchanged."""
    if not isinstance(name, str):
        return name
    if name in LENGTHS:
        return "lengths"
    return name[:-1] if name not in _SINGULAR and name.endswith("s") and name[:-1] in _SINGULAR else name


def row_of(fields: Mapping[Any, Any], k: int, count: int, axis: int = 0) -> dict[Any, Any]:
    """Return the values of trace `k` of `count`; those of another length belong to every trace.

    `axis` is that of the traces in hidden states; attention by layer has the same.
    """
    values: dict[Any, Any] = {}
    for name, value in fields.items():
        value = opened(value)
        parsed = parse_key(name) if isinstance(name, str) else None
        if parsed is not None and parsed.field == "attentions":
            shape = shape_of(value)
            values[name] = row(value, k, axis) if len(shape) > 3 and shape[axis] == count else value
        elif _length(value) != count or name in _PER_LAYER or (name == "tokens_decoded" and _are_texts(value)):
            values[name] = value
        else:
            item = value[k]
            values[singular(name)] = item.item() if isinstance(item, np.generic) else item
    return values


def lengths_of(fields: Mapping[Any, Any]) -> Any:
    """Return the numbers of tokens of padded traces; None without them."""
    names = [name for name in fields if isinstance(name, str) and singular(name) == "lengths"]
    return opened(fields[names[0]]) if names else None


def num_tokens(trace: Mapping[Any, Any]) -> set[int]:
    """Return how many tokens hidden states may have: as many as there are ids or texts of tokens, or one less."""
    sizes: set[int] = set()
    for name, value in trace.items():
        if isinstance(name, str) and _is_per_token(name) and (shape := _token_shape(value)) is not None:
            sizes |= {shape, shape - 1}
    return sizes


def _token_shape(value: Any) -> int | None:
    value = opened(value)
    if _are_texts(value):
        return len(value)
    shape = layout(value)
    if shape is None or len(shape.shape) > 2 or (len(shape.shape) == 2 and shape.shape[0] != 1) or not shape.shape:
        return None
    return shape.shape[-1]


def with_columns_beside(fields: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """Return a dict of stacked states with the columns of the dicts next to it, such as non_tensor_batch; None without."""
    dicts = [v for v in map(opened, fields.values()) if isinstance(v, dict) and v]
    batches = [v for v in dicts if len(shape_of(v.get("hidden_states"))) > 2]
    sizes = [size for v in batches if (size := shape_of(v["hidden_states"])[0]) is not None and size > 1]
    count = sizes[0] if len(sizes) == len(batches) == 1 else None
    columns = [v for v in dicts if v not in batches and all(_length(opened(column)) == count for column in v.values())]
    # Of a level and the name of a metric, the name counts.
    pairs = ((k[-1] if isinstance(k, tuple) and k else k, v) for d in (*columns, *batches) for k, v in d.items())
    return dict(pairs) if count is not None and columns else None


def labels_of_classes(fields: Mapping[Any, Any]) -> dict[Any, float] | None:
    """Return the label (1: hallucinated) of each key of a dict with two opposite words of judges; None for others."""
    if len(fields) != 2:
        return None
    scores = {key: score_of_word(key, None) for key in fields if isinstance(key, str)}
    is_pair = set(scores.values()) == {0.0, 1.0}
    return {key: 1 - score for key, score in scores.items() if score is not None} if is_pair else None


def named_fields(items: Sequence[Any]) -> dict[str, Any] | None:
    """Return hidden states of one trace, and attention or ids of the same tokens, in a tuple without names; None for others."""
    states = shape_of(items[0])
    if len(states) not in (3, 4) or (len(states) == 4 and states[1] != 1):
        return None
    named: dict[str, Any] = {"hidden_states": items[0]}
    size = states[-2] or 0
    for k, item in enumerate(items[1:], 1):
        floats, ids, name = shape_of(item), shape_of(item, "i"), f"{UNNAMED}{k}"
        if floats == states:
            return None  # layers
        if size and len(floats) >= 3 and floats[-2:] == (size, size):
            name = "attentions"
        # As many integers as the first axis has items may be labels of as many traces.
        elif size and ids in ((size,), (size + 1,), (1, size), (1, size + 1)):
            name = "tokens" if ids != states[:1] or "attentions" in named else name
        named[name if name not in named else f"{UNNAMED}{k}"] = item
    return named if named.keys() & {"attentions", "tokens"} else None


def named_columns(columns: Sequence[Any]) -> dict[str, Any]:
    """Return columns without names by the fields that they may be; "" is a column of dicts, others are item_K."""
    named: dict[str, Any] = {}
    for k, column in enumerate(columns):
        column = opened(column)
        name, shape = f"{UNNAMED}{k}", shape_of(column)
        if len(shape) >= 3:
            is_square = len(shape) >= 4 and shape[-1] == shape[-2]
            name = "attentions" if "hidden_states" in named and is_square else "hidden_states"
        elif len(shape_of(column, "i")) == 2:
            name = "tokens"
        elif _are_texts(column) and len(set(column)) == len(column) and all(len(text.split()) == 1 for text in column):
            name = "question_id"
        elif isinstance(column, list | tuple) and all(isinstance(opened(item), dict) for item in column):
            name = ""
        named[name if name not in named else f"{UNNAMED}{k}"] = column
    return named
