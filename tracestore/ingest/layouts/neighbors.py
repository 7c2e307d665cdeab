"""Values next to each other in one dict: prompt and response, records and states, traces behind each other."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracestore.ingest.containers.columns import Column, ObjectColumn
from tracestore.ingest.containers.keys import LISTS_OF_LAYERS, SECTIONS
from tracestore.ingest.layouts.array_names import WEAK, names_of_splits
from tracestore.ingest.layouts.partial import resolved
from tracestore.ingest.layouts.parts import Place, join_tokens, parse_path
from tracestore.ingest.layouts.ragged import is_bounds, ragged
from tracestore.ingest.roles.candidates import ids_in
from tracestore.ingest.roles.columns import has_one_id, singular
from tracestore.ingest.roles.keys import OUTPUTS, normalized
from tracestore.ingest.roles.layout import layers_of, layout, opened, shape_of

_MASK_OR_IDS = re.compile(r"(?:attention_?)?masks?|input_ids|token_ids|tokens", re.IGNORECASE)


def spread_records(fields: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """Return a dict of states of N traces and a list of N dicts without states with the columns of these; None for others."""
    states = [k for k, v in fields.items() if _is_states_name(k) and _size(v) > 1 and shape_of(v)]
    if len(states) != 1:
        return None
    count = _size(fields[states[0]])
    for key, value in fields.items():
        records = opened(value)
        if key == states[0] or not isinstance(records, list | tuple) or len(records) != count:
            continue
        rows = [opened(record) for record in records]
        if all(isinstance(row, dict) and row and not any(_is_states_name(name) for name in row) for row in rows):
            names = dict.fromkeys(name for row in rows for name in row)
            columns = {name: [row.get(name) for row in rows] for name in names if name not in fields}
            return {k: v for k, v in fields.items() if k != key} | columns
    return None


def _size(value: Any) -> int:
    value = opened(value)
    is_list = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
    return len(value) if is_list else 0


def _is_states_name(name: Any) -> bool:
    return isinstance(name, str) and parse_path(normalized(name)).is_states


def split_ragged(fields: Mapping[Any, Any]) -> list[dict[Any, Any]] | None:
    """Return the traces that lie behind each other in one array, which lengths or offsets take apart; None for others.

    Raises
    ------
    InvalidInputError
        If offsets do not fit to the hidden states.
    """
    given = {k: opened(v) for k, v in fields.items() if isinstance(k, str)}
    if not any(is_bounds(name) for name in given):
        return None
    columns: dict[str, Any] = {}
    for name, value in given.items():
        place = parse_path(normalized(name))
        is_whole = place.is_states and place.layer is None and not place.trace
        if is_whole and (states := _states_column(value)) is not None:
            columns["hidden_states"] = states
        elif place.is_states and place.layer is not None and isinstance(value, np.ndarray):
            columns.setdefault("hidden_states", {})[place.layer] = Column(value)
        elif isinstance(value, np.ndarray):
            columns[name] = Column(value)
        elif isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
            columns[name] = Column(np.asarray(value))
        elif isinstance(value, list | tuple):
            columns[name] = ObjectColumn(list(value), (len(value),))
        else:
            columns[name] = value
    if "hidden_states" not in columns or not (found := ragged(columns, None)):
        return None
    traces = []
    for k in range(len(found.bounds)):
        values = found.fields(columns, k)
        hidden = values["hidden_states"]
        if isinstance(hidden, np.ndarray) and hidden.ndim == 2:
            values["hidden_states"] = [hidden]
        elif isinstance(hidden, np.ndarray) and found.is_token_major:
            values["hidden_states"] = hidden.transpose(1, 0, 2)
        single = {singular(n): values.pop(n) for n in list(values) if n not in ("hidden_states", "tokens")}
        traces.append(values | {n: v.item() if isinstance(v, np.generic) else v for n, v in single.items()})
    return traces


def _states_column(value: Any) -> Any:
    """Return an array, or layers (total, D) by number, as columns."""
    if isinstance(value, np.ndarray):
        return Column(value) if value.dtype.kind in "fV" else None
    value = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    layers = layers_of(value) if isinstance(value, dict) else {}
    arrays = {k: opened(layer) for k, layer in layers.items()}
    is_regular = all(isinstance(a, np.ndarray) and a.ndim == 2 and a.dtype.kind in "fV" for a in arrays.values())
    return {k: Column(a) for k, a in arrays.items()} if arrays and is_regular else None


# Batches of a data loader


def split_batches(fields: Mapping[Any, Any]) -> list[dict[Any, Any]] | None:
    """Return a dict for each batch of lists over batches: layers to lists of (B, S, D), and masks or ids (B, S); None for others.

    Values of all rows, such as ids, are cut into those of the batches.
    """
    given = {k: opened(v) for k, v in fields.items()}
    sizes = next((s for k, v in given.items() if _MASK_OR_IDS.fullmatch(str(k)) and (s := _batch_sizes(v))), None)
    states = [k for k in given if _is_states_name(k)]
    if sizes is None or len(states) != 1:
        return None
    batches = _layers_of_batches(given[states[0]], sizes)
    if batches is None:
        return None
    found, first = [], 0
    for k, (count, _) in enumerate(sizes):
        batch: dict[Any, Any] = {"hidden_states": batches[k]}
        for name, value in given.items():
            if name == states[0]:
                continue
            if isinstance(value, list | tuple) and len(value) == len(sizes) != sum(n for n, _ in sizes):
                batch[singular(name)] = value[k]
            elif _size(value) == sum(n for n, _ in sizes):
                rows = value[first : first + count]
                batch[singular(name)] = rows[0] if count == 1 else rows
            else:
                batch[name] = value
        found.append(batch)
        first += count
    return found


def _batch_sizes(value: Any) -> list[tuple[int, int]] | None:
    """Return the sizes (B, S) of a list of masks or ids; None for another value."""
    shapes = [shape_of(item, "i") for item in value] if isinstance(value, list | tuple) else []
    if not shapes or any(len(shape) != 2 or None in shape for shape in shapes):
        return None
    return [(count or 0, size or 0) for count, size in shapes]


def _layers_of_batches(value: Any, sizes: Sequence[tuple[int, int]]) -> list[Any] | None:
    """Return the layers of each batch, with the batch outside or inside of the layers; None if shapes do not fit."""
    if isinstance(value, dict):
        lists = {number: opened(layer) for number, layer in layers_of(value).items()}
        inner = [_layers_of_batches(layer, sizes) for layer in lists.values()]
        if not lists or any(layer is None for layer in inner):
            return None
        return [{n: layer[k][0] for n, layer in zip(lists, inner, strict=True) if layer} for k in range(len(sizes))]
    if not isinstance(value, list | tuple) or not value:
        return None
    shapes = [shape_of(item) for item in value]
    if [shape[-3:-1] for shape in shapes] == list(sizes) and {3, 4}.issuperset(map(len, shapes)):
        return [[v] if len(shape) == 3 else v for v, shape in zip(value, shapes, strict=True)]
    if len(sizes) > 1 and all(isinstance(opened(layer), list | tuple) for layer in value):
        return _layers_of_batches(dict(enumerate(value)), sizes)
    return None


# Other names


def with_graph(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Return a graph of PyTorch Geometric, x (S, D) and edge_index (2, E), as a trace of one layer."""
    x, index = shape_of(fields.get("x")), shape_of(fields.get("edge_index"), "i")
    names = [name for name in ("edge_weight", "edge_attr") if shape_of(fields.get(name))]
    if len(x) != 2 or index[:1] != (2,) or len(index) != 2 or not index[1] or len(names) != 1:
        return fields
    nodes = np.asarray(resolved(fields["edge_index"]))
    if "hidden_states" in fields or x[0] != int(nodes.max()) + 1:
        return fields
    rest = {k: v for k, v in fields.items() if k not in ("x", "edge_index", names[0])}
    edges = {"edge_index": nodes, "edge_weight": resolved(fields[names[0]])}
    return rest | {"hidden_states": [resolved(fields["x"])], "attentions": [edges]}


