"""Compare the detectors of several runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tracestore.errors import UsageError
from tracestore.evaluation.evaluate import evaluate_runs, run_scores
from tracestore.evaluation.significance import compare
from tracestore.run_results import read_results
from tracestore.store.format.provenance import Provenance, require_compatible

_DIGESTS = {"traces": "other traces of the same questions", "answers": "other positions of the answers"}
_SAME = "train on the same store with the same --seed and --folds"


def load_runs(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the results of each run by its folder; UsageError if a folder holds no finished run."""
    return {str(folder): read_results(folder, is_finished=True) for folder in folders}


def compare_runs(
    results: Mapping[str, dict[str, Any]], *, allow_mixed_provenance: bool = False
) -> dict[str, dict[str, Any]]:
    """Compare the detectors that all runs have.

    Parameters
    ----------
    results : mapping
        What `load_runs` returned.
    allow_mixed_provenance : bool
        Compare runs on stores whose provenances conflict.

    Returns
    -------
    dict
        For each detector: models (metrics by folder), comparisons (see `compare`) and num_runs
        (number of folds and seeds that were compared).

    Raises
    ------
    UsageError
        The runs cannot be compared.
    """
    loaded = {folder: run_scores(of_run) for folder, of_run in results.items()}
    first, seed = next(iter(loaded.values())), next(iter(results.values()))["config"]["seed"]
    known: list[Provenance] = []
    for folder, of_run in results.items():
        provenance = [Provenance.from_json(p) for p in of_run["store"]["provenance"]]
        if not allow_mixed_provenance:
            require_compatible(known, provenance, folder)
        known = [*known, *provenance]
    names = [name for name in first if all(name in models for models in loaded.values())]
    if not names:
        raise UsageError("the runs have no detector in common")
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        runs = {folder: models[name] for folder, models in loaded.items()}
        common = [key for key in first[name] if all(key in by_key for by_key in runs.values())]
        if {fold for fold, _ in common} != {fold for by_key in runs.values() for fold, _ in by_key}:
            raise UsageError(f"{name}: the runs have no fold and seed in common; {_SAME}")
        scores = {folder: [by_key[key] for key in common] for folder, by_key in runs.items()}
        try:
            pairs = compare(scores, seed)
        except ValueError as error:
            raise UsageError(f"{name}: {error}; {_SAME}") from None
        found[name] = {
            "models": {folder: evaluate_runs(of_folder, seed) for folder, of_folder in scores.items()},
            "comparisons": pairs,
            "num_runs": len(common),
        }
    return found


def differences_of_traces(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return sentences for runs on other traces than the first (another model, dtype or attention) or other answers."""
    (first, expected), *others = results.items()
    return [
        f"{folder} was trained on {what} than {first}"
        for key, what in _DIGESTS.items()
        for folder, found in others
        if None not in (found[key], expected[key]) and found[key] != expected[key]
    ]
