"""The results of `tracestore train` that the page shows."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import UsageError, escape_unprintable
from tracestore.store.format.labels import PREDICTION_COLUMNS
from tracestore.store.io.fsio import open_regular, read_json
from tracestore.store.read.store import TraceStore

# Column of the logistic probe in predictions.csv. In results.json the probe is not among the models.
PROBE = "logistic_probe"
# Column of the decisions in a file of `tracestore predict`. Its threshold is the lowest score with a 1.
_PREDICTED = "predicted"


@dataclass
class Results:
    """Results by the name of the detector.

    Parameters
    ----------
    probabilities : dict of ndarray
        Probability of a hallucination for each trace of the store, float64 (N,). The mean if a trace was
        tested several times, NaN if it was not tested.
    history : dict of dict of list
        Training curves, with one value per epoch.
    test : dict of dict
        Metrics of the test split.
    thresholds : dict of float
        Probability from which on the detector predicts a hallucination.
    num_unknown : int
        Number of predictions for traces that the store lacks.
    """

    probabilities: dict[str, np.ndarray] = field(default_factory=dict)
    history: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    thresholds: dict[str, float] = field(default_factory=dict)
    num_unknown: int = 0

    @classmethod
    def read(cls, paths: Sequence[Path], store: TraceStore) -> "Results":
        """Read output folders of `tracestore train` and files of scores.

        Scores are those of `tracestore predict` or the columns of a file like predictions.csv. With several paths, the
        name of a detector begins with that of its path.

        Raises
        ------
        UsageError
            A folder has no results.json, or a file is not what training or prediction writes.
        """
        found = cls()
        for path in paths:
            results = cls()
            if path.is_dir() or not path.suffix:
                with _readable(path / "results.json") as file:
                    results._read_models(read_json(file))
            scores = path if path.suffix == ".csv" and not path.is_dir() else path / "predictions.csv"
            if scores == path or scores.exists():
                with (
                    _readable(scores) as file,
                    io.TextIOWrapper(open_regular(file), encoding="utf-8", newline="") as rows,
                ):
                    results._read_predictions(csv.DictReader(rows, strict=True), store)
            is_unique = len({other.name for other in paths}) == len(paths)
            found._add(results, "" if len(paths) == 1 else f"{path.name if is_unique else path}: ")
        return found

    def _add(self, other: "Results", prefix: str) -> None:
        for name in ("probabilities", "history", "test", "thresholds"):
            getattr(self, name).update({prefix + key: value for key, value in getattr(other, name).items()})
        self.num_unknown += other.num_unknown

    def _read_models(self, document: Any) -> None:
        models = dict(document["models"])
        if document.get("probe"):
            models[PROBE] = document["probe"]
        for name, entry in models.items():
            self.test[name] = {k: v for k, v in entry["test"].items() if isinstance(v, int | float)}
            # results.json holds a logit.
            self.thresholds[name] = 1 / (1 + math.exp(-float(entry.get("threshold") or 0.0)))
            if "history" in entry:
                self.history[name] = {k: _floats(v) for k, v in entry["history"].items()}

    def _read_predictions(self, rows: "csv.DictReader[str]", store: TraceStore) -> None:
        """Read predictions by question id and sample, because indices may differ in another store."""
        columns = rows.fieldnames or ()
        if not {"question_id", "sample"} <= set(columns):
            raise ValueError("no columns question_id and sample")
        others = (*PREDICTION_COLUMNS, "group", _PREDICTED)
        names = [name for name in columns if name not in others and not name.startswith("fold:")]
        lowest = math.inf
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
                    if not 0 <= value <= 1:
                        raise ValueError(f"{name}: found {value:g}, expected a probability")
                    if row.get(_PREDICTED) == "1":
                        lowest = min(lowest, value)
                    sums[name][index] += value
                    counts[name][index] += 1
        for name in names:
            self.probabilities[name] = np.where(counts[name] > 0, sums[name] / np.maximum(counts[name], 1), np.nan)
            if lowest < math.inf:
                self.thresholds[name] = lowest


@contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """Convert the errors of an unreadable or invalid file into UsageError."""
    try:
        yield path
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        reason = escape_unprintable(str(error), 100)
        raise UsageError(f"{path}: not what tracestore train writes ({reason})") from None


def _floats(values: Any) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]
