"""Compare the detectors of several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracestore.errors import UsageError
from tracestore.evaluation.evaluate import RunScores, evaluate_runs, run_scores
from tracestore.evaluation.significance import compare
from tracestore.store.format.provenance import Provenance, require_compatible
from tracestore.store.io.fsio import read_json

_SAME = "train on the same store with the same --seed and --folds"


def compare_runs(folders: Sequence[Path], *, allow_mixed_provenance: bool = False) -> dict[str, dict[str, Any]]:
    """Compare the detectors that all runs have.

    Parameters
    ----------
    folders : sequence of Path
        Output directories of ``tracestore train``.
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
        A folder holds no finished run, or the runs cannot be compared.
    """
    loaded = {str(folder): _load_scores(folder) for folder in folders}
    first, seed, known = loaded[str(folders[0])]
    for folder, (_, _, provenance) in loaded.items():
        if not allow_mixed_provenance:
            require_compatible(known, provenance, folder)
        known = [*known, *provenance]
    names = [name for name in first if all(name in models for models, _, _ in loaded.values())]
    if not names:
        raise UsageError("the runs have no detector in common")
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        runs = {folder: models[name] for folder, (models, _, _) in loaded.items()}
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


def _load_scores(folder: Path) -> tuple[dict[str, dict[tuple[int, int], RunScores]], int, list[Provenance]]:
    """Read results.json. Return the scores of each detector by (fold, seed), the seed, and the store's provenance.

    Raise UsageError if the file does not belong to a finished run.
    """
    path = folder / "results.json"
    try:
        results = read_json(path)
        seed, found = int(results["config"]["seed"]), run_scores(results)
        provenance = [Provenance.from_json(p) for p in results["store"]["provenance"]]
        if "comparisons" not in results:
            raise ValueError
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path}: not the results of a finished run of tracestore train") from None
    return found, seed, provenance
