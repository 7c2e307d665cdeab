"""Traces in the layouts of the input files: dicts in pickles, and .pt files of tensors or graphs."""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal, get_args

import numpy as np

from tracestore.errors import InvalidInputError, UsageError
from tracestore.export import safetensors_file
from tracestore.ingest.exports.export_manifest import DATA_FOLDER
from tracestore.store.format import schema
from tracestore.store.format.extra_fields import decode_list
from tracestore.store.format.labels import CORRECT, DEFAULT_SCORE_NAME, SCORE_COLUMNS, is_in_unit_range, used_scores
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace
from tracestore.store.trace_fields import PackedEdges
from tracestore.store.vocabulary import SCORES, is_verdict
from tracestore.store.write.record import TraceRecord

ExportFormat = Literal["pkl", "pt-lstm", "pt-gnn", "safetensors", "datasets"]
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
# Fields of a PyG Data that are not extras.
_GRAPH_ARRAYS = ("x", "edge_index", "edge_attr")


class PickleListWriter:
    """Writes one pickled list item by item, in the memory of one item."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # Protocol 3 has no frames, so items that were pickled alone can be concatenated. Each stores
        # its own objects in the memo before it loads them.
        self._file.write(pickle.PROTO + b"\x03" + pickle.EMPTY_LIST + pickle.MARK)

    def append(self, item: dict[str, Any]) -> None:
        """Write one item."""
        self._file.write(memoryview(pickle.dumps(item, protocol=3))[2:-1])

    def finish(self) -> None:
        """Write the end of the list. The file stays open."""
        self._file.write(pickle.APPENDS + pickle.STOP)


def file_layers(layers: Iterable[np.ndarray], dtype: str | None) -> list[Any]:
    """Return a list of arrays, one per layer.

    bfloat16, here raw bits, becomes torch tensors, because NumPy has no such dtype.
    """
    if dtype != "bfloat16":
        return [np.ascontiguousarray(layer) for layer in layers]
    return [_tensor(layer.view("<u2"), dtype) for layer in layers]


def trace_dict(store: TraceStore, trace: Trace) -> dict[str, Any]:
    """Return a trace as a dict of the pickle schema: the fields of its source and a question_id, without label and scores.

    Raises
    ------
    UsageError
        If the trace has no hidden states, or edges instead of attention.
    """
    if trace.num_tokens == 0 or trace.attention_layout == "edges":
        found = "edges" if trace.num_tokens else "last tokens"
        raise UsageError(
            f"trace {trace.index} ({trace.question_id}) has {found} only, which the pickle schema cannot hold"
        )
    attention: Any = None
    if trace.attention_layout is not None:
        # The schema has a dimension of heads; a stored mean counts as one head.
        attention = trace.attention_bits
        attention = file_layers(attention if attention.ndim == 4 else attention[:, None], store.attention_dtype)
    texts = {name: trace.text(name) for name in ("question", *schema.ANSWER_FIELDS)}
    hidden = file_layers(trace.hidden_states_bits, store.hidden_dtype)
    return trace.extras | _fields(trace, hidden, attention, texts | trace.optional_fields)


def complete_dict(store: TraceStore, trace: Trace) -> dict[str, Any]:
    """Return the dict of `trace_dict` with label, scores, group and layer_ids of the trace."""
    layer_ids = None if trace.provenance is None else trace.provenance.layer_ids
    directions = {name: field.direction for name, field in store.score_fields.items()}
    return _with_verdict(trace_dict(store, trace), trace, layer_ids, directions)


def record_dict(record: TraceRecord) -> dict[str, Any]:
    """Return the dict of the pickle schema that a record was made from.

    Raises
    ------
    InvalidInputError
        If the record has no hidden states, or edges instead of attention.
    """
    if record.hidden is None or record.edges is not None:
        raise InvalidInputError("found last tokens or graphs, expected dicts of the pickle schema; convert the file")
    hidden, attention = (
        None if layers is None else file_layers(layers, "bfloat16" if layers[0].dtype == schema.BFLOAT16 else None)
        for layers in (record.hidden, record.attention)
    )
    optional = {n: decode_list(v) if isinstance(v, str) else v for n, v in record.optional.items()}
    found = record.extras | _fields(record, hidden, attention, record.strings | optional)
    return _with_verdict(found, record, record.layer_ids, SCORES)


def _with_verdict(
    found: dict[str, Any], trace: Any, layer_ids: tuple[int, ...] | None, directions: Mapping[str, str]
) -> dict[str, Any]:
    """Return a dict with what a split and training need, of the trace instead of the extras.

    A score that the built-in layout would not read, or in the other direction, is score_NAME, which it refuses.
    """
    more: dict[str, Any] = {}
    for name, score in trace.scores.items():
        direction = directions.get(name, CORRECT)
        key = SCORE_COLUMNS[direction] if name == DEFAULT_SCORE_NAME else name
        is_read = SCORES.get(key) == direction and (key == name or key not in trace.scores)
        more[key if is_read else f"score_{name}"] = score
    if trace.label is not None and trace.label == trace.label:
        more["label"] = trace.label
    more |= {"group": trace.group} if trace.group else {}
    more |= {} if layer_ids is None else {"layer_ids": list(layer_ids)}
    others = (name for name, value in found.items() if not (name in {"label", *SCORES} and is_verdict(value)))
    return {name: found[name] for name in others if not (name == "scores" and isinstance(found[name], dict))} | more


def _fields(trace: Any, hidden: Any, attention: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a trace or record in the order of the schema, without missing ones."""
    arrays = {"hidden_states": hidden, "attentions": attention}
    other = {name: getattr(trace, name) for name in ("tokens", "tokens_decoded", "prompt_length")}
    values = arrays | other | more | {"question_id": trace.question_id, "sample": trace.sample or None}
    return {name: value for name, value in values.items() if value is not None}


