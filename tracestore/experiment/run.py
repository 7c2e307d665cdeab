"""A training run: split, detectors, probe, results and report."""

import gc
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracestore import console
from tracestore.data.batch_format import BatchFormat
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
    TrainingRun,
    aggregate_runs,
    holds_run,
    plan_runs,
    read_splits,
    remove_checkpoints,
)
from tracestore.experiment.options import TrainOptions
from tracestore.oom.limits import MemoryUse, limited_memory, memory_limit, memory_use
from tracestore.planning.measure import plan_micro_batches
from tracestore.store.read.store import TraceStore, open_store
from tracestore.train.distributed import DistributedContext
from tracestore.train.monitor import Log, check_tensorboard
from tracestore.train.output_dir import lock_output_dir, write_json
from tracestore.train.signals import StopSignals
from tracestore.train.trainer import Trainer

PROBE = "logistic_probe"


def run_experiment(
    store_path: str | Path,
    output_dir: Path,
    options: TrainOptions,
    *,
    log: Log = print,
    line: console.Progress | None = None,
    ranks: DistributedContext | None = None,
) -> dict[str, Any]:
    """Train detectors and write results.json, predictions.csv, plots and report.html.

    With several ranks all of them call this function; rank 0 writes and logs.

    Parameters
    ----------
    store_path : str or Path
    output_dir : Path
        Created if it does not exist.
    options : TrainOptions
    log : callable
        Called with each line of the log.
    line : console.Progress, optional
        Progress line on a terminal.
    ranks : DistributedContext, optional
        Default: the ranks that torch.distributed has connected.

    Returns
    -------
    dict
        The content of results.json. On other ranks than 0 it lacks the probe and the comparisons.

    Raises
    ------
    UsageError
        The output directory holds an earlier run that is neither resumed nor overwritten, or
        the options do not fit the store.
    """
    ranks = ranks or DistributedContext()
    if not ranks.is_rank_zero:
        log, line = (lambda _: None), None
    if options.config.tensorboard:
        check_tensorboard()
    start = memory_use()
    store = open_store(store_path)
    model_config = _check_store(store, options)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"--output-dir {output_dir}: {error.strerror}") from None
    with ExitStack() as stack:
        ranks.on_rank_zero(lambda: stack.enter_context(lock_output_dir(output_dir)))
        ranks.on_rank_zero(lambda: _check_output_dir(output_dir, options))
        return _Experiment(store, output_dir, options, model_config, ranks, log, line, start).run()


def _check_store(store: TraceStore, options: TrainOptions) -> ModelConfig:
    """Return the model config for a store; raise UsageError where the store does not fit the options."""
    try:
        for view in sorted({DETECTORS[name].view for name in options.models}):
            store.require_view(view)
    except MissingFieldError as error:
        flags = " ".join(f"--no-run-{spec.flag}" for spec in DETECTORS.values() if spec.view == "graph")
        raise MissingFieldError(f"{error}; or train without graphs: {flags}") from None
    model_config = ModelConfig.from_store(store, **options.model_options)
    if options.has_graph_models:
        config = options.config
        edge_format = model_config.edge_format(store, torch.device(config.device).type)
        BatchFormat("graph", config.attention_threshold, config.top_k, edge_format)
    return model_config


def _check_output_dir(folder: Path, options: TrainOptions) -> None:
    if not (options.config.resume or options.overwrite) and holds_run(folder):
        raise UsageError(f"{folder} holds an earlier run: continue it with --resume, or replace it with --overwrite")


