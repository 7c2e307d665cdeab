"""Read the data files of an export: arrays from the file, everything else from its lines of the table.

No key is guessed: the result is the record that the exported trace was made from. The table is checked like any input.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.exports.export_manifest import TABLE_FILE, ExportedFile
from tracestore.ingest.exports.preprocessed import read_preprocessed
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group, Items, Value
from tracestore.store.format import schema
from tracestore.store.format.extra_fields import decode_extras
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.field_values import as_array, describe, field_error, optional_fields
from tracestore.store.write.record import PER_TOKEN, TraceRecord, record_from_dict

# Fields of a line that `record_from_dict` checks, besides those with a value per token.
_PLAIN = ("question_id", "sample", "tokens_decoded", "prompt_length", *schema.TEXT_FIELDS)
_PER_TOKEN = ("tokens", "tokens_decoded")
# What is read from a data file; the rest is in the lines.
_ARRAYS = {"hidden_states", "attentions", "last_token", "edge_ptr", "edge_index", "edge_weight"}
_ARRAYS |= {"tokens", "question_id", *schema.TOKEN_FIELDS}
_MAX_LINE_BYTES = 1 << 30

Arrays = Mapping[str, Any]
Line = dict[str, Any]


def read_exported(
    exported: ExportedFile, source_name: str, scratch: Scratch, *, need_attention: bool | None
) -> Iterator[TraceRecord]:
    """Yield the traces of a data file in order.

    Raises
    ------
    InvalidInputError
        If the file and its lines of the table do not belong together, or one of them is damaged.
    """
    lines, count = _lines(exported), 0
    for arrays in _READERS[exported.facts.manifest.format](exported.path, scratch):
        line = next(lines, None)
        if line is None:
            raise InvalidInputError(f"holds more than the {count:,} traces that the export lists")
        yield _record(exported, arrays, line, count, source_name, need_attention)
        del arrays
        count += 1
    if count < exported.file.num_traces:
        raise InvalidInputError(f"holds {count:,} traces, expected {exported.file.num_traces:,}")


def _lines(exported: ExportedFile) -> Iterator[Line]:
    """Yield the lines of the table for the traces of a file."""
    with open(exported.facts.folder / TABLE_FILE, "rb") as file:
        file.seek(exported.file.table_begin)
        for _ in range(exported.file.num_traces):
            try:
                line = json.loads(file.readline(_MAX_LINE_BYTES))
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                raise InvalidInputError(f"{TABLE_FILE}: damaged; export the store again")
            extras = line.pop("extras", {})
            if not isinstance(extras, dict):
                raise InvalidInputError(f"{TABLE_FILE}: extras: found {type(extras).__name__}, expected an object")
            yield decode_extras(line) | {"extras": decode_extras(extras)}


def _record(
    exported: ExportedFile, arrays: Arrays, line: Line, position: int, source_name: str, need_attention: bool | None
) -> TraceRecord:
    _check_id(exported, arrays, line, position)
    values, hidden = _values(arrays, line), arrays.get("hidden_states")
    last = as_array(arrays.get("last_token", line.get("last_token")))
    optional = {name: values.pop(name) for name in schema.OPTIONAL_FIELDS if name in values}
    edges = arrays.get("edges") if "edge_ptr" not in arrays else _edges(arrays, line)
    per_token = {name: values.pop(name) for name in values.keys() & _PER_TOKEN} if hidden is None else {}
    if hidden is not None and last is not None and last.dtype == np.float32 and hidden[0].dtype == schema.BFLOAT16:
        last = (last.view("<u4") >> 16).astype("<u2").view(schema.BFLOAT16)  # the table has it as float32
    attention = arrays.get("attentions") if edges is None and hidden is not None else None
    layers = {"hidden_states": hidden, "attentions": attention}
    states: dict[str, Any] = {name: None if found is None else list(found) for name, found in layers.items()}
    states |= {"edges": edges, "last_token": last}
    record = record_from_dict(
        values | states, source_name=source_name, position=position, need_attention=need_attention
    )
    _set_tokens(record, per_token)
    record.optional = optional_fields(optional, record.num_ids, record.answer)
    record.extras = line["extras"]
    record.edges_reversed = bool(line.get("edges_reversed"))
    record.is_head_mean = record.attention is not None and exported.facts.is_head_mean
    record.is_borrowed = exported.facts.manifest.format == "datasets"
    if exported.has_values:
        _set_values(record, exported, line)
    return record


def _values(arrays: Arrays, line: Line) -> dict[str, Any]:
    """Return the values of a trace that are no states; those of tokens that the files lack become extras."""
    values = {name: arrays[name] for name in arrays if name in ("tokens", *schema.TOKEN_FIELDS)}
    values |= {name: value for name, value in line.items() if name in (*_PLAIN, *schema.OPTIONAL_FIELDS, "tokens")}
    if "hidden_states" not in arrays and "tokens" not in values:
        line["extras"] |= {name: values.pop(name) for name in PER_TOKEN if name in values}
    return values


def _check_id(exported: ExportedFile, arrays: Arrays, line: Line, position: int) -> None:
    """Raise InvalidInputError if the trace of a file is not that of its line."""
    if exported.facts.manifest.format == "datasets":  # its texts have no lone surrogates
        return
    if arrays.get("question_id", line.get("question_id")) != line.get("question_id"):
        raise InvalidInputError(f"holds another trace than its line of {TABLE_FILE}", position=position)


def _set_tokens(record: TraceRecord, given: dict[str, Any]) -> None:
    """Set the tokens of a trace without hidden states, of which there may be any number."""
    if "tokens" in given:
        tokens = as_array(given["tokens"])
        if tokens is None or tokens.ndim != 1 or tokens.dtype != np.int32:
            raise field_error("tokens", describe(given["tokens"]), "(T,) int32")
        record.tokens = tokens
    texts = given.get("tokens_decoded")
    if texts is not None:
        if not isinstance(texts, list) or len(texts) != record.num_ids or not all(isinstance(t, str) for t in texts):
            raise field_error("tokens_decoded", "other texts", "a text for each token")
        record.tokens_decoded = texts


def _edges(arrays: Arrays, line: Line) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return indices (2, E) and weights (E,) of each layer, in the direction of the original source."""
    index, weight, ptr = (np.asarray(arrays[name]) for name in ("edge_index", "edge_weight", "edge_ptr"))
    if not index.size:  # an empty list of Parquet has no type
        index = np.empty((0, 2), "<i4")
    index, weight = index.reshape(-1, 2), weight.reshape(-1)
    steps = np.diff(ptr, prepend=0)
    if ptr.ndim != 1 or not len(ptr) or ptr[0] or (steps < 0).any() or not ptr[-1] == len(index) == len(weight):
        raise field_error("edge_ptr", "other numbers", f"offsets of {len(index)} edges")
    step = -1 if line.get("edges_reversed") else 1
    return [(index[begin:end, ::step].T, weight[begin:end]) for begin, end in itertools.pairwise(ptr.tolist())]