def _write_pickle(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    writer = PickleListWriter(file)
    for trace in traces:
        writer.append(trace_dict(store, trace))
    writer.finish()


def _tensor(array: np.ndarray, dtype: str | None = None) -> Any:
    import torch

    tensor = torch.from_numpy(np.array(array))  # a copy, because mapped arrays are read-only
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def labels_of_files(store: TraceStore) -> np.ndarray:
    """Return the labels (N,) of .pt files: the stored ones, else those of scores in [0, 1] at 0.5, else NaN."""
    return store.targets() if is_in_unit_range(used_scores(store.scores, store.labels)) else store.labels


def _save(store: TraceStore, traces: Sequence[Trace], values: dict[str, Any], file: BinaryIO) -> None:
    """Write `values`, labels (N,) float32 and question ids with torch.save."""
    import torch

    targets = labels_of_files(store)
    labels = torch.tensor([targets[t.index] for t in traces], dtype=torch.float32)
    # torch.save reports a full disk as a RuntimeError. Writing a buffer gives an OSError.
    buffer = io.BytesIO()
    torch.save(values | {"labels": labels, "question_ids": [t.question_id for t in traces]}, buffer)
    file.write(buffer.getbuffer())


def _write_sequences(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    batch = list(traces)
    sequences = _tensor(np.stack([t.last_token_bits for t in batch]), store.hidden_dtype)
    _save(store, batch, {"sequences": sequences}, file)


def _write_graphs(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    batch = list(traces)
    _save(store, batch, {"graphs": [_graphs(store, t) for t in batch]}, file)


def _graphs(store: TraceStore, trace: Trace) -> list[Any]:
    """Return one PyG Data per layer."""
    from torch_geometric.data import Data

    num_tokens, layers = trace.num_tokens, []
    is_averaged = store.attention_mode == "heads" and trace.attention_layout != "edges"
    weight_dtype = None if is_averaged else store.attention_dtype  # the mean is float16
    extras = _layer_extras(trace, store.num_layers)
    for k, (hidden, (index, weight)) in enumerate(zip(trace.hidden_states_bits, _edges(trace), strict=True)):
        possible = num_tokens * num_tokens
        counts = {
            "num_nodes": num_tokens,
            "num_possible_edges": possible,
            "num_filtered_edges": index.shape[1],
            "filter_ratio": index.shape[1] / possible,
        }
        own = {name: values[k] for name, values in extras.items() if values[k] is not None}
        layers.append(
            Data(
                x=_tensor(hidden, store.hidden_dtype),
                edge_index=_tensor(index),
                edge_attr=_tensor(weight, weight_dtype),
                **counts | own,
            )
        )
    return layers


def _edges(trace: Trace) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield edge_index (2, E) int64, source j to target i, and edge_attr (E, 1) of each layer."""
    num_tokens = trace.num_tokens
    if trace.attention_layout == "edges":
        packed = trace.attention_packed_bits
        assert isinstance(packed, PackedEdges)
        for begin, end in zip(packed.ptr[:-1], packed.ptr[1:], strict=True):
            pairs = packed.edge_index[begin:end].T.astype(np.int64)
            # Restore the direction of the source file.
            yield pairs[::-1] if trace.has_reversed_edges else pairs, packed.weight[begin:end, None]
        return
    is_causal = trace.attention_layout == "causal"
    target, source = np.tril_indices(num_tokens) if is_causal else np.indices((num_tokens, num_tokens))
    target, source = target.reshape(-1), source.reshape(-1)
    for weight in trace.attention_mean:
        kept = weight > 0
        yield np.stack([source[kept], target[kept]]).astype(np.int64), weight[kept][:, None]


def _layer_extras(trace: Trace, num_layers: int) -> dict[str, list[Any]]:
    """Return further fields that the source's Data objects had, as one value per layer."""
    if trace.attention_layout != "edges":
        return {}
    extras = trace.extras
    return {n: v for n, v in extras.items() if isinstance(v, list) and len(v) == num_layers and n not in _GRAPH_ARRAYS}


def _write_parquet(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    # Imported here, because pyarrow is an extra.
    from tracestore.export import parquet_file

    parquet_file.write_traces(store, traces, file)


_PER_TOKEN = ("tokens", *schema.TOKEN_FIELDS)
# The writer of each format, the name of its files by number, and which arrays of `trace_values.small_arrays` they lack.
WRITERS: dict[ExportFormat, tuple[Callable[[TraceStore, Iterator[Trace], BinaryIO], None], str, tuple[str, ...]]] = {
    "pkl": (_write_pickle, "traces_batch_{:04d}.pkl", ("last_token",)),
    "pt-lstm": (_write_sequences, "preprocessed_batch_{:04d}.pt", _PER_TOKEN),
    "pt-gnn": (_write_graphs, "preprocessed_batch_{:04d}.pt", ("last_token", *_PER_TOKEN)),
    "safetensors": (safetensors_file.write_traces, "{:06d}.safetensors", ()),
    "datasets": (_write_parquet, f"{DATA_FOLDER}/train-{{:05d}}.parquet", ()),
}
