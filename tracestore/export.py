"""Stores back into files of the input families, for programs that read those."""

import csv
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tracestore.errors import UsageError
from tracestore.store import schema
from tracestore.store.fsio import translated_errors, whole_file
from tracestore.store.pickle_list import PickleListWriter
from tracestore.store.reader import TraceStore
from tracestore.store.record import extras_values
from tracestore.store.trace import PackedEdges, Trace

FORMATS = ("pkl", "pt-lstm", "pt-gnn")
TRACES_PER_FILE = 500
SCORE_THRESHOLD = 0.5
SCORES_FILE = "scores.csv"


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
    at all; pickles are written trace by trace. UsageError where a trace does not have what the
    format needs; NoSpaceError, StorageError from the file system. `progress` gets the
    traces done and in all.
    """
    if format not in FORMATS:
        raise UsageError(f"found format {format!r}, expected one of {', '.join(FORMATS)}")
    out = Path(out_dir)
    report = ExportReport(str(store.path), str(out), format)
    total = len(store)
    with translated_errors(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
            is_empty = not any(out.iterdir())
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{out}: not a folder") from None
        if not is_empty:
            raise UsageError(f"{out}: not empty; name a folder that is")
        if total:
            _CHECKS[format](store[0])
        for number, begin in enumerate(range(0, total, traces_per_file)):
            traces = (store[k] for k in range(begin, min(total, begin + traces_per_file)))
            name = f"traces_batch_{number:04d}.pkl" if format == "pkl" else f"preprocessed_batch_{number:04d}.pt"
            with whole_file(out / name) as file:
                _WRITERS[format](store, traces, file)
                report.bytes += file.tell()
            report.num_files += 1
            report.num_traces += min(total, begin + traces_per_file) - begin
            if progress is not None:
                progress(report.num_traces, total)
        if not np.isnan(store.scores).all():
            report.scores_file = str(out / SCORES_FILE)
            with whole_file(out / SCORES_FILE) as file:
                _write_scores(store, file)
    return report


def _write_scores(store: TraceStore, file: BinaryIO) -> None:
    """question_id, sample, score and group, as `convert` and `score` read them."""
    rows = []
    for trace in store:
        if not math.isnan(trace.score) or trace.group:
            score = "" if math.isnan(trace.score) else repr(trace.score)
            rows.append((trace.question_id, trace.sample, score, trace.group))
    # Without samples, and groups, the columns that everybody's scripts have.
    columns = [
        k for k, is_there in enumerate((True, any(r[1] for r in rows), True, any(r[3] for r in rows))) if is_there
    ]
    lines = _Lines(file)
    writer = csv.writer(lines, lineterminator="\n")
    header = ("question_id", "sample", "score", "group")
    for row in (header, *rows):
        writer.writerow([row[k] for k in columns])


class _Lines:
    """Text for a binary file, UTF-8 as ids have it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.encode("utf-8", "surrogatepass"))


# Family 1


def _check_pickle(trace: Trace) -> None:
    if trace.num_tokens == 0:
        raise UsageError("the store has last tokens only: --format pt-lstm")
    if trace.attention_layout == "edges":
        raise UsageError("the store has edges, of which no attention can be made: --format pt-gnn")


def layers_of(values: Iterable[np.ndarray], dtype: str | None) -> list[Any]:
    """Layer by layer; bfloat16, here its raw bits, as torch tensors, which pickles know it by."""
    if dtype != "bfloat16":
        return [np.ascontiguousarray(v) for v in values]
    return [_tensor(v.view("<u2"), dtype) for v in values]


def trace_dict(store: TraceStore, trace: Trace) -> dict[str, Any]:
    """A dict of the pickle schema: what the source had, and an id. UsageError where the
    trace has not what a dict needs."""
    _check_pickle(trace)
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
    for name in ("question", *schema.ANSWER_FIELDS):
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


def _write_sequences(store: TraceStore, traces: Iterator[Trace], file: BinaryIO) -> None:
    import torch

    batch = list(traces)
    sequences = _tensor(np.stack([t.last_token for t in batch]), store.hidden_dtype)
    ids = [t.question_id for t in batch]
    torch.save({"sequences": sequences, "labels": _labels(batch), "question_ids": ids}, file)


def _check_graphs(trace: Trace) -> None:
    if trace.num_tokens == 0:
        raise UsageError("the store has last tokens only: --format pt-lstm")
    if trace.attention_layout is None:
        raise UsageError("the store has no attention: --format pt-lstm")


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


def _layer_values(trace: Trace, num_layers: int) -> dict[str, list[Any]]:
    """Further fields that the source's Data objects had, layer by layer."""
    if trace.attention_layout != "edges":
        return {}
    extras = extras_values(trace.extras)
    return {name: v for name, v in extras.items() if isinstance(v, list) and len(v) == num_layers}


def _graphs(store: TraceStore, trace: Trace) -> list[Any]:
    """A PyG Data a layer."""
    from torch_geometric.data import Data

    _check_graphs(trace)
    num_tokens, layers = trace.num_tokens, []
    # A mean that is made here is float16.
    weight_dtype = store.attention_dtype if store.attention != "heads" else None
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
    import torch

    batch = list(traces)
    values = {"graphs": [_graphs(store, t) for t in batch], "labels": _labels(batch)}
    torch.save(values | {"question_ids": [t.question_id for t in batch]}, file)


_WRITERS: dict[str, Callable[[TraceStore, Iterator[Trace], BinaryIO], None]] = {
    "pkl": _write_pickle,
    "pt-lstm": _write_sequences,
    "pt-gnn": _write_graphs,
}
_CHECKS: dict[str, Callable[[Trace], None]] = {
    "pkl": _check_pickle,
    "pt-lstm": lambda trace: None,
    "pt-gnn": _check_graphs,
}
