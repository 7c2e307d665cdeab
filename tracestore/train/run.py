"""A whole training run: split, detectors, probe, results and report."""

import gc
import json
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tracestore import console
from tracestore.data.batch_format import GraphOptions
from tracestore.errors import MissingFieldError, TrainingError, UsageError
from tracestore.store.reader import TraceStore, open_store
from tracestore.train import report
from tracestore.train.checkpoint import write_json
from tracestore.train.compare import compare
from tracestore.train.config import TrainConfig
from tracestore.train.evaluate import RunScores
from tracestore.train.folds import Job, load_or_make_folds, plan_jobs, pool, remove_checkpoints
from tracestore.train.loop import DetectorRun
from tracestore.train.measure import budget_plan
from tracestore.train.memory import MemoryBudget, available, memory_use
from tracestore.train.model_config import VIEWS, ModelConfig
from tracestore.train.monitor import Log, check_tensorboard
from tracestore.train.predictions import write_predictions
from tracestore.train.probe import run_probe
from tracestore.train.ranks import Ranks
from tracestore.train.split import Split, class_counts, make_split, split_from_ids
from tracestore.train.stopping import StopSignals

PROBE = "logistic_probe"


def pick_device(name: str) -> str:
    """auto, cpu or cuda -> a torch device, of several GPUs this rank's."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name


def _no_log(_: str) -> None:
    """Of every rank but the first."""


def _say(log: Log, job: Job, text: str) -> None:
    log(f"{job}: {text}")


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
    num_folds: int | None = None,
    num_seeds: int | None = None,
    resume_command: str | None = None,
    log: Log = print,
    line: console.Progress | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Trains the named detectors and writes results.json, predictions.csv, plots and
    report.html into `folder`. `sizes` are fields of ModelConfig. num_folds: each question is
    tested once, in one of so many folds; num_seeds: so many runs of each split. Returns what
    results.json holds. With several ranks all of them call it; rank 0 writes and logs."""
    ranks = ranks or Ranks()
    if not ranks.is_first:
        log, line = _no_log, None
    if config.tensorboard:
        check_tensorboard()
    start = memory_use()
    store = open_store(store_path)
    try:
        for view in sorted({VIEWS[name] for name in names}):
            store.require(view)
    except MissingFieldError as error:
        raise MissingFieldError(f"{error}; or train without graphs: --no-run-gnn-det --no-run-gvae") from None
    model_config = ModelConfig.of_store(store, **sizes)
    has_graphs = "graph" in {VIEWS[name] for name in names}
    if has_graphs:
        edges = model_config.edge_form(store, torch.device(config.device).type)
        GraphOptions(config.attention_threshold, config.top_k, edges)
    # Nothing of an earlier run is touched before it is clear that this one makes sense.
    targets = store.targets(config.score_threshold)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}") from None
    jobs = ranks.first(lambda: _jobs(store, config, folder, num_folds, num_seeds))
    split = jobs[0].split
    is_repeated = num_folds is not None or num_seeds is not None
    counts = ", ".join(f"{part} {len(ids)}" for part, ids in split.indices.items())
    log(
        f"{store.path}: {len(store):,} traces, {len(store) - sum(map(len, split.indices.values())):,} without a label; {counts}"
    )
    if is_repeated:
        log(f"{num_folds or 1} folds x {num_seeds or 1} seeds, {len(jobs) * len(names)} trainings")
    if has_graphs:
        _refuse_nonfinite(store, split)
    results: dict[str, Any] = {
        "models": {},
        "config": {
            **asdict(config),
            **asdict(model_config),
            "num_threads": torch.get_num_threads(),
            "world_size": ranks.world_size,
            "torch": torch.__version__,
        },
        "split": split.question_ids if num_folds is None else None,
        "counts": [
            {p: {"hallucinated": h, "right": r} for p, (h, r) in class_counts(s, targets).items()}
            for s in _splits(jobs).values()
        ],
        "store": store.info(),
    }
    runs: list[dict[str, Any]] = [{"fold": job.fold, "seed": job.seed, "models": {}} for job in jobs]
    if is_repeated:
        results["config"] |= {"folds": num_folds, "seeds": num_seeds}
        results["folds"] = [s.question_ids for s in _splits(jobs).values()]
        results["runs"] = runs
    else:
        results["models"] = runs[0]["models"]
    limit = available(memory_budget, start)
    budget = None
    if limit is not None:
        num_train = len(split.indices["train"])
        planned = ranks.first(lambda: budget_plan(names, store, config, sizes, limit, start, num_train))
        budget = MemoryBudget(limit, start)
    try:
        with StopSignals() as stop:
            for job, entry in zip(jobs, runs, strict=True):
                say = partial(_say, log, job) if is_repeated else log
                for name in names:
                    # The run before, which refers to itself, and its maps of the store's files.
                    gc.collect()
                    run = DetectorRun(
                        name,
                        store,
                        job.split,
                        targets,
                        model_config,
                        replace(config, seed=job.seed),
                        job.folder / name,
                        say,
                        line=line,
                        ranks=ranks,
                        stop=stop,
                    )
                    if resume_command is not None:
                        run.resume_command = resume_command
                    if budget is not None:
                        run.on_last_resort, run.planned_micro_batch = budget.release, planned[name]
                    entry["models"][name] = run.run()
                    if ranks.is_first:
                        write_json(folder / "results.json", console.finite(results))
    finally:
        if budget is not None:
            budget.release()
    if not ranks.is_first:
        return results
    probes = {}
    if with_probe:
        probes = {fold: run_probe(store, s, targets, config.seed) for fold, s in _splits(jobs).items()}
    _complete(results, runs, probes, config.seed, is_repeated=is_repeated)
    write_json(folder / "results.json", console.finite(results))
    tested = [{**run, "models": run["models"] | ({PROBE: probes[run["fold"]]} if probes else {})} for run in runs]
    write_predictions(folder / "predictions.csv", tested)
    plots = report.write_plots(results, folder)
    report.write_page(results, plots, folder / "report.html")
    return results


