"""Read preprocessed files: a dict of `sequences`, the last tokens of N traces, or of `graphs`, one list per trace."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, OnRefused, error_location
from tracestore.ingest.execute.values import array_of, describe, plain_of
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Array, Group, Items, Value
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.field_values import field_error, label_value
from tracestore.store.write.record import TraceRecord, question_id_text
from tracestore.store.write.states import edges_of, layers_of

_GRAPH_ARRAYS = ("x", "edge_index", "edge_attr")
_NUM_AXES = {"sequences": (3,), "x": (2,), "edge_index": (2,), "edge_attr": (1, 2)}


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
    sequences = layers_of(_array(root, "sequences"), "sequences", 2, "(L, D)")
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
        x, index, weight = (_array(layer, name, f"{where}.") for name in _GRAPH_ARRAYS)
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
            extras.setdefault(name, [None] * layers.length)[k] = plain_of(layer[name], array_of)
    hidden, edges = layers_of(hidden, "graphs", 2, "(S, D)"), edges_of(edges, len(hidden))
    return TraceRecord(question_id="", hidden=hidden, edges=edges, edges_reversed=None, extras=extras, dropped=[])


def _required(group: Group, name: str, where: str = "") -> Value:
    value = group.get(name)
    if value is None:
        raise InvalidInputError("missing key", field=f"{where}{name}")
    return value


def _array(group: Group, name: str, where: str = "") -> np.ndarray:
    value = _required(group, name, where)
    if not isinstance(value, Array) or value.ndim not in _NUM_AXES[name]:
        raise field_error(f"{where}{name}", describe(value), f"an array of {_NUM_AXES[name][-1]} axes")
    return value.read()
