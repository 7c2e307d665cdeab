"""predictions.csv: the hallucination score of each tested trace."""

from pathlib import Path
from typing import Any

import numpy as np

from tracestore.evaluation.metrics import probability
from tracestore.store.format.labels import PREDICTION_COLUMNS, STORE_COLUMN
from tracestore.store.io.fsio import write_rows
from tracestore.store.read.store import TraceStore


def write_predictions(path: Path, runs: list[dict[str, Any]], store: TraceStore) -> None:
    """Write one row per run and tested trace, sorted by seed and trace.

    PREDICTION_COLUMNS are followed by one column per model: its probability that the answer
    is a hallucination. Where several stores are read as one, the last column names the store of the trace.

    Parameters
    ----------
    path : Path
    runs : list of dict
        For each run: fold (None without folds, written as an empty field), seed, and models,
        the results.json entries by name.
    store : TraceStore
    """
    names = list(runs[0]["models"]) if runs else []
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        scores = [run["models"][name]["test_scores"] for name in names]
        columns = [probability(np.array(s["logit"])).tolist() for s in scores]
        traces = scores[0]
        fold = "" if run["fold"] is None else run["fold"]
        for k, trace in enumerate(traces["trace_index"]):
            key = (traces["question_id"][k], traces["sample"][k], trace)
            values = (column[k] for column in columns)
            stored = store.internals.store_of(trace)
            rows.append((*key, "test", fold, run["seed"], traces["label"][k], *values, *stored))
    rows.sort(key=lambda row: (row[5], row[2]))
    write_rows(
        path, (*PREDICTION_COLUMNS, *names, *((STORE_COLUMN,) if len(store.internals.members) > 1 else ())), rows
    )
