"""Describe the first traces of a file: what each key holds, which role it has, and what would be stored."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from tracestore.console import plural
from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.packing import PackOptions, packed_traces
from tracestore.ingest.pickles.pickled_objects import PickledObject
from tracestore.ingest.pickles.pickled_torch import PickledTensor
from tracestore.ingest.pickles.pickled_values import PickledArray
from tracestore.ingest.roles.assign import Assignment, assign, role_of
from tracestore.ingest.roles.columns import UNNAMED
from tracestore.ingest.roles.keys import KeyOptions
from tracestore.ingest.sources import SourceFile
from tracestore.store.format import schema
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.values import describe

# Roles of the keys of a preprocessed file, which holds all traces in one dict.
_WHOLE_FILE_ROLES = {"sequences": "last_token", "graphs": "hidden_states, edges", "labels": "label"}
_WHOLE_FILE_ROLES |= {"question_ids": "question_id"}
_MAX_KEYS = 200
_NUM_LAYERS = re.compile(r"(?:num_|n_)(?:hidden_)?layers?|layers?_count", re.IGNORECASE)
# Keys without which a trace is stored, but less useful: what the store has instead.
_USEFUL = {
    "tokens": "the store has no token ids",
    "tokens_decoded": "viewers show no texts of tokens",
    "question_id": "the name of the file becomes the id, with the position if there are several traces",
    "answer": "generated_answer_clean, generated_answer or generated_text: the store has no answers",
}


@dataclass(frozen=True)
class KeyFound:
    """A key of a trace: what it holds, and its role."""

    key: str
    found: str
    role: str


@dataclass
class Inspection:
    """Describe the first traces of a source.

    Attributes
    ----------
    keys : list of KeyFound
        Keys of the first trace, and of later ones those that it does not have.
    missing : dict[str, str]
        Fields that the first trace lacks, and what follows from that.
    stored : list of str
        What would be stored of each trace that was read.
    refused : InvalidInputError or None
        Why reading ended.
    """

    keys: list[KeyFound] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    refused: InvalidInputError | None = None


def inspect_source(
    source: SourceFile, options: PackOptions, max_traces: int, on_packed: Callable[[PackedTrace], None]
) -> Inspection:
    """Read and pack the first traces of a source, and describe them; each is given to `on_packed`."""
    found = Inspection()
    seen: set[str] = set()

    def on_trace(position: int, values: Any) -> None:
        for key in _keys(values, options.keys, is_first=position == 0, missing=found.missing):
            if key.key not in seen and len(seen) < _MAX_KEYS:
                seen.add(key.key)
                found.keys.append(key)

    try:
        with closing(packed_traces(source, options, on_trace=on_trace)) as traces:  # type: ignore[type-var]
            for packed in islice(traces, max_traces):
                if (text := _one_layer_of_several(packed)) is not None:
                    found.missing["layers"] = text
                found.stored.append(_stored(packed))
                on_packed(packed)
                dropped = set(map(_name, packed.record.dropped or ()))
                found.keys = [replace(key, role="dropped") if key.key in dropped else key for key in found.keys]
    except InvalidInputError as error:
        found.refused = error.with_location(source=source.name)
    return found


def _keys(values: Any, options: KeyOptions, *, is_first: bool, missing: dict[str, str]) -> list[KeyFound]:
    """Return the keys of a trace, or of a file that holds all traces in one dict."""
    if not isinstance(values, Mapping):
        return []
    if "graphs" in values or ("sequences" in values and "hidden_states" not in values):
        return [KeyFound(_name(k), describe_value(v), _WHOLE_FILE_ROLES.get(k, "not read")) for k, v in values.items()]
    try:
        found = assign(values, options, has_objects=True)
    except InvalidInputError:
        found = Assignment({key: value for key, value in values.items() if isinstance(key, str)})
    if is_first:
        roles = {role_of(key, found) for key in found.fields}
        answers = {"answer"} if roles & set(schema.ANSWER_FIELDS) else set()
        missing |= {name: text for name, text in _USEFUL.items() if name not in roles | answers}
        labels = [
            key for key, value in values.items() if str(key).startswith(UNNAMED) and isinstance(value, int | float)
        ]
        if labels and "label" not in roles:
            missing["label"] = f"if 1 in {labels[0]} means a hallucinated answer: --map label={labels[0]}"
    keys = [KeyFound(_name(key), describe_value(value), role_of(str(key), found)) for key, value in values.items()]
    return keys + [KeyFound(_name(path), "not data", "dropped") for path in found.dropped if path not in values]


def _one_layer_of_several(packed: PackedTrace) -> str | None:
    """Return what to add if a vector is stored as one layer, and may hold as many as a key of the trace says."""
    if packed.num_tokens or packed.num_layers > 1:
        return None
    size = packed.hidden_dim
    for key, value in json.loads(packed.extras or "{}").items():
        if _NUM_LAYERS.fullmatch(key) and isinstance(value, int) and value > 1 and size % value == 0:
            dim = size // value
            return f"stored as one layer of {size:,} values; if {key} of {dim:,} lie behind each other, add a key hidden_size"
    return None


def _name(key: Any) -> str:
    return escape_unprintable(str(key), 60)


def describe_value(value: Any, depth: int = 0) -> str:
    """Return kind, dtype and shape of a value in a few words."""
    if isinstance(value, PickledTensor):
        return f"{'bfloat16' if value.dtype == schema.BFLOAT16 else value.dtype.name} {value.size}"
    if isinstance(value, PickledArray):
        value = value.array
    if isinstance(value, PickledObject):
        return f"object of {escape_unprintable(value.name, 100)}"
    if isinstance(value, np.ndarray):
        return describe(value).replace(" of shape", "")
    if isinstance(value, list | tuple):
        if not value or depth > 2:
            return f"list of {len(value)}"
        first = describe_value(value[0], depth + 1)
        return f"list of {len(value):,}: {first}"
    if isinstance(value, Mapping):
        names = ", ".join(_name(key) for key in list(value)[:6])
        return f"dict of {len(value):,}: {names}"
    names_of_types = {str: "text", bool: "bool", type(None): "None"}
    return names_of_types.get(type(value), type(value).__name__.removeprefix("Pickled"))


def _stored(packed: PackedTrace) -> str:
    """Return what a store gets of a trace."""
    record = packed.record
    parts = [f"question_id {escape_unprintable(record.question_id, 60)!r}"]
    if not record.has_own_id and record.question_id.endswith(f":{record.position}"):
        parts[0] += " (made up)"
    if record.sample:
        parts.append(f"sample {record.sample}")
    parts.append(f"L {packed.num_layers}")
    if packed.num_tokens:
        parts.append(f"S {packed.num_tokens}")
    parts.append(f"D {packed.hidden_dim} {packed.hidden_dtype}")
    if record.tokens is not None:
        parts.append(plural(len(record.tokens), "token"))
    layout = schema.LAYOUT_NAMES.get(packed.layout)
    if layout is not None:
        heads = "" if packed.num_heads is None else f" of {plural(packed.num_heads, 'head')}"
        parts.append(f"{layout} attention{heads} {packed.attention_dtype}")
    if record.layer_ids is not None:
        parts.append(f"layers {', '.join(map(str, record.layer_ids))}"[:60])
    parts += [f"score {escape_unprintable(name, 60)} {score:g}" for name, score in record.scores.items()]
    if record.label is not None:
        parts.append(f"label {record.label:g}")
    if record.is_without_embeddings:
        parts.append("without the embeddings")
    if packed.rounded_from is not None:
        parts.append(f"rounded from {packed.rounded_from}")
    return ", ".join(parts)
