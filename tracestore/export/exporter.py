"""Stores back into files of the input families, for programs that read those."""

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tracestore.errors import UsageError
from tracestore.export.pickle_list import PickleListWriter
from tracestore.store.format import schema
from tracestore.store.format.labels import SCORE_COLUMNS
from tracestore.store.io.fsio import atomic_write, map_os_errors
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import PackedEdges, Trace
from tracestore.store.write.record import extras_values

FORMATS = ("pkl", "pt-lstm", "pt-gnn")
TRACES_PER_FILE = 500
SCORE_THRESHOLD = 0.5
SCORES_FILE = "scores.csv"
# Of the arrays of a file of graphs, which is made in memory.
MAX_GRAPH_BYTES = 1 << 30


@dataclass
class ExportReport:
    """What an export wrote: files of traces in out_dir, and a scores file where there are scores."""

    store: str
    out_dir: str
    format: str
    num_traces: int = 0
    num_files: int = 0
    bytes: int = 0
    scores_file: str | None = None
    # Labels of traces' own, for which dicts of the pickle schema have no field.
    num_labels_left_out: int = 0


def export_store(
    store: TraceStore,
    out_dir: str | os.PathLike[str],
    *,
    format: str = "pkl",
    traces_per_file: int = TRACES_PER_FILE,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Writes every trace of `store` into files of `traces_per_file` traces in `out_dir`, which
    must be new or empty.

    format: "pkl" is family 1, pickled lists of dicts; "pt-lstm" family 2, the last token of
    each layer; "pt-gnn" family 3, a PyG Data a layer, its edges the pairs with an attention
    above 0. Scores and groups go into scores.csv beside them. A file is there whole or not
    at all. Pickles are written trace by trace; a .pt file is made in memory, and one of graphs
    ends at MAX_GRAPH_BYTES also where it has fewer traces. UsageError where a trace does not
    have what the format needs; DiskFullError, StorageError from the file system. `progress`
    gets the traces done and in all.
    """
    if format not in FORMATS:
        raise UsageError(f"found format {format!r}, expected one of {', '.join(FORMATS)}")
    out = Path(out_dir)
    report = ExportReport(str(store.path), str(out), format)
    total = len(store)
    with map_os_errors(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
            is_empty = not any(out.iterdir())
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{out}: not a folder") from None
        if not is_empty:
            raise UsageError(f"{out}: not empty; name a folder that is")
        _check(store, format)
        for number, (begin, end) in enumerate(_files(store, format, traces_per_file)):
            traces = (store[k] for k in range(begin, end))
            name = f"traces_batch_{number:04d}.pkl" if format == "pkl" else f"preprocessed_batch_{number:04d}.pt"
            with atomic_write(out / name) as file:
                _WRITERS[format](store, traces, file)
                report.bytes += file.tell()
            report.num_files += 1
            report.num_traces += end - begin
            if progress is not None:
                progress(report.num_traces, total)
        if format == "pkl":
            report.num_labels_left_out = int((~np.isnan(store.labels)).sum())
        rows = _score_rows(store)
        if rows:
            report.scores_file = str(out / SCORES_FILE)
            with atomic_write(out / SCORES_FILE) as file:
                _write_scores(rows, store.score_direction, file)
    return report


def _check(store: TraceStore, format: str) -> None:
    """UsageError where a trace lacks what the format needs, before anything is written."""
    column = store.internals.index.read_column
    no_graph, layout = column("graph_segment") < 0, column("layout")
    if format != "pt-lstm" and no_graph.any():
        raise UsageError(f"{_which(store, no_graph)} has last tokens only: --format pt-lstm")
    if format == "pkl" and (edges := layout == schema.LAYOUT_EDGES).any():
        raise UsageError(f"{_which(store, edges)} has edges, of which no attention can be made: --format pt-gnn")
    if format == "pt-gnn" and (none := layout == schema.LAYOUT_NONE).any():
        raise UsageError(f"{_which(store, none)} has no attention: --format pt-lstm")
    if format != "pkl" and (further := column("sample") > 0).any():
        raise UsageError(
            f"{_which(store, further)} is a further answer to its question, which .pt files cannot say: --format pkl"
        )


def _which(store: TraceStore, wanted: np.ndarray) -> str:
    index = int(np.flatnonzero(wanted)[0])
    return f"{store.path}: trace {index} ({store.question_ids[index]})"


def _files(store: TraceStore, format: str, traces_per_file: int) -> Iterator[tuple[int, int]]:
    """First trace and the one behind the last of each file."""
    total = len(store)
    sizes = np.zeros(total, np.int64)
    if format == "pt-gnn":
        tokens, pairs = store.token_and_pair_counts(np.arange(total))
        itemsize = schema.storage_dtype(store.hidden_dtype).itemsize
        # x, and of each edge two int64 and a weight.
        sizes = tokens * (store.num_layers * store.hidden_dim * itemsize) + pairs * (16 + 4)
    begin, held = 0, 0
    for k, size in enumerate(sizes.tolist()):
        if k > begin and (k - begin == traces_per_file or held + size > MAX_GRAPH_BYTES):
            yield begin, k
            begin, held = k, 0
        held += size
    if total > begin:
        yield begin, total


def _score_rows(store: TraceStore) -> list[tuple[str, int, str, str]]:
    """question_id, sample, score and group of the traces that have a score or a group."""
    rows = []
    for index in range(len(store)):
        score, group = float(store.scores[index]), store.group(index)
        if not math.isnan(score) or group:
            row = store.internals.index.row(index)
            rows.append((store.question_ids[index], row.sample, "" if math.isnan(score) else repr(score), group))
    # A score without a sample is that of every sample.
    if not store.internals.index.read_column("sample").any():
        rows = [(question_id, -1, score, group) for question_id, _, score, group in rows]
    return rows


def _write_scores(rows: list[tuple[str, int, str, str]], direction: str, file: BinaryIO) -> None:
    """As `convert` and `score` read them; without samples and groups the columns that
    everybody's scripts have."""
    columns = [0, *([1] if rows[0][1] >= 0 else []), 2, *([3] if any(r[3] for r in rows) else [])]
    writer = csv.writer(_Lines(file))
    for row in (("question_id", "sample", SCORE_COLUMNS[direction], "group"), *rows):
        writer.writerow([row[k] for k in columns])


class _Lines:
    """Text for a binary file, UTF-8 as ids have it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.encode("utf-8", "surrogatepass"))


# Family 1


def layers_of(values: Iterable[np.ndarray], dtype: str | None) -> list[Any]:
    """Layer by layer; bfloat16, here its raw bits, as torch tensors, which pickles know it by."""
    if dtype != "bfloat16":
        return [np.ascontiguousarray(v) for v in values]
    return [_tensor(v.view("<u2"), dtype) for v in values]


def trace_dict(store: TraceStore, trace: Trace) -> dict[str, Any]:
    """A dict of the pickle schema: what the source had, and an id. UsageError where the
    trace has not what a dict needs."""
    if trace.num_tokens == 0 or trace.attention_layout == "edges":
        what = "edges" if trace.num_tokens else "last tokens"
        raise UsageError(f"trace {trace.index} ({trace.question_id}) has {what} only, no dict of the pickle schema")
    values: dict[str, Any] = {"hidden_states": layers_of(trace.hidden_states, store.hidden_dtype)}
    if trace.attention_layout is not None:
        attention = trace.attention
        # The head mean is a model of one head.
        heads = attention if attention.ndim == 4 else attention[:, None]
        values["attentions"] = layers_of(heads, store.attention_dtype)
    for name in ("tokens", "tokens_decoded", "prompt_length"):
        value = getattr(trace, name)
        if value is not None:
            values[name] = value
    for name in schema.TEXT_FIELDS:
        text = trace.text(name)
        if text is not None:
            values[name] = text
    values["question_id"] = trace.question_id
    if trace.sample:
        values["sample"] = trace.sample
    return extras_values(trace.extras) | values


def _write_pickle(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    writer = PickleListWriter(file)
    for trace in traces:
        writer.append(trace_dict(store, trace))
    writer.finish()


# Families 2 and 3


def _tensor(array: np.ndarray, dtype: str | None = None) -> Any:
    import torch

    tensor = torch.from_numpy(np.array(array))  # its own memory: the map is read-only
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _labels(traces: Sequence[Trace]) -> Any:
    """(N,) float32: the stored label, else 1 where the score is below the threshold, NaN without both."""
    import torch

    def label(trace: Trace) -> float:
        if not math.isnan(trace.label):
            return trace.label
        return math.nan if math.isnan(trace.score) else float(trace.score < SCORE_THRESHOLD)

    return torch.tensor([label(t) for t in traces], dtype=torch.float32)


def _save(values: dict[str, Any], file: BinaryIO) -> None:
    """torch.save by way of memory: a disk that is full is an OSError here, which says so."""
    import torch

    buffer = io.BytesIO()
    torch.save(values, buffer)
    file.write(buffer.getbuffer())


def _write_sequences(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    batch = list(traces)
    sequences = _tensor(np.stack([t.last_token for t in batch]), store.hidden_dtype)
    ids = [t.question_id for t in batch]
    _save({"sequences": sequences, "labels": _labels(batch), "question_ids": ids}, file)


def _edges(trace: Trace) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """edge_index (2, E) int64, source j to target i, and edge_attr (E, 1) of each layer."""
    num_tokens = trace.num_tokens
    if trace.attention_layout == "edges":
        packed = trace.attention_packed
        assert isinstance(packed, PackedEdges)
        for begin, end in zip(packed.ptr[:-1], packed.ptr[1:], strict=True):
            pairs = packed.edge_index[begin:end].T.astype(np.int64)
            # As the source had them.
            yield pairs[::-1] if trace.has_reversed_edges else pairs, packed.weight[begin:end, None]
        return
    target, source = (
        np.tril_indices(num_tokens) if trace.attention_layout == "causal" else np.indices((num_tokens,) * 2)
    )
    target, source = target.reshape(-1), source.reshape(-1)
    for weight in trace.attention_mean:
        kept = weight > 0
        yield np.stack([source[kept], target[kept]]).astype(np.int64), weight[kept][:, None]


_GRAPH_ARRAYS = ("x", "edge_index", "edge_attr")


def _layer_values(trace: Trace, num_layers: int) -> dict[str, list[Any]]:
    """Further fields that the source's Data objects had, layer by layer."""
    if trace.attention_layout != "edges":
        return {}
    extras = extras_values(trace.extras)
    return {n: v for n, v in extras.items() if isinstance(v, list) and len(v) == num_layers and n not in _GRAPH_ARRAYS}


def _graphs(store: TraceStore, trace: Trace) -> list[Any]:
    """A PyG Data a layer."""
    from torch_geometric.data import Data

    num_tokens, layers = trace.num_tokens, []
    # A mean that is made here is float16.
    is_made = store.attention_mode == "heads" and trace.attention_layout != "edges"
    weight_dtype = None if is_made else store.attention_dtype
    extras = _layer_values(trace, store.num_layers)
    for k, (hidden, (index, weight)) in enumerate(zip(trace.hidden_states, _edges(trace), strict=True)):
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


def _write_graphs(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    batch = list(traces)
    values = {"graphs": [_graphs(store, t) for t in batch], "labels": _labels(batch)}
    _save(values | {"question_ids": [t.question_id for t in batch]}, file)


_WRITERS: dict[str, Callable[[TraceStore, Iterator[Trace], BinaryIO], None]] = {
    "pkl": _write_pickle,
    "pt-lstm": _write_sequences,
    "pt-gnn": _write_graphs,
}
