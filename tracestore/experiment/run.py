"""A whole training run: split, detectors, probe, results and report."""

import gc
import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracestore import console
from tracestore.data.batch_format import EdgeOptions
from tracestore.detectors.config import ModelConfig
from tracestore.detectors.registry import DETECTORS
from tracestore.errors import MissingFieldError, TrainingError, UsageError
from tracestore.evaluation.evaluate import RunScores
from tracestore.evaluation.plots import write_plots
from tracestore.evaluation.predictions import write_predictions
from tracestore.evaluation.probe import run_probe
from tracestore.evaluation.report import write_page
from tracestore.evaluation.significance import compare
from tracestore.evaluation.split import Split, class_counts, make_folds, make_split
from tracestore.experiment.folds import (
    FOLDS_FILE,
    RESULTS_FILE,
    SPLIT_FILE,
    Job,
    holds_run,
    plan_jobs,
    pool,
    read_splits,
    remove_checkpoints,
)
from tracestore.oom.limits import MemoryBudget, MemoryUse, memory_limit, memory_use
from tracestore.planning.measure import budget_plan
from tracestore.store.read.store import TraceStore, open_store
from tracestore.train.config import TrainConfig
from tracestore.train.distributed import DistributedContext
from tracestore.train.monitor import Log, check_tensorboard
from tracestore.train.output_dir import lock_output_dir, write_json
from tracestore.train.signals import StopSignals
from tracestore.train.trainer import Trainer

PROBE = "logistic_probe"


def _no_log(_: str) -> None:
    """Of every rank but the first."""


def _say(log: Log, job: Job, text: str) -> None:
    log(f"{job}: {text}")


def _refuse_nonfinite(store: TraceStore, split: Split) -> None:
    """A NaN attention weight is no edge, so that it would pass in silence: stop before."""
    nonfinite = store.has_nonfinite
    for indices in split.indices.values():
        for index in indices[nonfinite[indices]]:
            raise TrainingError(
                f"the trace of question {store.question_ids[int(index)]!r} holds NaN or infinite values "
                f"({int(nonfinite.sum())} such traces in the store); convert again without its file"
            )


def run_experiment(
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
    overwrite: bool = False,
    log: Log = print,
    line: console.Progress | None = None,
    ranks: DistributedContext | None = None,
) -> dict[str, Any]:
    """Trains the named detectors and writes results.json, predictions.csv, plots and
    report.html into `folder`. `sizes` are fields of ModelConfig. num_folds: each question is
    tested once, in one of so many folds; num_seeds: so many runs of each split. Returns what
    results.json holds. UsageError where the folder holds an earlier run, unless that is resumed or
    overwrite is true. With several ranks all of them call it; rank 0 writes and logs."""
    ranks = ranks or DistributedContext()
    if not ranks.is_rank_zero:
        log, line = _no_log, None
    if config.tensorboard:
        check_tensorboard()
    start = memory_use()
    store = open_store(store_path)
    try:
        for view in sorted({DETECTORS[name].view for name in names}):
            store.require(view)
    except MissingFieldError as error:
        raise MissingFieldError(f"{error}; or train without graphs: --no-run-gnn-det --no-run-gvae") from None
    model_config = ModelConfig.from_store(store, **sizes)
    if "graph" in {DETECTORS[name].view for name in names}:
        edges = model_config.edge_format(store, torch.device(config.device).type)
        EdgeOptions(config.attention_threshold, config.top_k, edges)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}") from None
    with ExitStack() as held:
        ranks.on_rank_zero(lambda: held.enter_context(lock_output_dir(folder)))
        ranks.on_rank_zero(lambda: _keep_earlier_run(folder, config.resume or overwrite))
        return _run_jobs(
            store,
            folder,
            names,
            config,
            sizes,
            model_config,
            memory_budget=memory_budget,
            with_probe=with_probe,
            num_folds=num_folds,
            num_seeds=num_seeds,
            resume_command=resume_command,
            log=log,
            line=line,
            ranks=ranks,
            start=start,
        )


def _keep_earlier_run(folder: Path, is_meant: bool) -> None:
    if not is_meant and holds_run(folder):
        raise UsageError(f"{folder} holds an earlier run: continue it with --resume, or replace it with --overwrite")


