"""Folds and seeds: the trainings of a run, their folders, and their aggregated metrics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.detectors.registry import MODELS
from tracestore.errors import UsageError
from tracestore.evaluation.evaluate import RunScores, evaluate_runs
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.store_split import Split, split_from_ids
from tracestore.experiment.train_options import TrainOptions
from tracestore.run_results import RESULTS_FILE, read_results
from tracestore.split import SPLITS
from tracestore.store.io.fsio import read_json
from tracestore.store.read.store import TraceStore
from tracestore.train.checkpoint import CHECKPOINTS

SPLIT_FILE, FOLDS_FILE = "split.json", "folds.json"
_OWN = (SPLIT_FILE, FOLDS_FILE, RESULTS_FILE)


@dataclass(frozen=True)
class TrainingRun:
    """One split and one seed. Each model is trained in ``folder/<model>``; fold is None without folds."""

    fold: int | None
    seed: int
    split: Split
    folder: Path

    def __str__(self) -> str:
        return f"seed {self.seed}" if self.fold is None else f"fold {self.fold}, seed {self.seed}"


def plan_runs(splits: list[Split], options: TrainOptions, folder: Path) -> list[TrainingRun]:
    """Return the trainings of a run: every split with every seed.

    Their folders are ``fold-<k>/seed-<s>``, without folds ``seed-<s>``, and without seeds either
    the folder itself. Seeds change weights and order, never the splits.
    """
    seed, is_folded = options.config.seed, options.is_folded
    if not options.is_repeated:
        return [TrainingRun(None, seed, splits[0], folder)]
    return [
        TrainingRun(k if is_folded else None, s, split, (folder / f"fold-{k}" if is_folded else folder) / f"seed-{s}")
        for k, split in enumerate(splits)
        for s in range(seed, seed + (options.seeds or 1))
    ]


def _training_files(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints and the files of loggers of trainings in the folder, folds and seeds included.

    Only files with names of tracestore count, because folders of source files may have the same
    names (lstm_solo/preprocessed_0.pt).
    """
    for run_folder in (folder, *folder.glob("seed-*"), *folder.glob("fold-*/seed-*")):
        if run_folder != folder and any((run_folder / name).exists() for name in (SPLIT_FILE, FOLDS_FILE)):
            continue  # a run of its own
        for name in MODELS:
            yield from (path for c in CHECKPOINTS if (path := run_folder / name / c).exists())
            for pattern in ("events.out.tfevents.*", "run-*.json"):
                yield from run_folder.glob(f"{name}/events/{pattern}")


def holds_run(folder: Path) -> bool:
    """Return whether a training has written into the folder."""
    return any((folder / name).exists() for name in _OWN) or any(True for _ in _training_files(folder))


def check_resumed(folder: Path, runs: Sequence[TrainingRun], models: Sequence[str]) -> None:
    """Raise UsageError if the results of the resumed run would lose a training of the folder."""
    if not any((folder / name).exists() for name in (SPLIT_FILE, FOLDS_FILE)):
        return  # Checkpoints without their splits are not used.
    planned = {run.folder / name for run in runs for name in models}
    for path in _training_files(folder):
        if path.name in CHECKPOINTS and path.parent not in planned:
            raise UsageError(
                f"--resume: {path} is of a training that this command leaves out; pass the --models, --seed, --seeds and "
                "--folds of the run, more models, more seeds if the run has --seeds or --folds, or another --output"
            )


def check_no_probe(folder: Path) -> None:
    """Raise UsageError if the results of a run without the probe would lose those of the probe."""
    if (folder / RESULTS_FILE).exists() and "probe" in read_results(folder):
        raise UsageError(f"--resume --no-probe: {folder} has results of the probe; pass --probe, or another --output")


def remove_run(folder: Path) -> None:
    """Remove results, splits, checkpoints and the files of loggers of an earlier run."""
    # The splits are removed first: without them, --resume does not use the old checkpoints.
    for path in (*(folder / name for name in _OWN), *_training_files(folder)):
        path.unlink(missing_ok=True)


