"""Read the data files of an export, and files of the layouts `sequences` and `graphs`.

Of an export, arrays come from the file and everything else from its lines of the table, which are checked like any
input. No key is guessed: the result is the record that the exported trace was made from.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, OnRefused, error_location
from tracestore.ingest.execute.values import describe, plain_of
from tracestore.ingest.exports.export_manifest import TABLE_FILE, ExportedFile
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group, Items, Value
from tracestore.store.format import schema
from tracestore.store.format.extra_fields import decode_extras
from tracestore.store.io.scratch import Scratch
from tracestore.store.write import field_values
from tracestore.store.write.field_values import as_array, field_error, label_value, optional_fields
from tracestore.store.write.record import PER_TOKEN, TraceRecord, question_id_text, record_from_dict
from tracestore.store.write.states import edges_of, layers_of

# Fields of a line that `record_from_dict` checks, besides those with a value per token.
_PLAIN = ("question_id", "sample", "tokens_decoded", "prompt_length", *schema.TEXT_FIELDS)
_PER_TOKEN = ("tokens", "tokens_decoded")
# What is read from a data file; the rest is in the lines.
_ARRAYS = {"hidden_states", "attentions", "last_token", "edge_ptr", "edge_index", "edge_weight"}
_ARRAYS |= {"tokens", *schema.TOKEN_FIELDS}
_MAX_LINE_BYTES = 1 << 30

Arrays = Mapping[str, Any]
Line = dict[str, Any]
_GRAPH_ARRAYS = ("x", "edge_index", "edge_attr")
_NUM_AXES = {"sequences": (3,), "x": (2,), "edge_index": (2,), "edge_attr": (1, 2)}


def read_exported(
    exported: ExportedFile, source_name: str, scratch: Scratch, *, need_attention: bool | None
) -> Iterator[TraceRecord]:
    """Yield the traces of a data file in order.

    Raises
    ------
    InvalidInputError
        If the file is not that of the export, or it or the table is damaged.
    """
    exported.check()
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


def _set_tokens(record: TraceRecord, given: dict[str, Any]) -> None:
    """Set the tokens of a trace without hidden states, of which there may be any number."""
    if "tokens" in given:
        tokens = as_array(given["tokens"])
        if tokens is None or tokens.ndim != 1 or tokens.dtype != np.int32:
            raise field_error("tokens", field_values.describe(given["tokens"]), "(T,) int32")
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
        yield {name: value for name, value in found.items() if value is not None}


_READERS: dict[str, Callable[[Path, Scratch], Iterator[Arrays]]] = {
    **dict.fromkeys(("pkl", "safetensors", "datasets"), _groups),
    **dict.fromkeys(("pt-lstm", "pt-gnn"), _preprocessed),
}


def read_preprocessed(path: Path, scratch: Scratch, on_refused: OnRefused = None) -> Iterator[TraceRecord]:
    """Yield the records of a file of sequences or graphs.

    Parameters
    ----------
    path : Path
    scratch : Scratch
        Files for what does not fit into memory.
    on_refused : callable, optional
        Called with the error of each graph that is refused. By default it is raised.

    Raises
    ------
    InvalidInputError
        If the file is damaged or holds neither of them.
    """
    with open_tree(path, scratch=scratch) as root:
        if isinstance(root, Group) and "sequences" in root:
            yield from _read_sequences(root)
        elif isinstance(root, Group) and "graphs" in root:
            yield from _read_graphs(root, on_refused)
        else:
            raise InvalidInputError("found neither sequences nor graphs")


def _read_sequences(root: Group) -> Iterator[TraceRecord]:
    sequences = layers_of(_array_of(root, "sequences"), "sequences", 2, "(L, D)")
    labels = _column(root, "labels", label_value, len(sequences))
    for position, question_id in enumerate(_column(root, "question_ids", question_id_text, len(sequences))):
        yield TraceRecord(question_id, position=position, last_token=sequences[position], label=labels[position])


def _read_graphs(root: Group, on_refused: OnRefused) -> Iterator[TraceRecord]:
    graphs = root["graphs"]
    if not isinstance(graphs, Items) or not graphs.length:
        raise field_error("graphs", describe(graphs), "a list with one list of layers per trace")
    ids = _column(root, "question_ids", question_id_text, graphs.length)
    labels = _column(root, "labels", label_value, graphs.length) if "labels" in root else [None] * graphs.length
    for position in range(graphs.length):
        try:
            with error_location(position=position):
                record = _graph_record(graphs[position])
        except InvalidInputError as error:
            if on_refused is None:
                raise
            on_refused(error)
            continue
        record.question_id, record.position, record.label = ids[position], position, labels[position]
        yield record


def _column(root: Group, name: str, value_of: Callable[[Any, str], Any], count: int) -> list[Any]:
    """Return the value of each of `count` traces."""
    values = plain_of(_required(root, name))
    if not isinstance(values, list) or len(values) != count:
        raise field_error(name, describe(root[name]), f"{count} values, one per trace")
    found = []
    for position, value in enumerate(values):
        with error_location(position=position):
            found.append(value_of(value, name))
    return found


def _graph_record(layers: Value) -> TraceRecord:
    """Return the record of one trace, without its id, position and label."""
    if not isinstance(layers, Items) or not layers.length:
        raise field_error("graphs", describe(layers), "a list of at least one layer")
    hidden: list[np.ndarray] = []
    edges: list[tuple[np.ndarray, np.ndarray]] = []
    extras: dict[str, list[Any]] = {}
    for k, layer in enumerate(layers):
        where = f"graphs[{k}]"
        if not isinstance(layer, Group):
            raise field_error(where, describe(layer), "a PyG Data")
        x, index, weight = (_array_of(layer, name, f"{where}.") for name in _GRAPH_ARRAYS)
        hidden.append(x)
        edges.append((index, weight))
        if not x.size or x.shape != hidden[0].shape:
            raise field_error(f"{where}.x", f"shape {x.shape}", "at least one token and column, as many as in layer 0")
        count = layer.get("num_nodes")
        if count is not None and (not isinstance(count, int) or count != len(x)):
            raise field_error(f"{where}.num_nodes", str(count)[:40], str(len(x)))
        for name in layer:
            if name in (*_GRAPH_ARRAYS, "num_nodes"):
                continue
            if not isinstance(name, str):
                raise field_error(where, "a key that is not a string", "the fields of a PyG Data")
            extras.setdefault(name, [None] * layers.length)[k] = plain_of(layer[name], lambda array: array.read())
    hidden, edges = layers_of(hidden, "graphs", 2, "(S, D)"), edges_of(edges, len(hidden))
    return TraceRecord(question_id="", hidden=hidden, edges=edges, edges_reversed=None, extras=extras, dropped=[])


def _required(group: Group, name: str, where: str = "") -> Value:
    value = group.get(name)
    if value is None:
        raise InvalidInputError("missing key", field=f"{where}{name}")
    return value


def _array_of(group: Group, name: str, where: str = "") -> np.ndarray:
    value = _required(group, name, where)
    if not isinstance(value, Array) or value.ndim not in _NUM_AXES[name]:
        raise field_error(f"{where}{name}", describe(value), f"an array of {_NUM_AXES[name][-1]} axes")
    return value.read()
