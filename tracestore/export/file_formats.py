"""Traces in the layouts of the input files: dicts in pickles, .pt files of tensors or graphs, and .safetensors files."""

import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, get_args

import numpy as np

from tracestore.errors import InvalidInputError, UsageError
from tracestore.export.trace_values import arrays_of
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
# Names of dtypes in the headers of .safetensors files.
_SAFETENSORS = {
    "float16": "F16", "float32": "F32", "bfloat16": "BF16",
    "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64",
}  # fmt: skip
# Fields of a PyG Data that are not extras.
_GRAPH_ARRAYS = ("x", "edge_index", "edge_attr")


@contextmanager
def pickled_list(file: BinaryIO) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Write one pickled list, in the memory of one item; yield what writes the next item. The file stays open."""
    # Protocol 3 has no frames, so items that were pickled alone can be concatenated. Each stores its own objects in the
    # memo before it loads them.
    file.write(pickle.PROTO + b"\x03" + pickle.EMPTY_LIST + pickle.MARK)
    yield lambda item: file.write(memoryview(pickle.dumps(item, protocol=3))[2:-1])
    file.write(pickle.APPENDS + pickle.STOP)


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
    with pickled_list(file) as write:
        for trace in traces:
            write(trace_dict(store, trace))


def _tensor(array: np.ndarray, dtype: str | None = None) -> Any:
    import torch

    tensor = torch.from_numpy(np.array(array))  # a copy, because mapped arrays are read-only
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _save(store: TraceStore, traces: Sequence[Trace], values: dict[str, Any], file: BinaryIO) -> None:
    """Write `values`, labels (N,) float32 and question ids with torch.save.

    The labels are the stored ones, else those of scores in [0, 1] at 0.5, else NaN.
    """
    import torch

    targets = store.targets() if is_in_unit_range(used_scores(store.scores, store.labels)) else store.labels
    labels = torch.tensor([targets[t.index] for t in traces], dtype=torch.float32)
    # torch.save reports a full disk as a RuntimeError. Writing a buffer gives an OSError.
    buffer = io.BytesIO()
    torch.save(values | {"labels": labels, "question_ids": [t.question_id for t in traces]}, buffer)
    file.write(buffer.getbuffer())


def _write_sequences(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    batch = list(traces)
    last_tokens = np.stack([trace.last_token_bits for trace in batch])
    _save(store, batch, {"sequences": _tensor(last_tokens, store.hidden_dtype)}, file)


def _write_graphs(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    batch = list(traces)
    _save(store, batch, {"graphs": [_graphs(store, t) for t in batch]}, file)


def _graphs(store: TraceStore, trace: Trace) -> list[Any]:
    """Return one PyG Data per layer."""
    from torch_geometric.data import Data

    num_tokens, layers = trace.num_tokens, []
    is_averaged = store.attention_mode == "heads" and trace.attention_layout != "edges"
    weight_dtype = None if is_averaged else store.attention_dtype  # the mean is float16
    # Further fields that the source's Data objects had, as one value per layer.
    extras = {
        name: values
        for name, values in (trace.extras if trace.attention_layout == "edges" else {}).items()
        if isinstance(values, list) and len(values) == store.num_layers and name not in _GRAPH_ARRAYS
    }
    for k, (hidden, (index, weight)) in enumerate(zip(trace.hidden_states_bits, _edges(trace), strict=True)):
        possible = num_tokens * num_tokens
        fields = {
            "num_nodes": num_tokens,
            "num_possible_edges": possible,
            "num_filtered_edges": index.shape[1],
            "filter_ratio": index.shape[1] / possible,
            **{name: values[k] for name, values in extras.items() if values[k] is not None},
        }
        hidden, weight = _tensor(hidden, store.hidden_dtype), _tensor(weight, weight_dtype)
        layers.append(Data(x=hidden, edge_index=_tensor(index), edge_attr=weight, **fields))
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


def _write_safetensors(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    """Write the arrays of one trace, without a copy of them, and its key as metadata.

    The library's writer for NumPy has no bfloat16. Wide dtypes come first, as in files of the library, so that every array
    begins at a multiple of its item size.
    """
    [trace] = traces
    arrays = sorted(arrays_of(store, trace).items(), key=lambda pair: (-pair[1][0].itemsize, pair[0]))
    # The header is UTF-8, which has no lone surrogates; the id is in the table too.
    question_id = trace.question_id.encode("utf-8", "backslashreplace").decode()
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "question_id": question_id, "sample": str(trace.sample)}}
    end = 0
    for name, (array, dtype) in arrays:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, (array, _) in arrays:
        file.write(np.ascontiguousarray(array).reshape(-1).view("u1").data)


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
    "safetensors": (_write_safetensors, "{:06d}.safetensors", ()),
    "datasets": (_write_parquet, f"{DATA_FOLDER}/train-{{:05d}}.parquet", ()),
}
