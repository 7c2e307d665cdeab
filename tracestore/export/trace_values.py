"""The values of a trace under the names of the pickle schema: arrays, and one row of a table."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.store.format import schema
from tracestore.store.format.labels import SCORE_COLUMNS
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace
from tracestore.store.trace_fields import PackedEdges
from tracestore.store.write.field_values import encode_value, extras_json

# Fields of a row that hold JSON: values that a table of plain numbers and texts lacks.
JSON_FIELDS = ("spans", "extras")


def arrays_of(store: TraceStore, trace: Trace) -> dict[str, tuple[np.ndarray, str]]:
    """Return the arrays of a trace by field, each with the name of its dtype; bfloat16 arrays are raw bits.

    hidden_states (L, S, D), attentions (L, H, S, S) with H = 1 for a stored head mean, tokens (T,) and the fields
    per token. A trace of a store of edges has edge_ptr (L + 1,), edge_index (E, 2) and edge_weight (E,) instead of attentions.
    last_token (L, D) is there only if hidden_states does not end with it.
    """
    found: dict[str, tuple[np.ndarray, str]] = {}
    if trace.num_tokens:
        found["hidden_states"] = trace.hidden_states_bits, store.hidden_dtype
    if trace.attention_layout == "edges":
        packed = trace.attention_packed_bits
        assert isinstance(packed, PackedEdges)
        found["edge_ptr"], found["edge_index"] = (packed.ptr, "int64"), (packed.edge_index, "int32")
        found["edge_weight"] = packed.weight, store.attention_dtype
    elif trace.attention_layout is not None:
        dense = trace.attention_bits
        found["attentions"] = dense if dense.ndim == 4 else dense[:, None], store.attention_dtype
    return found | small_arrays(store, trace)


def small_arrays(store: TraceStore, trace: Trace) -> dict[str, tuple[np.ndarray, str]]:
    """Return the arrays of `arrays_of` except hidden states and attention."""
    found: dict[str, tuple[np.ndarray, str]] = {}
    if not trace.num_tokens or trace.last_token_bits.tobytes() != trace.hidden_states_bits[:, -1].tobytes():
        found["last_token"] = trace.last_token_bits, store.hidden_dtype
    numbers = {"tokens": trace.tokens} | {name: trace.optional(name) for name in schema.TOKEN_FIELDS}
    return found | {name: (a, a.dtype.name) for name, a in numbers.items() if a is not None}


def row_of(store: TraceStore, trace: Trace) -> dict[str, Any]:
    """Return the texts, numbers, label, scores and group of a trace that it has.

    The default score is in the column of its direction, another named score in score_NAME. `provenance` is a
    position in `store.provenance`. The fields of JSON_FIELDS are text, encoded as docs/format.md describes extras.
    """
    scores = {name: trace.scores.get(name) for name in score_columns(store).values()}
    row: dict[str, Any] = {name: getattr(trace, name) for name in ("question_id", "sample", "num_tokens")}
    row["source"], row["source_position"] = trace.source
    row["provenance"] = None if trace.provenance is None else store.provenance.index(trace.provenance)
    row["edges_reversed"] = True if trace.attention_layout == "edges" and trace.has_reversed_edges else None
    row |= {column: scores[name] for column, name in score_columns(store).items()}
    row |= {"label": trace.label, "group": trace.group or None, "prompt_length": trace.prompt_length}
    row |= {name: trace.text(name) for name in schema.TEXT_FIELDS} | {"tokens_decoded": trace.tokens_decoded}
    row |= {name: v for name, v in trace.optional_fields.items() if name not in schema.TOKEN_FIELDS}
    spans, extras = trace.optional("spans"), trace.extras
    row["spans"] = None if spans is None else json.dumps(json.loads(extras_json({"spans": spans}))["spans"])
    row["extras"] = extras_json(extras) or None
    return {name: value for name, value in row.items() if value is not None and value == value}


def score_columns(store: TraceStore) -> dict[str, str]:
    """Return the named score that each column of scores holds."""
    default = store.score_name
    if default is None:
        return {}
    others = {f"score_{name}": name for name in sorted(store.score_fields) if name != default}
    return {SCORE_COLUMNS[store.score_direction]: default} | others


def json_line(store: TraceStore, trace: Trace, file: str, arrays: Sequence[str]) -> str:
    """Return a line of JSON Lines for a trace in a file: its row, and those of `arrays` that it has.

    Arrays, and infinite numbers, which JSON lacks, are encoded as docs/format.md describes extras.
    """
    row = {"file": file} | row_of(store, trace)
    values = {name: json.loads(value) if name in JSON_FIELDS else value for name, value in row.items()}
    small = small_arrays(store, trace) if arrays else {}
    for name, (array, dtype) in ((name, small[name]) for name in arrays if name in small):
        values[name] = array.view(schema.BFLOAT16) if dtype == "bfloat16" else array
    for name, value in values.items():
        if isinstance(value, float | np.ndarray):
            values[name] = encode_value(value, name, [sys.maxsize])
    return json.dumps(values)
