"""The results of `tracestore train`, `predict` and `benchmark` that the page shows."""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import UsageError, escape_unprintable
from tracestore.run_results import read_results
from tracestore.store.format.labels import CORRECT, FOLD_PREFIX, PREDICTION_COLUMNS, STORE_COLUMN
from tracestore.store.io.files import is_same_location, parse_location
from tracestore.store.io.fsio import open_csv, open_regular
from tracestore.store.read.store import TraceStore
from tracestore.store.vocabulary import direction_of

# Column of the logistic probe in predictions.csv. In results.json the probe is not among the models.
PROBE = "logistic_probe"
# Column of the decisions in a file of `tracestore predict`. Its threshold is the lowest score with a 1, without one 1.
_PREDICTED = "predicted"
# File that a benchmark writes into its folder.
_BENCHMARK = "benchmark.json"
# Threshold of a detector of which none is known.
_DEFAULT = 0.5
# Fold, seed and index of a tested trace, as predictions.csv has them; no seed for a probe.
_Tested = tuple[str, str | None, str]


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
    margins : dict of ndarray
        Of a detector that was trained several times, each time with its own threshold: the mean distance of the logit
        above the threshold, float64 (N,), NaN for a trace that was not tested.
    ranked : set of str
        Detectors of a benchmark. Instead of a probability they have a rank: the share of the traces of the same fold
        that have a lower score; equal scores, also its own, count half.
    num_unknown : int
        Number of predictions for traces that the store lacks.
    labels : dict of float
        Labels that the files of results have, 1 for a hallucination, by the index of the trace.
    """

    probabilities: dict[str, np.ndarray] = field(default_factory=dict)
    history: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    thresholds: dict[str, float] = field(default_factory=dict)
    margins: dict[str, np.ndarray] = field(default_factory=dict)
    ranked: set[str] = field(default_factory=set)
    num_unknown: int = 0
    labels: dict[int, float] = field(default_factory=dict)
    # Distances of the logits above the thresholds: of each detector by fold, seed and index in its own store.
    _of_trainings: dict[str, dict[_Tested, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, paths: Sequence[Path], store: TraceStore) -> "Results":
        """Read output folders of `tracestore train` or `benchmark`, and files of scores.

        Scores are those of `tracestore predict` or `benchmark`, or the columns of a file like predictions.csv. With
        several paths, the name of a detector begins with that of its path.

        Raises
        ------
        UsageError
            A folder has neither results.json nor scores.csv, or a file is not what these commands write.
        """
        found = cls()
        for path in paths:
            results = cls()
            is_benchmark = (path / _BENCHMARK).exists()
            if not is_benchmark and (path.is_dir() or not path.suffix):
                results._read_models(read_results(path))
            is_file = path.suffix == ".csv" and not path.is_dir()
            scores = path if is_file else path / ("scores.csv" if is_benchmark else "predictions.csv")
            if is_file or is_benchmark or scores.exists():
                with _readable(scores) as file, open_csv(open_regular(file)) as rows:
                    results._read_scores(csv.DictReader(rows, strict=True), store)
            is_unique = len({other.name for other in paths}) == len(paths)
            found._add(results, "" if len(paths) == 1 else f"{path.name if is_unique else path}: ")
        return found

    def _add(self, other: "Results", prefix: str) -> None:
        for name in ("probabilities", "history", "test", "thresholds", "margins"):
            getattr(self, name).update({prefix + key: value for key, value in getattr(other, name).items()})
        self.ranked |= {prefix + name for name in other.ranked}
        self.labels |= other.labels
        self.num_unknown += other.num_unknown

    def _read_models(self, document: dict[str, Any]) -> None:
        models = dict(document["models"])
        trainings = [(run, run["models"]) for run in document.get("runs") or ()]
        if document.get("probe"):
            models[PROBE] = document["probe"]
            trainings += [(probe, {PROBE: probe}) for probe in document.get("probes") or ()]
        of_trainings: dict[str, list[Any]] = {}
        for run, entries in trainings:
            for name, entry in entries.items():
                of_trainings.setdefault(name, []).append((run, entry))
        for name, entry in models.items():
            self.test[name] = {k: v for k, v in entry["test"].items() if isinstance(v, int | float)}
            if name in of_trainings:
                self._of_trainings[name] = dict(_margins(of_trainings[name]))
            else:
                # As training computes probabilities: a trace at the threshold has this very number.
                self.thresholds[name] = float(np.exp(-np.logaddexp(0, -entry.get("threshold", 0.0))))
            if "history" in entry:
                self.history[name] = {
                    k: [math.nan if n is None else float(n) for n in v] for k, v in entry["history"].items()
                }

    def predicts(self, name: str) -> np.ndarray:
        """Return which traces a detector predicts hallucinated, bool (N,); false for a trace without a probability."""
        threshold = self.threshold(name)
        above: np.ndarray = self.margins[name] >= 0 if threshold is None else self.probabilities[name] >= threshold
        return above

    def threshold(self, name: str) -> float | None:
        """Return the probability from which on a detector predicts a hallucination, None if each training has its own."""
        return None if name in self.margins else self.thresholds.get(name, _DEFAULT)

    def _read_scores(self, rows: "csv.DictReader[str]", store: TraceStore) -> None:
        """Read scores by question id and sample, because indices may differ in another store."""
        columns = rows.fieldnames or ()
        if not {"question_id", "sample"} <= set(columns):
            raise ValueError("no columns question_id and sample")
        schemes = [name.partition(":")[2] for name in columns if name.startswith(FOLD_PREFIX)]
        if schemes:
            self._read_benchmark(rows, schemes, store)
        else:
            self._read_predictions(rows, columns, store)

    def _rows_of(self, rows: Iterable[dict[str, str]], store: TraceStore) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the rows of the traces of the store with their indices, and count the other rows."""
        here, find = store.internals.files.location, store.internals.index.find
        is_here = cache(lambda text: text is None or is_same_location(here, parse_location(text)))
        for row in rows:
            if is_here(row.get(STORE_COLUMN)) and (index := find(row["question_id"], int(row["sample"]))) >= 0:
                yield index, row
            else:
                self.num_unknown += 1

    def _read_benchmark(self, rows: "csv.DictReader[str]", schemes: Sequence[str], store: TraceStore) -> None:
        """Read the scores of a benchmark as ranks, because the scores of detectors and folds have no common scale.

        As many traces of the highest ranks are predicted hallucinated as are labeled so.
        """
        found = dict(self._rows_of(rows, store))
        for index, row in found.items():
            self._keep_label(index, row)
        indices = list(found)
        hallucinated = float(np.mean([float(row["label"]) for row in found.values()])) if found else 0.0
        for name in rows.fieldnames or ():
            _, colon, scheme = name.rpartition(":")
            if not colon or scheme not in schemes or name.startswith(FOLD_PREFIX):
                continue
            folds = np.array([row[FOLD_PREFIX + scheme] for row in found.values()])
            scores = np.array([float(row[name] or "nan") for row in found.values()])
            ranks = np.full(len(scores), np.nan)
            for fold in np.unique(folds):
                inside = np.flatnonzero((folds == fold) & ~np.isnan(scores))
                _, position, counts = np.unique(scores[inside], return_inverse=True, return_counts=True)
                ranks[inside] = (np.cumsum(counts) - counts / 2)[position] / max(1, len(inside))
            self.probabilities[name] = np.full(len(store), np.nan)
            self.probabilities[name][indices] = ranks
            self.thresholds[name] = 1 - hallucinated
            self.ranked.add(name)

    def _read_predictions(self, rows: "csv.DictReader[str]", columns: Sequence[str], store: TraceStore) -> None:
        others = (*PREDICTION_COLUMNS, "group", _PREDICTED, STORE_COLUMN)
        names = [name for name in columns if name not in others]
        if (name := next((n for n in names if direction_of(n.lower()) == CORRECT), None)) is not None:
            raise ValueError(f"{name}: means that a high value is correct, expected a probability of a hallucination")
        lowest = 1.0 if _PREDICTED in columns else math.inf
        sums = {name: np.zeros((3, len(store))) for name in names}  # of probabilities, margins and tests
        for index, row in self._rows_of(rows, store):
            self._keep_label(index, row)
            for name in names:
                value = float(row[name]) if row[name] else math.nan
                if not math.isnan(value):
                    if not 0 <= value <= 1:
                        raise ValueError(f"{name}: found {value:g}, expected a probability")
                    if row.get(_PREDICTED) == "1":
                        lowest = min(lowest, value)
                    seed = None if name == PROBE else row.get("seed")  # one probe of a fold for all seeds
                    margins = self._of_trainings.get(name)
                    margin = math.nan if margins is None else margins[row["fold"], seed, row["trace_index"]]
                    sums[name][:, index] += value, margin, 1
        for name, (values, above, counts) in sums.items():
            counts = np.where(counts > 0, counts, np.nan)
            self.probabilities[name] = values / counts
            if name in self._of_trainings:
                self.margins[name] = above / counts
            elif lowest < math.inf:
                self.thresholds[name] = lowest

    def _keep_label(self, index: int, row: Mapping[str, str]) -> None:
        if text := row.get("label"):
            self.labels[index] = float(text)


def _margins(trainings: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[tuple[_Tested, float]]:
    """Yield the distance of each logit above its threshold, for trainings and the entries of one detector in them."""
    for training, entry in trainings:
        fold = "" if training["fold"] is None else str(training["fold"])
        seed = str(training["seed"]) if "seed" in training else None
        scores = entry["test_scores"]
        for trace, logit in zip(scores["trace_index"], scores["logit"], strict=True):
            yield (fold, seed, str(trace)), logit - entry["threshold"]


@contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """Convert the errors of an unreadable or invalid file into UsageError."""
    try:
        yield path
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        reason = escape_unprintable(str(error), 100)
        raise UsageError(f"{path}: not what tracestore train, predict or benchmark writes ({reason})") from None
