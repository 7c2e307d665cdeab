"""Cross-validation: which runs there are, where each lies, and their figures together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.detectors.registry import DETECTORS
from tracestore.errors import UsageError
from tracestore.evaluation.evaluate import RunScores, evaluate_runs
from tracestore.evaluation.metrics import auroc
from tracestore.evaluation.split import SPLITS, Split, split_from_ids
from tracestore.store.io.fsio import read_json
from tracestore.store.read.store import TraceStore
from tracestore.train.checkpoint import CHECKPOINTS

SPLIT_FILE, FOLDS_FILE, RESULTS_FILE = "split.json", "folds.json", "results.json"


@dataclass(frozen=True)
class Job:
    """One split and one training seed; its models lie in folder/<model>. fold: None where
    the store is split once."""

    fold: int | None
    seed: int
    split: Split
    folder: Path

    def __str__(self) -> str:
        return f"seed {self.seed}" if self.fold is None else f"fold {self.fold}, seed {self.seed}"


def plan_jobs(splits: list[Split], seed: int, num_seeds: int | None, folder: Path, *, is_folded: bool) -> list[Job]:
    """folder/fold-<k>/seed-<s>, without folds folder/seed-<s>, and without num_seeds either the
    folder itself; seeds from `seed` on. A seed decides weights and order; the splits are the same
    for all seeds."""
    if not is_folded and num_seeds is None:
        return [Job(None, seed, splits[0], folder)]
    return [
        Job(k if is_folded else None, s, split, (folder / f"fold-{k}" if is_folded else folder) / f"seed-{s}")
        for k, split in enumerate(splits)
        for s in range(seed, seed + (num_seeds or 1))
    ]


def holds_run(folder: Path) -> bool:
    """Whether a training has written into the folder, folds and seeds included."""
    if any((folder / name).exists() for name in (RESULTS_FILE, SPLIT_FILE, FOLDS_FILE)):
        return True
    return any(
        (place / name / of).exists()
        for place in (folder, *folder.glob("seed-*"), *folder.glob("fold-*/seed-*"))
        for name in DETECTORS
        for of in CHECKPOINTS
    )


def remove_checkpoints(folder: Path, *, is_folded: bool, is_repeated: bool) -> None:
    """And events, of all jobs of folds or else of one split: files of tracestore's own names only,
    as sources have such folders as well (lstm_solo/preprocessed_0.pt)."""
    places = [] if is_folded else [folder]
    if is_repeated:
        places += folder.glob("fold-*/seed-*" if is_folded else "seed-*")
    for place in places:
        for name in DETECTORS:
            for old in (
                *(place / name / of for of in CHECKPOINTS),
                *place.glob(f"{name}/events/events.out.tfevents.*"),
            ):
                old.unlink(missing_ok=True)


def read_splits(path: Path, store: TraceStore, targets: np.ndarray, num_folds: int | None) -> list[Split]:
    """The split, or folds, of an earlier run. UsageError where the file is no such thing or
    holds another number of folds."""
    try:
        saved = read_json(path)
        folds = [saved] if num_folds is None else list(saved)
        if not all(set(fold) == set(SPLITS) and all(map(_are_texts, fold.values())) for fold in folds):
            raise ValueError
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        what = "split" if num_folds is None else "folds"
        raise UsageError(f"{path}: not the {what} of an earlier run") from None
    if num_folds is not None and len(folds) != num_folds:
        raise UsageError(f"--resume: {path} has {len(folds)} folds, not {num_folds}")
    return [split_from_ids(store, targets, ids) for ids in folds]


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def pool(entries: list[tuple[int, int, dict[str, Any]]], seed: int) -> dict[str, Any]:
    """The entry of one model over its runs, given as (fold, seed, entry of the run): figures
    as evaluate_runs makes them, their spread, and what training was like on average."""
    runs = [RunScores.from_entry(entry, fold) for fold, _, entry in entries]
    pooled = evaluate_runs(runs, seed)
    by_seed: dict[int, list[RunScores]] = {}
    for (_, s, _), run in zip(entries, runs, strict=True):
        by_seed.setdefault(s, []).append(run)
    means = [np.mean([auroc(r.y, r.logit) for r in of]) for of in by_seed.values()]
    pooled["test"] |= {
        "auroc_by_run": [entry["test"]["auroc"] for _, _, entry in entries],
        "auroc_std_over_seeds": float(np.std(means, ddof=1)) if len(means) > 1 else None,
        "auroc_out_of_fold": float(
            np.mean(
                [
                    auroc(np.concatenate([r.y for r in of]), np.concatenate([r.logit for r in of]))
                    for of in by_seed.values()
                ]
            )
        ),
    }

    def mean(name: str) -> float:
        return float(np.mean([entry[name] for _, _, entry in entries]))

    pooled |= {name: mean(name) for name in ("best_val_auroc", "threshold", "temperature")}
    if "val_auroc_by_layer" in entries[0][2]:
        pooled["val_auroc_by_layer"] = np.mean([e["val_auroc_by_layer"] for _, _, e in entries], axis=0).tolist()
    if "history" in entries[0][2]:
        histories = [entry["history"] for _, _, entry in entries]
        pooled["history"] = {k: _mean_by_epoch([h[k] for h in histories]) for k in histories[0]}
        pooled["seconds_per_epoch"] = _mean_by_epoch([entry["seconds_per_epoch"] for _, _, entry in entries])
        pooled["oom_events"] = [
            {"fold": fold, "seed": s, **event} for fold, s, entry in entries for event in entry["oom_events"]
        ]
    return pooled


def _mean_by_epoch(curves: list[list[float]]) -> list[float]:
    """Over the epochs that all runs have: some may have finished with more of them before --resume."""
    epochs = min(map(len, curves))
    return np.mean([curve[:epochs] for curve in curves], axis=0).tolist()  # type: ignore[no-any-return]