def with_weak_states(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Return fields whose only array of floats has a name such as X or features with it as hidden_states.

    Values that may be an id under an unknown name leave the names to --map.
    """
    if not any(isinstance(name, str) and WEAK.fullmatch(normalized(name)) for name in fields):
        return fields
    names = [name for name, value in fields.items() if len(shape_of(value)) > 1]
    if len(names) != 1 or not isinstance(names[0], str) or not WEAK.fullmatch(normalized(names[0])):
        return fields
    if not has_one_id(fields) and ids_in(fields):
        return fields
    return {("hidden_states" if name in names else name): value for name, value in fields.items()}


def _below_splits(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Return fields in which those of a split, such as X_train, y_train and ids_train, are a dict of their own."""
    names = names_of_splits(tuple(name for name in fields if isinstance(name, str)))
    if not names:
        return fields
    found: dict[Any, Any] = {key: value for key, value in fields.items() if key not in names}
    for name, (split, field) in names.items():
        found.setdefault(split, {})[field] = fields[name]
    return found


def spread_nested(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Return fields in which nested dicts of segments or of layers are spread to what `join_segments` and `assign` know.

    `{"hidden_states": {"prompt": a, "response": b}}` has the states of both, `{"layer_3": {"hidden": a, "attn": b}}`
    those of a layer. The fields of a split, such as X_train and y_train, become a dict of their own.
    """
    found: dict[Any, Any] = {}
    for key, value in _without_sections(_below_splits(fields)).items():
        inner = opened(value)
        if not isinstance(key, str) or not isinstance(inner, dict) or not all(isinstance(name, str) for name in inner):
            is_states = isinstance(inner, dict) and _are_layers(key, inner)
            is_states = is_states and not any(_is_states_name(name) for name in fields if name != key)
            found["hidden_states" if is_states else key] = value
            continue
        place, places = parse_path(normalized(key)), [parse_path(normalized(name)) for name in inner]
        segments = {p.segment for p in places if not p.field}
        if place.field and segments == {"prompt", "response"} and len(inner) == 2:
            found |= {f"{p.segment}_{place.field}": v for p, v in zip(places, inner.values(), strict=True)}
        elif place.layer is not None and not place.trace and any(p.field == "hidden_states" for p in places):
            for p, (name, v) in zip(places, inner.items(), strict=True):
                is_layer = p.field in ("hidden_states", "attentions") and p.layer is None
                found[f"{p.field}.{place.layer}" if is_layer else f"{key}.{name}"] = v
        else:
            found[key] = value
    return found


def _are_layers(name: Any, values: dict[Any, Any]) -> bool:
    """Return whether a dict such as layers holds one array for each number of a layer."""
    is_named = isinstance(name, str) and LISTS_OF_LAYERS.fullmatch(name) is not None
    return is_named and 0 < len(values) == len(layers_of(values)) and layout(values) is not None


def _without_sections(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Return fields without the dicts of sections, such as outputs and meta, if one of them holds the states and several are there.

    Keys that several sections have stay below them.
    """
    sections = {
        k: v for k, value in fields.items() if str(k).lower() in SECTIONS and isinstance(v := opened(value), dict)
    }
    states = [k for k, v in sections.items() if any(map(_is_states_name, v))]
    if len(sections) < 2 or len(states) != 1 or any(map(_is_states_name, fields)):
        return fields
    counts = Counter(name for values in (fields, *sections.values()) for name in values)
    found = {k: v for k, v in fields.items() if k not in sections}
    for key, values in sections.items():
        rest = {name: v for name, v in values.items() if counts[name] > 1}
        found |= {name: v for name, v in values.items() if counts[name] == 1} | ({key: rest} if rest else {})
        if key.lower() in OUTPUTS and isinstance(found.get("text"), str):
            found["generated_answer"] = found.pop("text")
    return found


def with_predictions(value: Any) -> Any:
    """Return the predictions of transformers' Trainer, a tuple with states (N, S, D) by layer, as a batch with a mask.

    The Trainer pads states with -100. Other values are returned unchanged.
    """
    items = opened(value.get("predictions")) if isinstance(value, dict) else None
    found: dict[str, list[np.ndarray]] = {}
    for item in items if isinstance(items, tuple | list) else ():
        shape = shape_of(item)
        name = {4: "hidden_states", 5: "attentions"}.get(len(shape))
        if name is not None and isinstance(item, tuple | list) and None not in shape:
            found.setdefault(name, [np.asarray(resolved(layer)) for layer in item])
    if "hidden_states" not in found:
        return value
    mask = (found["hidden_states"][0] != -100).any(axis=-1)
    return {k: v for k, v in value.items() if k != "predictions"} | found | {"attention_mask": mask}


# Prompt and response


def join_segments(trace: dict[Any, Any]) -> dict[Any, Any]:
    """Return a trace in which the states and tokens of prompt and response follow each other.

    Each has to be there once, as arrays of the same layers. Without that, the trace is returned unchanged.
    """
    found: dict[str, dict[str, str]] = {}
    for key in trace:
        place = parse_path(normalized(key)) if isinstance(key, str) else Place()
        if not place.segment or place.trace or place.layer is not None or place.token is not None:
            continue
        field = "tokens" if place.field in ("ids", "id", "tokens") else place.field
        if field in ("hidden_states", "tokens", "attentions"):
            if place.segment in found.setdefault(field, {}):
                return trace
            found[field][place.segment] = key
    if set(found.get("hidden_states", ())) != {"prompt", "response"} or "hidden_states" in trace:
        return trace
    values = {k: opened(v) for k, v in trace.items()}
    joined: dict[Any, Any] = {}
    for field, keys in found.items():
        pair = [values.get(keys.get(segment)) for segment in ("prompt", "response")]
        if field != "attentions" and all(p is not None for p in pair):
            joined[field] = _concatenated(pair, field)
    hidden = joined.get("hidden_states")
    if hidden is None:
        return trace
    shapes = [shape_of(values[found["hidden_states"][s]]) for s in ("prompt", "response")]
    counts = [shape[-2] or 0 for shape in shapes]
    if joined.get("tokens") is not None and len(joined["tokens"]) not in (sum(counts), sum(counts) + 1):
        return trace
    taken = {found[field][s] for field in joined for s in found[field] if joined[field] is not None}
    rest = {k: v for k, v in trace.items() if k not in taken}
    joined = {k: v for k, v in joined.items() if v is not None}
    return rest | joined | {"prompt_length": trace.get("prompt_length", counts[0])}


def _concatenated(pair: Sequence[Any], field: str) -> Any:
    """Return states or ids of prompt and response behind each other; None if their shapes do not fit."""
    if field == "tokens":
        ids = [
            np.asarray(v).reshape(-1) if np.ndim(v) in (1, 2) and np.size(v) == np.shape(v)[-1] else None for v in pair
        ]
        return None if any(v is None for v in ids) else np.concatenate(ids)  # type: ignore[arg-type]
    one, other = shapes = [shape_of(v) for v in pair]
    if any(len(shape) < 2 or None in shape for shape in shapes):
        return None
    if len(one) != len(other) or one[-1] != other[-1] or one[:-2] != other[:-2] or len(one) > 4:
        return None
    if len(one) == 2:
        return np.concatenate([np.asarray(resolved(v)) for v in pair])
    return join_tokens([np.stack([np.asarray(opened(layer)) for layer in v]) for v in pair])


def with_embedding(fields: dict[Any, Any]) -> dict[Any, Any]:
    """Return a record of an embedding service, or of a model of sentences, with its vector, or one per layer, as last_token."""
    shape = shape_of(fields.get("embedding"))
    if "last_token" in fields or "hidden_states" in fields or not (len(shape) == 1 or shape[1:-1] == (1,)):
        return fields
    vectors = np.asarray(resolved(fields["embedding"]), "f4")
    rest = {k: v for k, v in fields.items() if k != "embedding"}
    return rest | {"last_token": vectors.reshape(-1, vectors.shape[-1])}