@dataclass
class _Experiment:
    """A run whose options fit the store and whose output directory is locked."""

    store: TraceStore
    output_dir: Path
    options: TrainOptions
    model_config: ModelConfig
    ranks: DistributedContext
    log: Log
    line: console.Progress | None
    # Memory in use before the store was opened.
    start: MemoryUse

    def run(self) -> dict[str, Any]:
        """Train, evaluate and write all files. Return the content of results.json."""
        options, config = self.options, self.options.config
        targets = self.store.targets(config.score_threshold)
        splits = self.ranks.on_rank_zero(lambda: self._load_or_make_splits(targets))
        runs = plan_runs(splits, options, self.output_dir)
        self._log_counts(splits[0], len(runs))
        if options.has_graph_models:
            _check_finite(self.store, splits[0])
        results, entries = self._empty_results(splits, runs, targets)
        self._train_all(splits, runs, targets, results, entries)
        if not self.ranks.is_rank_zero:
            return results
        probes = {}
        if options.probe:
            probes = {
                run.fold: run_probe(self.store, run.split, targets, config.seed)
                for run in runs
                if run.seed == config.seed
            }
        self._add_comparisons(results, entries, probes)
        self._write_results(results)
        tested = [{**e, "models": e["models"] | ({PROBE: probes[e["fold"]]} if probes else {})} for e in entries]
        write_predictions(self.output_dir / "predictions.csv", tested)
        plots = write_plots(results, self.output_dir)
        write_page(results, plots, self.output_dir / "report.html")
        return results

    @property
    def _splits_path(self) -> Path:
        return self.output_dir / (FOLDS_FILE if self.options.is_folded else SPLIT_FILE)

    def _load_or_make_splits(self, targets: np.ndarray) -> list[Split]:
        """Return the split, or the folds; with --resume those of the earlier run."""
        config, num_folds = self.options.config, self.options.folds
        if config.resume and self._splits_path.exists():
            return read_splits(self._splits_path, self.store, targets, num_folds)
        if num_folds is None:
            return [make_split(self.store, targets, config.seed)]
        return make_folds(self.store, targets, num_folds, config.seed)

    def _log_counts(self, split: Split, num_runs: int) -> None:
        store, options = self.store, self.options
        counts = ", ".join(f"{name} {len(indices)}" for name, indices in split.indices.items())
        num_unlabeled = len(store) - sum(map(len, split.indices.values()))
        self.log(f"{store.path}: {len(store):,} traces, {num_unlabeled:,} without a label; {counts}")
        if not np.isnan(store.scores).all():
            self.log(store.describe_scores(options.config.score_threshold))
        if options.is_repeated:
            num_trainings = num_runs * len(options.models)
            self.log(f"{options.folds or 1} folds x {options.seeds or 1} seeds, {num_trainings} trainings")

    def _empty_results(
        self, splits: list[Split], runs: list[TrainingRun], targets: np.ndarray
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the results without models, and the entry of each run, which is part of them."""
        options = self.options
        results: dict[str, Any] = {
            "models": {},
            "config": {
                **asdict(options.config),
                **asdict(self.model_config),
                "num_threads": torch.get_num_threads(),
                "world_size": self.ranks.world_size,
                "torch": torch.__version__,
            },
            "split": None if options.is_folded else splits[0].question_ids,
            "counts": [
                {name: {"hallucinated": h, "correct": c} for name, (h, c) in class_counts(split, targets).items()}
                for split in splits
            ],
            "store": self.store.info(),
        }
        entries: list[dict[str, Any]] = [{"fold": run.fold, "seed": run.seed, "models": {}} for run in runs]
        if options.is_repeated:
            results["config"] |= {"folds": options.folds, "seeds": options.seeds}
            results["folds"] = [split.question_ids for split in splits]
            results["runs"] = entries
        else:
            results["models"] = entries[0]["models"]
        return results, entries

    def _train_all(
        self,
        splits: list[Split],
        runs: list[TrainingRun],
        targets: np.ndarray,
        results: dict[str, Any],
        entries: list[dict[str, Any]],
    ) -> None:
        """Train every model of every run, and write results.json after each."""
        options, ranks = self.options, self.ranks
        num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
        limit = memory_limit(options.memory_budget, self.start, num_processes)
        planned: dict[str, int | None] = {}
        if limit is not None:
            num_train = len(splits[0].indices["train"])
            planned = ranks.on_rank_zero(
                lambda: plan_micro_batches(
                    options.models,
                    self.store,
                    options.config,
                    options.model_options,
                    limit,
                    self.start,
                    num_train,
                    ranks.world_size,
                )
            )
        with limited_memory(limit, self.start) as release_memory, StopSignals() as stop:
            # The earlier run is replaced only here, after all checks have passed.
            ranks.on_rank_zero(lambda: self._prepare_output_dir(splits))
            trainer: Trainer | None = None
            for run, entry in zip(runs, entries, strict=True):
                for name in options.models:
                    if trainer is not None:
                        # A trainer is part of reference cycles, and keeps files of the store mapped.
                        trainer = None
                        gc.collect()
                    trainer = self._make_trainer(name, run, targets, stop)
                    trainer.on_fatal_oom, trainer.planned_micro_batch = release_memory, planned.get(name)
                    entry["models"][name] = trainer.run()
                    if ranks.is_rank_zero:
                        self._write_results(results)

    def _make_trainer(self, name: str, run: TrainingRun, targets: np.ndarray, stop: StopSignals) -> Trainer:
        trainer = Trainer(
            name,
            self.store,
            run.split,
            targets,
            self.model_config,
            replace(self.options.config, seed=run.seed),
            run.folder / name,
            (lambda text: self.log(f"{run}: {text}")) if self.options.is_repeated else self.log,
            line=self.line,
            ranks=self.ranks,
            stop=stop,
        )
        if self.options.resume_command is not None:
            trainer.resume_command = self.options.resume_command
        return trainer

    def _prepare_output_dir(self, splits: list[Split]) -> None:
        """Write the splits and remove what belongs to other splits, unless the run is resumed."""
        path = self._splits_path
        if self.options.config.resume and path.exists():
            return
        # The splits are removed first: without them, --resume does not use the old checkpoints.
        path.unlink(missing_ok=True)
        remove_checkpoints(self.output_dir, self.options)
        ids = [split.question_ids for split in splits]
        write_json(path, ids if self.options.is_folded else ids[0])

    def _add_comparisons(
        self, results: dict[str, Any], runs: list[dict[str, Any]], probes: dict[int | None, dict[str, Any]]
    ) -> None:
        """Add the probe, the metrics aggregated over runs, and the comparisons between models."""
        seed, is_repeated = self.options.config.seed, self.options.is_repeated
        entries = {name: [(r["fold"] or 0, r["seed"], r["models"][name]) for r in runs] for name in runs[0]["models"]}
        if probes:
            entries[PROBE] = [(fold or 0, seed, entry) for fold, entry in probes.items()]
            results["probe"] = aggregate_runs(entries[PROBE], seed) if is_repeated else probes[None]
        if is_repeated:
            results["models"] = {name: aggregate_runs(of, seed) for name, of in entries.items() if name != PROBE}
            results["probes"] = [{"fold": fold, **entry} for fold, entry in probes.items()]
        scores = {name: [RunScores.from_entry(e, fold) for fold, _, e in of] for name, of in entries.items()}
        results["comparisons"] = compare(scores, seed)

    def _write_results(self, results: dict[str, Any]) -> None:
        write_json(self.output_dir / RESULTS_FILE, console.nan_to_none(results))


def _check_finite(store: TraceStore, split: Split) -> None:
    """Raise TrainingError where a trace is not finite: a NaN attention weight would silently be no edge."""
    nonfinite = store.has_nonfinite
    for indices in split.indices.values():
        for index in indices[nonfinite[indices]]:
            raise TrainingError(
                f"the trace of question {store.question_ids[int(index)]!r} holds NaN or infinite values "
                f"({int(nonfinite.sum())} such traces in the store); convert again without its file"
            )
