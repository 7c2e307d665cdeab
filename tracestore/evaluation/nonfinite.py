"""Traces with NaN or infinite values, which --drop-nonfinite leaves out."""

from typing import Any

import numpy as np

from tracestore.errors import TrainingError, escape_unprintable
from tracestore.store.read.store import TraceStore
from tracestore.words import plural

_MAX_IDS = 5


def check_finite(store: TraceStore, indices: np.ndarray) -> None:
    """Raise TrainingError where a trace of a split holds NaN or infinite values, also where no detector reads them."""
    wrong = indices[store.has_nonfinite[indices]]
    if len(wrong):
        raise TrainingError(
            f"the trace of question {store.question_ids[int(wrong[0])]!r} holds NaN or infinite values "
            f"({plural(len(wrong), 'such trace')}); --drop-nonfinite leaves them out"
        )


def drop_nonfinite(store: TraceStore, targets: np.ndarray) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Return the labels ``(N,)`` without those of traces with NaN or infinite values, and the traces that had one.

    Each is a dict of question_id and sample.
    """
    dropped = store[np.flatnonzero(store.has_nonfinite & ~np.isnan(targets))]
    entries = [{"question_id": trace.question_id, "sample": trace.sample} for trace in dropped]
    return np.where(store.has_nonfinite, np.nan, targets), entries


def describe_dropped(dropped: list[dict[str, Any]]) -> str:
    """Return one line with the number of traces that `drop_nonfinite` left out, and the first ids."""
    ids = [escape_unprintable(entry["question_id"], 60) for entry in dropped[:_MAX_IDS]]
    more = [f"{len(dropped) - _MAX_IDS:,} more"] if len(dropped) > _MAX_IDS else []
    listing = f": {', '.join(ids + more)}" if dropped else ""
    return f"--drop-nonfinite: {plural(len(dropped), 'trace')} with NaN or infinite values left out{listing}"
