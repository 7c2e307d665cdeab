"""Controls of a training run: scores that know nothing of hidden states or attention, on the same test traces.

A detector near a control may have learned no more than the control, such as that long answers are wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracestore.data.tokens.answers import answer_span
from tracestore.evaluation.evaluate import evaluate_runs, unscaled_scores
from tracestore.evaluation.store_split import Split
from tracestore.store.read.store import TraceStore

DESCRIPTIONS = {
    "number of tokens": "long traces are hallucinated",
    "mean log-probability": "answers of a low log-probability are hallucinated",
}
# A control has no threshold and no probabilities.
_METRICS = ("auroc", "auroc_interval", "auprc", "auprc_interval", "num_traces", "num_questions", "too_few")


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
    tested = np.concatenate([split.indices["test"] for split in splits]).tolist()
    num_tokens = store.num_tokens
    controls: dict[str, Callable[[np.ndarray], np.ndarray]] = {}  # functions of the test traces
    if (num_tokens[tested] > 0).all():
        controls["number of tokens"] = lambda test: num_tokens[test].astype(np.float64)
    if any(store[k].token_logprob is not None for k in tested):
        controls["mean log-probability"] = lambda test: -_mean_logprob(store, test)
    found = {}
    for name, score in controls.items():
        runs = []
        for fold, split in enumerate(splits):
            test = split.indices["test"]
            labels = (targets[test] >= 0.5).astype(np.int64)
            runs.append(unscaled_scores(store, fold, test, labels, score(test)))
        of_runs = evaluate_runs(runs, seed)["test"]
        found[name] = {"test": {key: of_runs[key] for key in _METRICS}}
    return found


def _mean_logprob(store: TraceStore, indices: np.ndarray) -> np.ndarray:
    """Return the mean log-probability of each trace's answer, NaN where it is unknown."""
    means = np.full(len(indices), np.nan)
    for position, index in enumerate(indices.tolist()):
        trace = store[index]
        values = trace.token_logprob
        if values is None:
            continue
        begin, end = answer_span(trace, len(values)) or (0, len(values))
        values = values[begin:end]
        if np.isfinite(values).any():
            means[position] = values[np.isfinite(values)].mean()
    return means
