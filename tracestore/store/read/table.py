"""Traces as rows of a table, and as rows of a matrix."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tracestore._core.gather import Copies
from tracestore.errors import UsageError
from tracestore.store.format import schema
from tracestore.store.read.batch_sources import sequence_sources

if TYPE_CHECKING:
    from tracestore.store.read.store import TraceStore

# Traces whose last tokens are gathered at once.
_BLOCK = 256


def metadata(store: "TraceStore", *, texts: bool = False) -> dict[str, Any]:
    """What is known of each trace but its arrays, as named columns of N values. `texts` adds
    question and answer, which are read trace by trace."""
    sources = [entry.path for entry in store._index.sources()]
    columns: dict[str, Any] = {
        "question_id": store.question_ids[:],
        "sample": store._index.column("sample"),
        "score": store.scores,
        "label": store.labels,
        "group": [store.group(k) for k in range(len(store))],
        "num_tokens": store.num_tokens,
        "has_nonfinite": store.has_nonfinite,
        "source": [sources[k] for k in store._index.column("source")],
        "source_position": store._index.column("source_position"),
    }
    if texts:
        columns["question"] = [trace.question for trace in store]
        columns["answer"] = [trace.answer for trace in store]
    return columns


def features(store: "TraceStore", layer: int) -> np.ndarray:
    """See TraceStore.features."""
    is_bits = store.hidden_dtype == "bfloat16"
    dtype = np.dtype("<f4") if is_bits else schema.DTYPE_NAMES[store.hidden_dtype]
    out = np.empty((len(store), store.hidden_dim), dtype)
    if len(store) == 0:
        return out
    count = store.num_layers
    if not -count <= layer < count:
        raise UsageError(f"found layer {layer}, expected {-count} to {count - 1}")
    layer %= count
    view = _one_view(store, layer)
    if view is not None:
        return view
    code = schema.dtype_code(store.hidden_dtype)
    stored = np.empty((_BLOCK, count, store.hidden_dim), "<u2" if is_bits else dtype)
    for begin in range(0, len(store), _BLOCK):
        indices = np.arange(begin, min(len(store), begin + _BLOCK))
        # By the core, for which a file that is cut short meanwhile is an error and no signal.
        job = Copies(sequence_sources(store, indices), code, code)
        job.aim(stored)
        job.run()
        rows = stored[: len(indices), layer]
        out[indices] = schema.as_float32(rows, "bfloat16") if is_bits else rows
    return out


def _one_view(store: "TraceStore", layer: int) -> np.ndarray | None:
    """The rows where they lie, if they do so in one uncompressed array and in the store's order."""
    if store.codec != "none" or store.hidden_dtype == "bfloat16":
        return None
    segments, rows = store._index.column("sequence_segment"), store._index.column("last_token_row")
    if segments[0] < 0 or (segments != segments[0]).any() or (np.diff(rows) != 1).any():
        return None
    array = store._segment(int(segments[0])).array("last_token")
    return array.rows(int(rows[0]), int(rows[-1]) + 1)[:, layer]
