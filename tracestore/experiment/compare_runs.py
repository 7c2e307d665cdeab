"""Compare the detectors of several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracestore.errors import UsageError
from tracestore.evaluation.evaluate import RunScores, evaluate_runs
from tracestore.evaluation.significance import compare
from tracestore.store.io.fsio import read_json

_SAME = "train on the same store with the same --seed and --folds"


def compare_runs(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Compare the detectors that all runs have.

    Parameters
    ----------
    folders : sequence of Path
        Output directories of ``tracestore train``.

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
    loaded = {str(folder): _load_results(folder) for folder in folders}
    try:
        return _compare(folders, loaded)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(
            f"results.json: not the results of a run of tracestore train: {type(error).__name__}"
        ) from None


def _compare(folders: Sequence[Path], loaded: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    by_folder = {folder: _entries(results) for folder, results in loaded.items()}
    first = by_folder[str(folders[0])]
    names = [name for name in first if all(name in entries for entries in by_folder.values())]
    if not names:
        raise UsageError("the runs have no detector in common")
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        common = [key for key in first[name] if all(key in entries[name] for entries in by_folder.values())]
        if {fold for fold, _ in common} != {fold for entries in by_folder.values() for fold, _ in entries[name]}:
            raise UsageError(f"{name}: the runs have no fold and seed in common; {_SAME}")
        scores = {
            folder: [RunScores.from_entry(entries[name][key], key[0]) for key in common]
            for folder, entries in by_folder.items()
        }
        seed = int(loaded[str(folders[0])]["config"]["seed"])
        try:
            pairs = compare(scores, seed)
        except ValueError as error:
            raise UsageError(f"{name}: {error}; {_SAME}") from None
        found[name] = {
            "models": {folder: evaluate_runs(runs, seed) for folder, runs in scores.items()},
            "comparisons": pairs,
            "num_runs": len(common),
        }
    return found


def _load_results(folder: Path) -> dict[str, Any]:
    """Read results.json; raise UsageError where it does not belong to a finished run."""
    path = folder / "results.json"
    try:
        results = read_json(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path}: not the results of a run of tracestore train") from None
    if not isinstance(results, dict) or "comparisons" not in results:
        raise UsageError(f"{path}: not the results of a finished run of tracestore train")
    return results


def _entries(results: dict[str, Any]) -> dict[str, dict[tuple[int, int], dict[str, Any]]]:
    """Return the model entries of each detector by (fold, seed)."""
    runs = results.get("runs") or [{"fold": None, "seed": results["config"]["seed"], "models": results["models"]}]
    found: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for run in runs:
        for name, entry in run["models"].items():
            found.setdefault(name, {})[run["fold"] or 0, run["seed"]] = entry
    return found