def check_replaced(folder: Path) -> None:
    """Raise UsageError if a file that a run replaces may be of another program; next to checkpoints none is."""
    if any(True for _ in _training_files(folder)):
        return
    for path in (folder / name for name in (SPLIT_FILE, FOLDS_FILE)):
        if path.exists():
            _read_ids(path)
    if (folder / RESULTS_FILE).exists():
        read_results(folder)


def read_splits(path: Path, store: TraceStore, targets: np.ndarray, num_folds: int | None) -> list[Split]:
    """Read the split, or the folds, of an earlier run.

    Raises
    ------
    UsageError
        The file cannot be read, is malformed or holds another number of folds.
    """
    folds = _read_ids(path)
    if num_folds is not None and len(folds) != num_folds:
        raise UsageError(f"--resume: {path} has {len(folds)} folds, not {num_folds}")
    return [split_from_ids(store, targets, ids) for ids in folds]


def _read_ids(path: Path) -> list[dict[str, list[str]]]:
    """Return the question ids of each part of a split, or of each fold."""
    is_folded = path.name == FOLDS_FILE
    try:
        saved = read_json(path)
        folds = list(saved) if is_folded else [saved]
        if not all(set(fold) == set(SPLITS) and all(map(_is_list_of_str, fold.values())) for fold in folds):
            raise ValueError
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"{path}: not the {'folds' if is_folded else 'split'} of an earlier run") from None
    return folds


def _is_list_of_str(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def aggregate_runs(entries: list[tuple[int, int, dict[str, Any]]], seed: int) -> dict[str, Any]:
    """Aggregate the results of one model over its runs.

    Parameters
    ----------
    entries : list of tuple
        (fold, seed, results.json entry) of each run.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    dict
        The keys of `evaluate_runs` and of a single entry. ``test`` has auroc_by_run,
        auroc_std_over_seeds and auroc_out_of_fold in addition; scalars and the history are
        means over the runs.
    """
    runs = [RunScores.from_entry(entry, fold) for fold, _, entry in entries]
    aggregated = evaluate_runs(runs, seed)
    by_seed: dict[int, list[RunScores]] = {}
    for (_, s, _), run in zip(entries, runs, strict=True):
        by_seed.setdefault(s, []).append(run)
    means = [np.mean([auroc(r.y, r.logit) for r in of_seed]) for of_seed in by_seed.values()]
    out_of_fold = [
        auroc(np.concatenate([r.y for r in of_seed]), np.concatenate([r.logit for r in of_seed]))
        for of_seed in by_seed.values()
    ]
    aggregated["test"] |= {
        "auroc_by_run": [entry["test"]["auroc"] for _, _, entry in entries],
        "auroc_std_over_seeds": float(np.std(means, ddof=1)) if len(means) > 1 else None,
        "auroc_out_of_fold": float(np.mean(out_of_fold)),
    }
    for name in ("best_val_auroc", "threshold", "temperature"):
        aggregated[name] = float(np.mean([entry[name] for _, _, entry in entries]))
    if "val_auroc_by_layer" in entries[0][2]:
        aggregated["val_auroc_by_layer"] = np.mean([e["val_auroc_by_layer"] for _, _, e in entries], axis=0).tolist()
    if "history" in entries[0][2]:
        histories = [entry["history"] for _, _, entry in entries]
        aggregated["history"] = {k: _mean_by_epoch([h[k] for h in histories]) for k in histories[0]}
        aggregated["seconds_per_epoch"] = _mean_by_epoch([entry["seconds_per_epoch"] for _, _, entry in entries])
        aggregated["oom_events"] = [
            {"fold": fold, "seed": s, **event} for fold, s, entry in entries for event in entry["oom_events"]
        ]
    return aggregated


def _mean_by_epoch(curves: list[list[float]]) -> list[float]:
    return np.mean(curves, axis=0).tolist()  # type: ignore[no-any-return]
