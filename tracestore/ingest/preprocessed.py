"""Read preprocessed .pt files: a dict of `sequences`, the last tokens of N traces, or of `graphs`."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError, error_location
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.pickles.pickled_torch import PickledGraph
from tracestore.ingest.pickles.resolve import resolve
from tracestore.store.format import schema
from tracestore.store.write.record import TraceRecord, question_id_text
from tracestore.store.write.values import field_error, label_value


def _ids(limits: Limits, root: dict[str, Any], count: int, unit: str) -> list[str]:
    if "question_ids" not in root:
        raise InvalidInputError("missing key", field="question_ids")
    ids = resolve(root["question_ids"], limits)
    if isinstance(ids, np.ndarray) and ids.ndim == 1:
        ids = ids.tolist()
    if not isinstance(ids, list):
        raise field_error("question_ids", type(ids).__name__, "a list of ids")
    if len(ids) != count:
        raise field_error("question_ids", f"{len(ids)} ids", f"{count}, one per {unit}")
    texts = []
    for position, value in enumerate(ids):
        with error_location(position=position):
            texts.append(question_id_text(value, "question_ids"))
    return texts


def _labels(limits: Limits, root: dict[str, Any], count: int) -> list[float | None]:
    labels = resolve(root["labels"], limits)
    try:
        values = np.asarray(labels, dtype="<f8")
    except (TypeError, ValueError):
        raise field_error("labels", type(labels).__name__, f"({count},) numbers") from None
    if values.size != count or max(values.shape, default=0) not in (0, count):
        raise field_error("labels", _found(values), f"({count},)")
    found = []
    for position, value in enumerate(values.reshape(-1).tolist()):
        with error_location(position=position):
            found.append(label_value(value, "labels"))
    return found


def _found(value: Any) -> str:
    """Return the shape of an array or the type of another value, for error messages."""
    return f"shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _float_array(value: Any, field: str, ndim: int, text: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.ndim != ndim:
        raise field_error(field, _found(value), text)
    try:
        schema.dtype_name(value.dtype)
    except ValueError:
        raise field_error(field, f"dtype {value.dtype.name}", "float16, float32 or bfloat16") from None
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def read_sequences(limits: Limits, root: dict[str, Any]) -> Iterator[TraceRecord]:
    """Read a dict of `sequences`, the last token of every layer."""
    sequences = _float_array(resolve(root["sequences"], limits), "sequences", 3, "(N, L, D)")
    if 0 in sequences.shape:
        raise field_error("sequences", f"shape {sequences.shape}", "(N, L, D) with no axis of length 0")
    if "labels" not in root:
        raise InvalidInputError("missing key", field="labels")
    labels = _labels(limits, root, len(sequences))
    for position, question_id in enumerate(_ids(limits, root, len(sequences), "sequence")):
        yield TraceRecord(
            question_id=question_id, position=position, last_token=sequences[position], label=labels[position]
        )


def read_graphs(
    limits: Limits, root: dict[str, Any], on_refused: Callable[[InvalidInputError], None]
) -> Iterator[TraceRecord]:
    """Read a dict of `graphs`, one PyG Data per layer, with or without labels.

    `on_refused` is called with the error of a trace; reading continues unless it raises.
    """
    graphs = root["graphs"]
    if not isinstance(graphs, list | tuple) or len(graphs) == 0:
        raise field_error("graphs", type(graphs).__name__, "a list with one list of layers per trace")
    ids = _ids(limits, root, len(graphs), "trace")
    labels = _labels(limits, root, len(graphs)) if "labels" in root else [None] * len(graphs)
    for position, layers in enumerate(graphs):
        try:
            with error_location(position=position):
                record = _graph_record(limits, layers)
        except InvalidInputError as error:
            on_refused(error)
            continue
        record.question_id, record.position, record.label = ids[position], position, labels[position]
        yield record


def _graph_record(limits: Limits, layers: Any) -> TraceRecord:
    """Return the record of one trace, without its id, position and label."""
    if not isinstance(layers, list | tuple) or len(layers) == 0:
        raise field_error("graphs", type(layers).__name__, "a list of at least one layer")
    hidden: list[np.ndarray] = []
    edges: list[tuple[np.ndarray, np.ndarray]] = []
    extras: dict[str, list[Any]] = {}
    for k, layer in enumerate(layers):
        where = f"graphs[{k}]"
        fields = _graph_fields(limits, layer, where)
        x = _float_array(fields.pop("x"), f"{where}.x", 2, "(S, D)")
        if 0 in x.shape:
            raise field_error(f"{where}.x", f"shape {x.shape}", "at least one token and one column")
        first = hidden[0] if hidden else x
        if x.shape != first.shape or x.dtype != first.dtype:
            raise field_error(f"{where}.x", f"{x.dtype} {x.shape}", f"{first.dtype} {first.shape} as in layer 0")
        nodes = fields.pop("num_nodes", len(x))
        if nodes is not None and (not isinstance(nodes, int | np.integer) or int(nodes) != len(x)):
            raise field_error(f"{where}.num_nodes", str(nodes)[:40], str(len(x)))
        hidden.append(x)
        edges.append(_edges(fields.pop("edge_index"), fields.pop("edge_attr"), where))
        for name, value in fields.items():
            extras.setdefault(name, [None] * len(layers))[k] = value
    return TraceRecord(question_id="", hidden=hidden, edges=edges, extras=extras, dropped=[])


def _graph_fields(limits: Limits, layer: Any, where: str) -> dict[str, Any]:
    """Return the fields of the graph of one layer."""
    if not isinstance(layer, PickledGraph | dict):
        raise field_error(where, type(layer).__name__, "a PyG Data")
    fields = layer.fields() if isinstance(layer, PickledGraph) else layer
    if not all(isinstance(name, str) for name in fields):
        raise field_error(where, "a key that is not a string", "the fields of a PyG Data")
    fields = {name: resolve(v, limits) for name, v in fields.items()}
    for name in ("x", "edge_index", "edge_attr"):
        if fields.get(name) is None:
            raise InvalidInputError("missing key", field=f"{where}.{name}")
    return fields


def _edges(index: Any, weight: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes (2, E) and the weights (E,) of edges."""
    if not isinstance(index, np.ndarray) or index.ndim != 2 or index.shape[0] != 2 or index.dtype.kind not in "iu":
        raise field_error(f"{where}.edge_index", _found(index), "(2, E) integers")
    if not isinstance(weight, np.ndarray) or weight.shape not in ((index.shape[1], 1), (index.shape[1],)):
        raise field_error(f"{where}.edge_attr", _found(weight), f"({index.shape[1]}, 1)")
    return index, _float_array(weight.reshape(-1), f"{where}.edge_attr", 1, "(E, 1)")