def _jobs(
    store: TraceStore, config: TrainConfig, folder: Path, num_folds: int | None, num_seeds: int | None
) -> list[Job]:
    if num_folds is None and num_seeds is None:
        return [Job(None, config.seed, _split(store, config, folder), folder)]
    if num_folds is None:
        if not config.resume:
            remove_checkpoints(folder)
        splits = [_split(store, config, folder)]
    else:
        targets = store.targets(config.score_threshold)
        splits = load_or_make_folds(store, targets, num_folds, config.seed, folder, resume=config.resume)
    return plan_jobs(splits, config.seed, num_seeds or 1, folder, is_folded=num_folds is not None)


def _splits(jobs: list[Job]) -> dict[int | None, Split]:
    """Each fold's split once."""
    return {job.fold: job.split for job in jobs}


def _complete(
    results: dict[str, Any], runs: list[dict[str, Any]], probes: dict[Any, Any], seed: int, *, is_repeated: bool
) -> None:
    """Adds what needs all runs: figures over folds and seeds, the probe, the comparisons."""
    entries = {name: [(r["fold"] or 0, r["seed"], r["models"][name]) for r in runs] for name in runs[0]["models"]}
    if probes:
        entries[PROBE] = [(fold or 0, seed, entry) for fold, entry in probes.items()]
        results["probe"] = pool(entries[PROBE], seed) if is_repeated else probes[None]
    if is_repeated:
        results["models"] = {name: pool(of, seed) for name, of in entries.items() if name != PROBE}
        results["probes"] = [{"fold": fold, **entry} for fold, entry in probes.items()]
    scores = {name: [RunScores.from_entry(e, fold) for fold, _, e in of] for name, of in entries.items()}
    results["comparisons"] = compare(scores, seed)
