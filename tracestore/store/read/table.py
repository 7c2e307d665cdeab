"""The traces of a store as rows of a table and as rows of a feature matrix."""

from typing import Any

import numpy as np

from tracestore._core.gather import CopyJob
from tracestore.errors import UsageError
from tracestore.store.format import schema
from tracestore.store.read.batch_sources import sequence_sources
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.trace import Trace

# Traces whose last tokens are gathered at once.
_BLOCK = 256


def metadata(store: StoreInternals, *, texts: bool = False) -> dict[str, Any]:
    """Return what the store holds of each trace besides its arrays, as named columns of N values.

    `texts` adds question and answer, which are read trace by trace.
    """
    sources = [entry.path for entry in store.index.sources()]
    index, count = store.index, store.manifest.num_traces
    columns: dict[str, Any] = {
        "question_id": index.question_ids(np.arange(count)),
        "sample": index.read_column("sample"),
        "score": store.scores,
        **{
            f"score_{name}": store.columns.score(name)
            for name in sorted(store.attributes.scores)
            if name != store.score_name
        },
        "label": store.columns.labels,
        "group": [store.columns.group(k) for k in range(count)],
        "num_tokens": index.read_column("num_tokens"),
        "has_nonfinite": index.read_column("nonfinite").astype(bool),
        "source": [sources[k] for k in index.read_column("source")],
        "source_position": index.read_column("source_position"),
    }
    if texts:
        traces = [Trace(store, k) for k in range(count)]
        columns["question"] = [trace.question for trace in traces]
        columns["answer"] = [trace.answer for trace in traces]
    return columns


def facts(store: StoreInternals) -> dict[str, Any]:
    """Return what is known about the whole store, as ``tracestore info --json`` prints it."""
    manifest, attributes, lens = store.manifest, store.attributes, None
    if attributes.lens is not None:
        lens = {name: getattr(attributes.lens, name) for name in ("num_tokens", "dtype", "norm", "eps", "provenance")}
    return {
        "path": str(store.files.location),
        "format_version": attributes.format_version,
        "generation": manifest.generation,
        "num_traces": manifest.num_traces,
        "num_tokens": manifest.num_tokens,
        "num_layers": attributes.num_layers,
        "hidden_dim": attributes.hidden_dim,
        "num_heads": attributes.num_heads,
        "hidden_dtype": attributes.hidden_dtype or "float16",
        "attention": attributes.attention,
        "attention_layout": attributes.attention_layout,
        "attention_dtype": attributes.attention_dtype,
        "codec": attributes.options["codec"],
        "fields": list(manifest.fields),
        "num_segments": manifest.num_segments,
        "num_sources": manifest.num_sources,
        "bytes": manifest.num_bytes,
        "num_scored": manifest.num_scored,
        "num_labeled": manifest.num_labeled,
        "score": store.score_name,
        "scores": {name: field.to_json() for name, field in sorted(attributes.scores.items())},
        "lens": lens,
        "provenance": [p.to_json() for p in attributes.provenance],
    }


def features(store: StoreInternals, layer: int) -> np.ndarray:
    """Return the last token's hidden states (N, D) in one layer; see TraceStore.features."""
    stored_dtype, hidden_dim = store.attributes.hidden_dtype or "float16", store.attributes.hidden_dim or 0
    is_bits, num_traces = stored_dtype == "bfloat16", store.manifest.num_traces
    dtype = np.dtype("<f4") if is_bits else schema.DTYPE_NAMES[stored_dtype]
    out = np.empty((num_traces, hidden_dim), dtype)
    if num_traces == 0:
        return out
    count = store.num_layers
    if not -count <= layer < count:
        raise UsageError(f"found layer {layer}, expected {-count} to {count - 1}")
    layer %= count
    view = _one_view(store, layer)
    if view is not None:
        return view
    code = schema.dtype_code(stored_dtype)
    stored = np.empty((_BLOCK, count, hidden_dim), "<u2" if is_bits else dtype)
    for begin in range(0, num_traces, _BLOCK):
        indices = np.arange(begin, min(num_traces, begin + _BLOCK))
        # The core reports a file that is truncated meanwhile as an error; numpy would end in a signal.
        job = CopyJob(sequence_sources(store, indices), code, code)
        job.set_output(stored)
        job.run()
        rows = stored[: len(indices), layer]
        out[indices] = schema.as_float32(rows, "bfloat16") if is_bits else rows
    return out


def _one_view(store: StoreInternals, layer: int) -> np.ndarray | None:
    """Return a view of the rows if one uncompressed array holds all of them in the order of the store."""
    if store.attributes.options.get("codec", "none") != "none" or store.attributes.hidden_dtype == "bfloat16":
        return None
    segments, rows = store.index.read_column("sequence_segment"), store.index.read_column("sequence_row")
    if segments[0] < 0 or (segments != segments[0]).any():
        return None
    segment = store.segment(int(segments[0]))
    if rows.max() >= segment.num_rows:
        return None
    stored = segment.values("last_token_row")[rows]
    if (np.diff(stored) != 1).any():
        return None
    return segment.array("last_token").rows(int(stored[0]), int(stored[-1]) + 1)[:, layer]
