"""Controls of a training run: scores that know nothing of hidden states or attention, on the same test traces.

A detector near a control may have learned no more than the control: that long answers are wrong, or that
the questions of a group are hard.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracestore.evaluation import metrics
from tracestore.evaluation.evaluate import BootstrapResampler, RunScores
from tracestore.evaluation.split import Split
from tracestore.store.read.store import TraceStore

DESCRIPTIONS = {
    "number of tokens": "long traces are hallucinated",
    "mean log-probability": "answers of a low log-probability are hallucinated",
    "group rate": "the share of hallucinations in the group's training traces",
}


def control_entries(
    store: TraceStore, splits: Sequence[Split], targets: np.ndarray, seed: int
) -> dict[str, dict[str, Any]]:
    """Return the test metrics of each control that the store has the fields for.

    Parameters
    ----------
    store : TraceStore
    splits : sequence of Split
        The split, or the folds.
    targets : np.ndarray
        ``(len(store),)``, labels of all traces.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    dict
        Entries by name, with ``test``: auroc, auprc, their intervals, num_traces, num_questions, too_few.
    """
    found = {}
    groups = np.array([store.group(k) for k in range(len(store))], dtype=object)
    tested = np.concatenate([split.indices["test"] for split in splits]).tolist()
    num_tokens = store.num_tokens
    has_lengths = bool((num_tokens[tested] > 0).all())
    has_logprob = any(store[k].token_logprob is not None for k in tested)
    scores: dict[str, list[np.ndarray]] = {}
    for split in splits:
        train, test = split.indices["train"], split.indices["test"]
        if has_lengths:
            scores.setdefault("number of tokens", []).append(num_tokens[test].astype(np.float64))
        if has_logprob:
            scores.setdefault("mean log-probability", []).append(-_mean_logprob(store, test))
        if (groups != "").any():
            scores.setdefault("group rate", []).append(_group_rate(groups, targets, train, test))
    for name, values in scores.items():
        runs = []
        for fold, (split, score) in enumerate(zip(splits, values, strict=True)):
            test = split.indices["test"]
            questions = np.array(store.question_ids.take(test), dtype=object)
            labels = (targets[test] >= 0.5).astype(np.int64)
            runs.append(RunScores(fold, test, questions, groups[test], labels, score, 0.0, 1.0))
        found[name] = {"test": _test_metrics(runs, seed)}
    return found


def _mean_logprob(store: TraceStore, indices: np.ndarray) -> np.ndarray:
    """Return the mean log-probability of each trace's generated tokens; the mean of all where it is unknown."""
    means = np.full(len(indices), np.nan)
    for position, index in enumerate(indices.tolist()):
        trace = store[index]
        values = trace.token_logprob
        if values is None:
            continue
        values = values[trace.prompt_length or 0 :]
        if np.isfinite(values).any():
            means[position] = values[np.isfinite(values)].mean()
    known = means[~np.isnan(means)]
    return np.where(np.isnan(means), known.mean() if len(known) else 0.0, means)


def _group_rate(groups: np.ndarray, targets: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    labels = targets[train] >= 0.5
    rates = {name: float(labels[groups[train] == name].mean()) for name in set(groups[train])}
    return np.array([rates.get(name, float(labels.mean())) for name in groups[test]])


def _test_metrics(runs: Sequence[RunScores], seed: int) -> dict[str, Any]:
    resampler = BootstrapResampler(runs, seed)
    estimate, draws = resampler.estimate(), resampler.draws() if resampler.too_few is None else None
    found: dict[str, Any] = {}
    for k, name in enumerate(("auroc", "auprc")):
        found[name] = float(estimate[k])
        interval = None if draws is None else list(metrics.percentile_interval(draws[:, k]))
        found[f"{name}_interval"] = interval
    counts = {"num_traces": len(resampler.trace), "num_questions": resampler.num_questions}
    return {**found, **counts, "too_few": resampler.too_few}