def _run_jobs(
    store: TraceStore,
    folder: Path,
    names: list[str],
    config: TrainConfig,
    sizes: dict[str, Any],
    model_config: ModelConfig,
    *,
    memory_budget: int | None,
    with_probe: bool,
    num_folds: int | None,
    num_seeds: int | None,
    resume_command: str | None,
    log: Log,
    line: console.Progress | None,
    ranks: DistributedContext,
    start: MemoryUse,
) -> dict[str, Any]:
    """run_experiment, once the arguments make sense and the folder is this run's. start: memory
    in use before the store was opened."""
    targets = store.targets(config.score_threshold)
    is_repeated = num_folds is not None or num_seeds is not None
    splits = ranks.on_rank_zero(lambda: _splits(store, targets, config, folder, num_folds))
    jobs = plan_jobs(splits, config.seed, num_seeds, folder, is_folded=num_folds is not None)
    split = splits[0]
    counts = ", ".join(f"{part} {len(ids)}" for part, ids in split.indices.items())
    log(
        f"{store.path}: {len(store):,} traces, {len(store) - sum(map(len, split.indices.values())):,} without a label; {counts}"
    )
    if not np.isnan(store.scores).all():
        log(store.describe_scores(config.score_threshold))
    if is_repeated:
        log(f"{num_folds or 1} folds x {num_seeds or 1} seeds, {len(jobs) * len(names)} trainings")
    if "graph" in {DETECTORS[name].view for name in names}:
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
            {p: {"hallucinated": h, "correct": c} for p, (h, c) in class_counts(s, targets).items()} for s in splits
        ],
        "store": store.info(),
    }
    runs: list[dict[str, Any]] = [{"fold": job.fold, "seed": job.seed, "models": {}} for job in jobs]
    if is_repeated:
        results["config"] |= {"folds": num_folds, "seeds": num_seeds}
        results["folds"] = [s.question_ids for s in splits]
        results["runs"] = runs
    else:
        results["models"] = runs[0]["models"]
    limit = memory_limit(memory_budget, start, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)))
    budget = None
    if limit is not None:
        num_train = len(split.indices["train"])
        planned = ranks.on_rank_zero(
            lambda: budget_plan(names, store, config, sizes, limit, start, num_train, ranks.world_size)
        )
        budget = MemoryBudget(limit, start)
    try:
        # Nothing of an earlier run is touched before it is clear that this one makes sense.
        ranks.on_rank_zero(
            lambda: _begin(splits, config, folder, is_folded=num_folds is not None, is_repeated=is_repeated)
        )
        run: Trainer | None = None
        with StopSignals() as stop:
            for job, entry in zip(jobs, runs, strict=True):
                say = partial(_say, log, job) if is_repeated else log
                for name in names:
                    if run is not None:
                        # The run before, which refers to itself, and its maps of the store's files.
                        run = None
                        gc.collect()
                    run = Trainer(
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
                        run.on_fatal_oom, run.planned_micro_batch = budget.release, planned[name]
                    entry["models"][name] = run.run()
                    if ranks.is_rank_zero:
                        write_json(folder / RESULTS_FILE, console.nan_to_none(results))
    finally:
        if budget is not None:
            budget.release()
    if not ranks.is_rank_zero:
        return results
    probes = {}
    if with_probe:
        probes = {
            job.fold: run_probe(store, job.split, targets, config.seed) for job in jobs if job.seed == config.seed
        }
    _complete(results, runs, probes, config.seed, is_repeated=is_repeated)
    write_json(folder / RESULTS_FILE, console.nan_to_none(results))
    tested = [{**run, "models": run["models"] | ({PROBE: probes[run["fold"]]} if probes else {})} for run in runs]
    write_predictions(folder / "predictions.csv", tested)
    plots = write_plots(results, folder)
    write_page(results, plots, folder / "report.html")
    return results


def _splits(
    store: TraceStore, targets: np.ndarray, config: TrainConfig, folder: Path, num_folds: int | None
) -> list[Split]:
    """The split of this store and seed, or its folds; --resume uses what is written down."""
    path = folder / (SPLIT_FILE if num_folds is None else FOLDS_FILE)
    if config.resume and path.exists():
        return read_splits(path, store, targets, num_folds)
    if num_folds is None:
        return [make_split(store, targets, config.seed)]
    return make_folds(store, targets, num_folds, config.seed)


def _begin(splits: list[Split], config: TrainConfig, folder: Path, *, is_folded: bool, is_repeated: bool) -> None:
    """Makes the folder that of these splits, where it is not already."""
    path = folder / (FOLDS_FILE if is_folded else SPLIT_FILE)
    if config.resume and path.exists():
        return
    # Checkpoints and events of an earlier run belong to its own splits, which go first:
    # without them, --resume begins anew.
    path.unlink(missing_ok=True)
    remove_checkpoints(folder, is_folded=is_folded, is_repeated=is_repeated)
    ids = [split.question_ids for split in splits]
    write_json(path, ids if is_folded else ids[0])


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
