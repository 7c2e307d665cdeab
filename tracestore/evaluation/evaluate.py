"""Evaluation of a detector on its test split, for one run or aggregated over several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tracestore.evaluation import metrics
from tracestore.split import question_keys
from tracestore.store.read.store import TraceStore

# With fewer resamples that have a fold of both classes, the others are no sample of what could have been tested.
MIN_SHARE_OF_DRAWS = 0.9
# The lists of test scores, in the order of the fields of `RunScores`.
_COLUMNS = {"trace_index": np.int64, "question_id": object, "group": object, "label": np.int64, "logit": np.float64}


@dataclass(frozen=True)
class RunScores:
    """Labels and logits of the n test traces of one run.

    Parameters
    ----------
    fold : int
        Runs of the same fold test the same traces.
    trace : np.ndarray
        ``(n,)`` int64, store indices.
    question, group : np.ndarray
        ``(n,)`` str; the group is empty for a trace without one.
    y : np.ndarray
        ``(n,)``, 0 or 1.
    logit : np.ndarray
        ``(n,)`` float64.
    threshold, temperature : float
        Decision threshold of the logit, and temperature of the calibration.
    """

    fold: int
    trace: np.ndarray
    question: np.ndarray
    group: np.ndarray
    y: np.ndarray
    logit: np.ndarray
    threshold: float
    temperature: float

    def __post_init__(self) -> None:
        if len({len(values) for values in (self.trace, self.question, self.group, self.y, self.logit)}) != 1:
            raise ValueError("the scores have different lengths")

    @classmethod
    def from_entry(cls, entry: dict[str, Any], fold: int = 0) -> "RunScores":
        """Return the scores of a model entry of results.json."""
        scores = entry["test_scores"]
        trace, question, group, y, logit = (np.array(scores[name], dtype) for name, dtype in _COLUMNS.items())
        return cls(fold, trace, question, group, y, logit, float(entry["threshold"]), float(entry["temperature"]))


def unscaled_scores(store: TraceStore, fold: int, indices: np.ndarray, y: np.ndarray, scores: np.ndarray) -> RunScores:
    """Return scores that are no logits and have no threshold; those that are unknown, NaN, get the mean of the others."""
    known = ~np.isnan(scores)
    filled = np.where(known, scores, scores[known].mean() if known.any() else 0.0)
    questions = np.array(store.question_ids.take(indices), dtype=object)
    groups = np.array([store.group(int(k)) for k in indices], dtype=object)
    return RunScores(fold, indices, questions, groups, y, filled, 0.0, 1.0)


def run_scores(results: Mapping[str, Any]) -> dict[str, dict[tuple[int, int], RunScores]]:
    """Return the test scores of each model of results.json by fold and seed; the fold is 0 for a run without folds."""
    runs = results.get("runs") or [{"fold": 0, "seed": results["config"]["seed"], "models": results["models"]}]
    found: dict[str, dict[tuple[int, int], RunScores]] = {}
    for run in runs:
        fold = run["fold"] or 0
        for name, entry in run["models"].items():
            found.setdefault(name, {})[fold, run["seed"]] = RunScores.from_entry(entry, fold)
    return found


class BootstrapResampler:
    """AUROC and average precision over runs, and their bootstrap by question.

    Both metrics are computed within each run and averaged over the runs, because logits of
    separately trained models have no common scale. Resamples are drawn from all folds together: a fold
    may have one question of a class, which would be in every resample of the fold.

    Parameters
    ----------
    runs : sequence of RunScores
    seed : int
    by : {"question", "group"}
        The traces that are drawn together. With "group" a trace without a group stands for its question.

    References
    ----------
    Forman and Scholz 2010, "Apples-to-Apples in Cross-Validation Studies".
    """

    def __init__(self, runs: Sequence[RunScores], seed: int, by: str = "question") -> None:
        self.runs, self.seed = runs, seed
        # Each trace once, even where several runs score it.
        self.trace, first = np.unique(np.concatenate([r.trace for r in runs]), return_index=True)
        self.y = y = np.concatenate([r.y for r in runs])[first]
        question = np.concatenate([r.question for r in runs])[first]
        if by == "group":
            groups = np.concatenate([r.group for r in runs])[first]
            question = np.array(question_keys(question.tolist(), groups.tolist()), dtype=object)
        numbers: dict[str, int] = {}
        self.clusters = np.array([numbers.setdefault(q, len(numbers)) for q in question])
        self.strata = metrics.class_strata(y, self.clusters)
        self._run_metrics = [(metrics.RankMetrics(r.y, r.logit), np.searchsorted(self.trace, r.trace)) for r in runs]

    @property
    def num_questions(self) -> int:
        """Number of tested questions, or groups."""
        return int(self.clusters.max()) + 1

    def _mean_over_runs(self, weights: np.ndarray) -> np.ndarray:
        """Return AUROC and average precision: (R, n) -> (R, 2). A run that has one class then is left out."""
        with np.errstate(invalid="ignore", divide="ignore"):
            values = np.array([of_run.weighted(weights[:, columns]) for of_run, columns in self._run_metrics])
            values[np.isnan(values[..., 0])] = np.nan
            mean: np.ndarray = np.nansum(values, axis=0) / (~np.isnan(values)).sum(0)
        return mean

    def leave_one_out(self) -> np.ndarray:
        """Return AUROC and average precision ``(G, 2)`` without each of the G questions or groups."""
        return self._mean_over_runs((self.clusters != np.arange(self.num_questions)[:, None]).astype(np.float64))

    def estimate(self) -> np.ndarray:
        """Return AUROC and average precision ``(2,)`` of the sample itself."""
        both: np.ndarray = self._mean_over_runs(np.ones((1, len(self.trace))))[0]
        return both

    @property
    def too_few(self) -> str | None:
        """Reason why there is no interval and no test. None if there are."""
        reason = metrics.too_few(self.y, self.clusters)
        if reason is None and len(self.draws) < MIN_SHARE_OF_DRAWS * metrics.BOOTSTRAP_SAMPLES:
            share = len(self.draws) / metrics.BOOTSTRAP_SAMPLES
            reason = f"only {share:.0%} of the resamples have a fold of both classes: no interval and no test"
        return reason

    @cached_property
    def draws(self) -> np.ndarray:
        """AUROC and average precision ``(R, 2)`` of resamples, paired between models.

        Resamples in which no run has both classes are left out: the same ones for every model.
        """
        values = metrics.bootstrap(self._mean_over_runs, self.clusters, self.strata, self.seed)
        return np.compress(~np.isnan(values[:, 0]), values, axis=0)


def evaluate_runs(runs: Sequence[RunScores], seed: int) -> dict[str, Any]:
    """Return "test", "calibration" and "by_group" of a model entry of results.json.

    AUROC and average precision are means over the runs. Decisions and probabilities are
    pooled, because they have the same meaning in every run.
    """
    resampler = BootstrapResampler(runs, seed)
    estimate, reason = resampler.estimate(), resampler.too_few
    intervals = [None if reason else list(metrics.percentile_interval(values)) for values in resampler.draws.T]
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
        "num_traces": len(resampler.trace),
        "num_questions": resampler.num_questions,
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
    """Return the AUROC of each group, a mean over the runs in which the group has both classes, or None.

    The counts contain each trace once.
    """
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
            "num_traces": len(label_of),
            "num_hallucinated": sum(label_of.values()),
        }
        for name, label_of in sorted(labels.items())
    ]


def evaluate_split(
    store: TraceStore,
    indices: np.ndarray,
    y: np.ndarray,
    logit: np.ndarray,
    threshold: float,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Return the test metrics and test logits of a model entry of results.json.

    Parameters
    ----------
    store : TraceStore
    indices : np.ndarray
        ``(n,)`` int64, store indices of the test split.
    y : np.ndarray
        ``(n,)``, 0 or 1.
    logit : np.ndarray
        ``(n,)`` float64.
    threshold, temperature : float
        Chosen on the validation split.
    seed : int
        Seed of the bootstrap.
    """
    entry: dict[str, Any] = {
        "threshold": threshold,
        "temperature": temperature,
        "test_scores": {
            "question_id": store.question_ids.take(indices),
            "sample": [store[int(k)].sample for k in indices],
            "trace_index": indices.tolist(),
            "group": [store.group(int(k)) for k in indices],
            "label": y.tolist(),
            "logit": logit.tolist(),
        },
    }
    return {**entry, **evaluate_runs([RunScores.from_entry(entry)], seed)}
