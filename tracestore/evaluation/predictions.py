"""predictions.csv: a hallucination score for each trace that was tested."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.evaluation.metrics import probability
from tracestore.evaluation.tables import write_rows
from tracestore.store.format.labels import PREDICTION_COLUMNS


def write_predictions(path: Path, runs: list[dict[str, Any]]) -> None:
    """One row a tested trace and run, by seed and trace; after PREDICTION_COLUMNS one column a model, its
    probability that the answer is a hallucination. `runs`: {"fold", "seed", "models"}, models
    with their entries (the probe under its own name). fold is empty where there are none."""
    names = list(runs[0]["models"]) if runs else []
    write_rows(path, (*PREDICTION_COLUMNS, *names), _rows(runs, names))


def _rows(runs: list[dict[str, Any]], names: list[str]) -> Iterator[tuple[Any, ...]]:
    rows = []
    for run in runs:
        scores = [run["models"][name]["test_scores"] for name in names]
        probabilities = [probability(np.array(s["logit"])).tolist() for s in scores]
        fold = "" if run["fold"] is None else run["fold"]
        for k, trace in enumerate(scores[0]["trace_index"]):
            first = scores[0]
            key = (first["question_id"][k], first["sample"][k], trace)
            rows.append((*key, "test", fold, run["seed"], first["label"][k], *(p[k] for p in probabilities)))
    rows.sort(key=lambda row: (row[5], row[2]))
    return iter(rows)
