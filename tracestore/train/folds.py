"""Cross-validation: which runs there are, where each lies, and their figures together."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.errors import UsageError
from tracestore.store.reader import TraceStore
from tracestore.train.checkpoint import write_json
from tracestore.train.evaluate import RunScores, evaluate_runs
from tracestore.train.metrics import auroc
from tracestore.train.split import Split, make_folds, split_from_ids


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


def plan_jobs(splits: list[Split], seed: int, num_seeds: int, folder: Path, *, is_folded: bool) -> list[Job]:
    """folder/fold-<k>/seed-<s>, without folds folder/seed-<s>; seeds from `seed` on. A seed
    decides weights and order; the splits are the same for all seeds."""
    return [
        Job(k if is_folded else None, s, split, (folder / f"fold-{k}" if is_folded else folder) / f"seed-{s}")
        for k, split in enumerate(splits)
        for s in range(seed, seed + num_seeds)
    ]


def remove_checkpoints(folder: Path) -> None:
    """And events, of all jobs in a folder: they belong to the splits of an earlier run."""
    for pattern in ("*.pt", "events/events.*"):
        for old in [*folder.glob(f"seed-*/*/{pattern}"), *folder.glob(f"fold-*/seed-*/*/{pattern}")]:
            old.unlink()


def load_or_make_folds(
    store: TraceStore, targets: np.ndarray, num_folds: int, seed: int, folder: Path, *, resume: bool
) -> list[Split]:
    """The folds of this store and seed, written to folder/folds.json; with `resume` those
    that are written there. UsageError where that file holds another number of folds."""
    path = folder / "folds.json"
    if resume and path.exists():
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            found = len(saved)
        except (ValueError, TypeError):
            raise UsageError(f"{path}: not the folds of an earlier run") from None
        if found != num_folds:
            raise UsageError(f"--resume: {path} has {found} folds, not {num_folds}")
        return [split_from_ids(store, targets, ids) for ids in saved]
    folds = make_folds(store, targets, num_folds, seed)
    # The file goes first: without it, --resume begins anew.
    path.unlink(missing_ok=True)
    remove_checkpoints(folder)
    write_json(path, [fold.question_ids for fold in folds])
    return folds


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
        "auroc_sd_of_seeds": float(np.std(means, ddof=1)) if len(means) > 1 else None,
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
    if "history" in entries[0][2]:
        histories = [entry["history"] for _, _, entry in entries]
        pooled["history"] = {k: np.mean([h[k] for h in histories], axis=0).tolist() for k in histories[0]}
        pooled["seconds_per_epoch"] = np.mean([entry["seconds_per_epoch"] for _, _, entry in entries], axis=0).tolist()
        pooled["oom_events"] = [
            {"fold": fold, "seed": s, **event} for fold, s, entry in entries for event in entry["oom_events"]
        ]
    return pooled
