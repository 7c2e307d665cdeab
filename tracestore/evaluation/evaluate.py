"""The figures of a detector on traces it has not seen, of one run or pooled over several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracestore.evaluation import metrics
from tracestore.store.read.store import TraceStore


@dataclass(frozen=True)
class RunScores:
    """Labels and logits of one run's test part; n traces. `fold`: runs with the same fold
    test the same traces."""

    fold: int
    trace: np.ndarray  # (n,) int64, store indices
    question: np.ndarray  # (n,) str
    group: np.ndarray  # (n,) str, "" without one
    y: np.ndarray  # (n,) 0 or 1
    logit: np.ndarray  # (n,) float64
    threshold: float
    temperature: float

    @classmethod
    def from_entry(cls, entry: dict[str, Any], fold: int = 0) -> "RunScores":
        """Of a model's entry in results.json."""
        scores = entry["test_scores"]
        return cls(
            fold,
            np.array(scores["trace_index"], np.int64),
            np.array(scores["question_id"], dtype=object),
            np.array(scores["group"], dtype=object),
            np.array(scores["label"], np.int64),
            np.array(scores["logit"], np.float64),
            entry["threshold"],
            entry["temperature"],
        )


class BootstrapResampler:
    """AUROC and average precision over runs, and their bootstrap by question.

    Each is computed within a run and averaged over runs: logits of models that were trained
    apart have no common scale (Forman and Scholz 2010). Resamples are drawn within each fold."""

    def __init__(self, runs: Sequence[RunScores], seed: int) -> None:
        self.runs, self.seed = runs, seed
        # Of each trace once, whatever the number of runs that score it.
        self.trace, first = np.unique(np.concatenate([r.trace for r in runs]), return_index=True)
        fold = np.concatenate([np.full(len(r.trace), r.fold) for r in runs])[first]
        self.y = y = np.concatenate([r.y for r in runs])[first]
        question = np.concatenate([r.question for r in runs])[first]
        numbers: dict[str, int] = {}
        self.clusters = np.array([numbers.setdefault(q, len(numbers)) for q in question])
        self.strata = 4 * fold + metrics.class_strata(y, self.clusters)
        self._figures = [(metrics.RankMetrics(r.y, r.logit), np.searchsorted(self.trace, r.trace)) for r in runs]

    @property
    def num_questions(self) -> int:
        return int(self.clusters.max()) + 1

    def _mean_over_runs(self, weights: np.ndarray) -> np.ndarray:
        """(R, n) -> (R, 2): AUROC and average precision."""
        mean: np.ndarray = np.mean([figures.of(weights[:, places]) for figures, places in self._figures], axis=0)
        return mean

    def estimate(self) -> np.ndarray:
        """(2,): AUROC and average precision as measured."""
        both: np.ndarray = self._mean_over_runs(np.ones((1, len(self.trace))))[0]
        return both

    @property
    def too_few(self) -> str | None:
        """Why no interval and no test is given, or None where they are."""
        return metrics.too_few(self.y, self.clusters)

    def draws(self, samples: int = metrics.BOOTSTRAP_SAMPLES) -> np.ndarray:
        """(samples, 2); rows of two models on the same traces are paired."""
        return metrics.bootstrap(self._mean_over_runs, self.clusters, self.strata, self.seed, samples)


def evaluate_runs(runs: Sequence[RunScores], seed: int) -> dict[str, Any]:
    """ "test", "calibration" and "by_group" of an entry in results.json.

    Figures of ranks are means over runs; decisions and probabilities are pooled, for these
    mean the same in every run."""
    ranks = BootstrapResampler(runs, seed)
    estimate, reason = ranks.estimate(), ranks.too_few
    intervals: list[list[float] | None] = [None, None]
    if reason is None:
        draws = ranks.draws()
        intervals = [list(metrics.percentile_interval(draws[:, k])) for k in (0, 1)]
    y = np.concatenate([r.y for r in runs])
    p = np.concatenate([metrics.probability(r.logit) for r in runs])
    scaled = np.concatenate([metrics.probability(r.logit, r.temperature) for r in runs])
    predicted = np.concatenate([r.logit >= r.threshold for r in runs])
    bins, scaled_bins = metrics.reliability(y, p), metrics.reliability(y, scaled)
    test = {
        "auroc": float(estimate[0]),
        "auroc_interval": intervals[0],
        "auprc": float(estimate[1]),
        "auprc_interval": intervals[1],
        "too_few": reason,
        **metrics.threshold_metrics(y, predicted),
        "brier": metrics.brier(y, p),
        "ece": metrics.ece(bins),
        "num_traces": len(ranks.trace),
        "num_questions": ranks.num_questions,
    }
    calibration = {
        "num_bins": metrics.CALIBRATION_BINS,
        "ece": test["ece"],
        "brier": test["brier"],
        "reliability": bins,
        "temperature": float(np.mean([r.temperature for r in runs])),
        "scaled": {"ece": metrics.ece(scaled_bins), "brier": metrics.brier(y, scaled), "reliability": scaled_bins},
    }
    return {"test": test, "calibration": calibration, "by_group": _by_group(runs)}


def _by_group(runs: Sequence[RunScores]) -> list[dict[str, Any]]:
    """AUROC of each group's traces alone, mean over the runs that have both classes of it;
    None where none has. Counts are of traces, each once."""
    labels: dict[str, dict[int, int]] = {}
    values: dict[str, list[float]] = {}
    for run in runs:
        for name in sorted(set(run.group) - {""}):
            inside = run.group == name
            labels.setdefault(name, {}).update(zip(run.trace[inside].tolist(), run.y[inside].tolist(), strict=True))
            value = metrics.auroc(run.y[inside], run.logit[inside])
            if not np.isnan(value):
                values.setdefault(name, []).append(value)
    return [
        {
            "group": name,
            "auroc": float(np.mean(values[name])) if name in values else None,
            "num_traces": len(of),
            "num_hallucinated": sum(of.values()),
        }
        for name, of in sorted(labels.items())
    ]


def evaluate_part(
    store: TraceStore,
    indices: np.ndarray,
    y: np.ndarray,
    logit: np.ndarray,
    threshold: float,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """What an entry of results.json says of its test part: its figures, its traces' logits."""
    entry: dict[str, Any] = {
        "threshold": threshold,
        "temperature": temperature,
        "test_scores": {
            "question_id": store.question_ids.at(indices),
            "sample": [store[int(k)].sample for k in indices],
            "trace_index": indices.tolist(),
            "group": [store.group(int(k)) for k in indices],
            "label": y.tolist(),
            "logit": logit.tolist(),
        },
    }
    return {**entry, **evaluate_runs([RunScores.from_entry(entry)], seed)}
