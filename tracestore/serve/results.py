"""What tracestore train left in a folder, as far as a page shows it."""

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import UsageError, escape_unprintable
from tracestore.store.format.labels import PREDICTION_COLUMNS
from tracestore.store.io.fsio import open_regular, read_json
from tracestore.store.read.store import TraceStore

# The logistic probe's column of predictions.csv; in results.json it stands beside the models.
PROBE = "logistic_probe"


@dataclass
class Results:
    """probabilities: of each detector, (N,) float64 over the store's traces, the mean where a
    trace was tested several times, NaN where it was not. history: of each detector, named
    lists of one value an epoch. test: of each detector, its figures. thresholds: of each, the
    probability from which on it says that an answer is hallucinated."""

    probabilities: dict[str, np.ndarray] = field(default_factory=dict)
    history: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    thresholds: dict[str, float] = field(default_factory=dict)
    num_unknown: int = 0

    @classmethod
    def read(cls, folder: Path, store: TraceStore) -> "Results":
        """UsageError where the folder has no results.json or its files are something else."""
        results = cls()
        path = folder / "results.json"
        try:
            document = read_json(path)
            models = dict(document["models"])
            if document.get("probe"):
                models[PROBE] = document["probe"]
            for name, entry in models.items():
                results.test[name] = {k: v for k, v in entry["test"].items() if isinstance(v, int | float)}
                # Stored as a logit.
                results.thresholds[name] = 1 / (1 + math.exp(-float(entry.get("threshold") or 0.0)))
                if "history" in entry:
                    results.history[name] = {k: _floats(v) for k, v in entry["history"].items()}
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UsageError(
                f"{path}: not what tracestore train writes ({escape_unprintable(str(error), 100)})"
            ) from None
        path = folder / "predictions.csv"
        if path.exists():
            try:
                with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="") as file:
                    results._read_predictions(csv.DictReader(file, strict=True), store)
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror}") from None
            except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
                raise UsageError(
                    f"{path}: not what tracestore train writes ({escape_unprintable(str(error), 100)})"
                ) from None
        return results

    def _read_predictions(self, rows: "csv.DictReader[str]", store: TraceStore) -> None:
        """By question and sample: the store may be another one, with the traces elsewhere."""
        columns = rows.fieldnames or ()
        if not {"question_id", "sample"} <= set(columns):
            raise ValueError("no columns question_id and sample")
        names = [name for name in columns if name not in PREDICTION_COLUMNS]
        sums = {name: np.zeros(len(store)) for name in names}
        counts = {name: np.zeros(len(store), int) for name in names}
        for row in rows:
            try:
                index = store.index_of(row["question_id"], int(row["sample"]))
            except KeyError:
                self.num_unknown += 1
                continue
            for name in names:
                value = float(row[name]) if row[name] else math.nan
                if not math.isnan(value):
                    sums[name][index] += value
                    counts[name][index] += 1
        for name in names:
            self.probabilities[name] = np.where(counts[name] > 0, sums[name] / np.maximum(counts[name], 1), np.nan)


def _floats(values: Any) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]
