"""A whole training run: split, detectors, probe, results and report."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tracestore.errors import MissingFieldError, TrainingError, UsageError
from tracestore.store.reader import TraceStore
from tracestore.train import report
from tracestore.train.checkpoint import write_json
from tracestore.train.loop import DetectorRun, TrainConfig
from tracestore.train.memory import MemoryBudget, available, memory_use
from tracestore.train.models import VIEWS, ModelConfig
from tracestore.train.plan import PlanOptions, budget_plan
from tracestore.train.probe import run_probe
from tracestore.train.split import Split, make_split, split_from_ids

Log = Callable[[str], None]


def pick_device(name: str) -> str:
    """auto, cpu or cuda -> a torch device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return name


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
    # Checkpoints of an earlier run belong to its own split.
    for old in folder.glob("*/*.pt"):
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
) -> dict[str, Any]:
    """Trains the named detectors and writes results.json, plots and report.html into
    `folder`. `sizes` are fields of ModelConfig. Returns what results.json holds."""
    start = memory_use()
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
    split = _split(store, config, folder)
    counts = ", ".join(f"{part} {len(ids)}" for part, ids in split.indices.items())
    log(
        f"{store.path}: {len(store):,} traces, {len(store) - sum(map(len, split.indices.values())):,} without a label; {counts}"
    )
    if "graph" in {VIEWS[name] for name in names}:
        _refuse_nonfinite(store, split)
    model_config = ModelConfig(store.num_layers, store.hidden_dim, **sizes)
    results: dict[str, Any] = {
        "models": {},
        "config": {**asdict(config), **asdict(model_config), "torch": torch.__version__},
        "split": split.question_ids,
        "store": store.info(),
    }
    limit = available(memory_budget, start)
    budget = None
    if limit is not None:
        options = PlanOptions(
            config.batch_size, config.attention_threshold, config.top_k, config.loader_threads, config.device, sizes
        )
        planned = budget_plan(names, store, options, limit, start, len(split.indices["train"]))
        budget = MemoryBudget(limit, start)
    try:
        for name in names:
            run = DetectorRun(name, store, split, targets, model_config, config, folder / name, log)
            if resume_command is not None:
                run.resume_command = resume_command
            if budget is not None:
                run.on_last_resort, run.planned_micro_batch = budget.release, planned[name]
            results["models"][name] = run.run()
            write_json(folder / "results.json", report.finite(results))
    finally:
        if budget is not None:
            budget.release()
    if with_probe:
        results["probe"] = run_probe(store, split, targets, config.seed)
    write_json(folder / "results.json", report.finite(results))
    plots = report.write_plots(results, folder)
    report.write_page(results, plots, folder / "report.html")
    return results
