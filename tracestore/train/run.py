"""A whole training run: split, detectors, probe, results and report."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tracestore import console
from tracestore.data.batch import BatchFormat
from tracestore.data.epoch import mean_trace_bytes
from tracestore.errors import MissingFieldError, TrainingError, UsageError
from tracestore.store.reader import TraceStore
from tracestore.train import report
from tracestore.train.checkpoint import write_json
from tracestore.train.config import TrainConfig
from tracestore.train.loop import DetectorRun
from tracestore.train.memory import MemoryBudget
from tracestore.train.models import VIEWS, ModelConfig
from tracestore.train.monitor import Log, check_tensorboard
from tracestore.train.probe import run_probe
from tracestore.train.ranks import Ranks
from tracestore.train.split import Split, make_split, split_from_ids
from tracestore.train.stopping import StopSignals


def pick_device(name: str) -> str:
    """auto, cpu or cuda -> a torch device, of several GPUs this rank's."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name


def _no_log(_: str) -> None:
    """Of every rank but the first."""


def _split(store: TraceStore, config: TrainConfig, folder: Path) -> Split:
    """The split of this store and seed; --resume uses the one that is written down."""
    targets = store.targets(config.score_threshold)
    path = folder / "split.json"
    if config.resume and path.exists():
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise UsageError(f"{path}: not the split of an earlier run") from None
        return split_from_ids(store, targets, saved)
    split = make_split(store, targets, config.seed)
    # Checkpoints and events of an earlier run belong to its own split, which goes first:
    # without it, --resume begins anew.
    path.unlink(missing_ok=True)
    for old in [*folder.glob("*/*.pt"), *folder.glob("*/events/events.*")]:
        old.unlink()
    write_json(path, split.question_ids)
    return split


def _refuse_nonfinite(store: TraceStore, split: Split) -> None:
    """A NaN attention weight is no edge, so that it would pass in silence: stop before."""
    nonfinite = store.nonfinite
    for indices in split.indices.values():
        for index in indices[nonfinite[indices]]:
            raise TrainingError(
                f"the trace of question {store.question_ids[int(index)]!r} holds NaN or infinite values "
                f"({int(nonfinite.sum())} such traces in the store); convert again without its file"
            )


def run_training(
    store_path: str | Path,
    folder: Path,
    names: list[str],
    config: TrainConfig,
    sizes: dict[str, Any],
    *,
    memory_budget: int | None = None,
    with_probe: bool = True,
    resume_command: str | None = None,
    log: Log = print,
    line: console.Progress | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Trains the named detectors and writes results.json, plots and report.html into
    `folder`. `sizes` are fields of ModelConfig. Returns what results.json holds. With
    several ranks all of them call it; rank 0 writes and logs."""
    ranks = ranks or Ranks()
    if not ranks.is_first:
        log, line = _no_log, None
    if config.tensorboard:
        check_tensorboard()
    store = TraceStore(store_path)
    try:
        for view in sorted({VIEWS[name] for name in names}):
            store.require(view)
    except MissingFieldError as error:
        raise MissingFieldError(f"{error}; or train without graphs: --no-run-gnn-det --no-run-gvae") from None
    targets = store.targets(config.score_threshold)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}") from None
    split = ranks.first(lambda: _split(store, config, folder))
    counts = ", ".join(f"{part} {len(ids)}" for part, ids in split.indices.items())
    log(
        f"{store.path}: {len(store):,} traces, {len(store) - sum(map(len, split.indices.values())):,} without a label; {counts}"
    )
    if "graph" in {VIEWS[name] for name in names}:
        _refuse_nonfinite(store, split)
    model_config = ModelConfig(store.num_layers, store.hidden_dim, **sizes)
    results: dict[str, Any] = {
        "models": {},
        "config": {
            **asdict(config),
            **asdict(model_config),
            "num_threads": torch.get_num_threads(),
            "world_size": ranks.world_size,
            "torch": torch.__version__,
        },
        "split": split.question_ids,
        "store": store.info(),
    }
    budget = None
    if memory_budget is not None:
        view = "graph" if "graph" in {VIEWS[n] for n in names} else "sequence"
        budget = MemoryBudget(memory_budget, 4 * mean_trace_bytes(store, BatchFormat(view)))
    try:
        with StopSignals() as stop:
            for name in names:
                run = DetectorRun(
                    name,
                    store,
                    split,
                    targets,
                    model_config,
                    config,
                    folder / name,
                    log,
                    line=line,
                    ranks=ranks,
                    stop=stop,
                )
                if resume_command is not None:
                    run.resume_command = resume_command
                run.on_last_resort = budget.release if budget is not None else None
                results["models"][name] = run.run()
                if ranks.is_first:
                    write_json(folder / "results.json", report.finite(results))
    finally:
        if budget is not None:
            budget.release()
    if not ranks.is_first:
        return results
    if with_probe:
        results["probe"] = run_probe(store, split, targets, config.seed)
    write_json(folder / "results.json", report.finite(results))
    plots = report.write_plots(results, folder)
    report.write_page(results, plots, folder / "report.html")
    return results