def _set_values(record: TraceRecord, exported: ExportedFile, line: Line) -> None:
    """Set the label, the scores and the group of a record."""
    columns = exported.facts.manifest.score_columns
    record.scores = {columns[name]: _number(line, name) for name in columns if line.get(name) is not None}
    record.label = None if line.get("label") is None else _number(line, "label")
    group = line.get("group", "")
    if not isinstance(group, str):
        raise field_error("group", type(group).__name__, "a text")
    record.group = group


def _number(line: Line, name: str) -> float:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise field_error(name, f"{value!r:.40}", "a number")
    return float(value)


def _groups(path: Path, scratch: Scratch) -> Iterator[Arrays]:
    """Yield the arrays of the traces of a file, which are items of a list, rows, or one group."""
    with open_tree(path, scratch=scratch) as root:
        for group in root if isinstance(root, Items) else (root,):
            if not isinstance(group, Group):
                raise InvalidInputError("not a file that export writes")
            found = {name: _array(group[name]) for name in group if name in _ARRAYS}
            del group
            yield {name: value for name, value in found.items() if value is not None}


def _array(value: Value) -> Any:
    """Return an array, a text, or the list of the arrays of the layers; None for other values."""
    if isinstance(value, Items) and not value.is_stream:
        layers = [layer.read() for layer in value if isinstance(layer, Array)]
        return layers if len(layers) == value.length else None
    return value.read() if isinstance(value, Array) else value if isinstance(value, str) else None


def _preprocessed(path: Path, scratch: Scratch) -> Iterator[Arrays]:
    """Yield the traces of a .pt file of last tokens or graphs."""
    for record in read_preprocessed(path, scratch, None):
        found = {"hidden_states": record.hidden, "edges": record.edges, "last_token": record.last_token}
        yield {name: value for name, value in found.items() if value is not None} | {"question_id": record.question_id}


_READERS: dict[str, Callable[[Path, Scratch], Iterator[Arrays]]] = {
    **dict.fromkeys(("pkl", "safetensors", "datasets"), _groups),
    **dict.fromkeys(("pt-lstm", "pt-gnn"), _preprocessed),
}
