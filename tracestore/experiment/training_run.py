"""A training run: split, detectors, probe, results and report."""

import gc
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracestore import console
from tracestore.data.batches.batch_format import BatchFormat
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import DEFAULT_MODELS, MODELS
from tracestore.errors import MissingFieldError, UsageError
from tracestore.evaluation.evaluate import RunScores
from tracestore.evaluation.metrics import probability
from tracestore.evaluation.probe import run_probe
from tracestore.evaluation.significance import compare
from tracestore.evaluation.store_split import (
    Split,
    check_finite,
    class_counts,
    describe_dropped,
    drop_nonfinite,
    make_folds,
    make_split,
)
from tracestore.experiment import folds
from tracestore.experiment.train_options import TrainOptions
from tracestore.extras import require
from tracestore.oom.memory_limits import limited_memory, memory_limit
from tracestore.planning.plan import plan_micro_batches
from tracestore.platform_support import MemoryUse, memory_use, peak_memory
from tracestore.reports.controls import control_entries
from tracestore.reports.detector_tables import TrainingResults
from tracestore.reports.plot_files import PLOTS, write_plots
from tracestore.reports.run_page import RunFacts, write_report
from tracestore.run_results import RESULTS_FILE
from tracestore.store.format.labels import PREDICTION_COLUMNS, STORE_COLUMN
from tracestore.store.format.provenance import require_compatible
from tracestore.store.io.destinations import TRAIN, check_output_dir, check_output_files
from tracestore.store.io.fsio import write_rows
from tracestore.store.read.store import StorePath, TraceStore, open_store
from tracestore.train.batches import digest_of_answers
from tracestore.train.distributed import DistributedContext
from tracestore.train.monitor import Log
from tracestore.train.output_dir import lock_output_dir, write_json
from tracestore.train.signals import StopSignals
from tracestore.train.trainer import Trainer
from tracestore.words import plural

PROBE, REPORT, PREDICTIONS = "logistic_probe", "report.html", "predictions.csv"


def run_experiment(
    store_path: StorePath,
    output_dir: Path,
    options: TrainOptions,
    *,
    log: Log = print,
    line: console.Progress | None = None,
    ranks: DistributedContext | None = None,
) -> dict[str, Any]:
    """Train detectors and write results.json, predictions.csv, report.html and plots.

    With several ranks all of them call this function; rank 0 writes and logs.

    Parameters
    ----------
    store_path : str, Path or sequence of them
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
    if options.config.logger is not None:
        require(options.config.logger)
    check_output_dir(output_dir)
    start = memory_use()
    config = options.config
    store = open_store(store_path, score=config.score, allow_mixed_provenance=config.allow_mixed_provenance)
    threshold = store.internals.score_threshold(options.config.score_threshold)
    options = replace(options, config=replace(options.config, score=store.score_name, score_threshold=threshold))
    options = _trainable(store, options, log)
    model_config = _check_store(store, options)
    if ranks.world_size > 1 and model_config.normalization == "batch":
        raise UsageError("--normalization batch: its statistics are those of one process; found several ranks")
    with ExitStack() as stack:
        ranks.on_rank_zero(lambda: stack.enter_context(lock_output_dir(output_dir)))
        ranks.on_rank_zero(lambda: _check_output_dir(output_dir, options))
        return _Experiment(store, output_dir, options, model_config, ranks, log, line).run(start)


def _trainable(store: TraceStore, options: TrainOptions, log: Log) -> TrainOptions:
    """Return the options without the graph detectors of the default selection if the store has no attention at all."""
    if not set(DEFAULT_MODELS) <= set(options.models) or store.attention_mode != "none":
        return options
    models = tuple(name for name in options.models if MODELS[name].view != "graph")
    others = ", ".join(name for name in options.models if name not in models)
    log(f"{store.path} has no attention: {others} need graphs and are not trained")
    return replace(options, models=models)


def _check_store(store: TraceStore, options: TrainOptions) -> ModelConfig:
    """Return the model config for a store; raise UsageError where the store does not fit the options."""
    if not options.config.allow_mixed_provenance:
        require_compatible((), store.provenance, str(store.path))
    views = sorted({MODELS[name].view for name in options.models})
    try:
        for view in views:
            store.require_view(view)
    except MissingFieldError as error:
        raise MissingFieldError(f"{error}; or train without graphs: --models lstm_solo") from None
    model_config = ModelConfig.from_store(store, **options.model_options)
    if "graph" in views:
        config = options.config
        edge_format = model_config.edge_format(store, torch.device(config.device).type)
        BatchFormat(
            "graph", attention_threshold=config.attention_threshold, top_k=config.top_k, edge_format=edge_format
        ).check(store)
    return model_config


def _check_output_dir(folder: Path, options: TrainOptions) -> None:
    is_run = folds.holds_run(folder)
    if is_run and not (options.config.resume or options.overwrite):
        raise UsageError(f"{folder} holds an earlier run: continue it with --resume, or replace it with --overwrite")
    folds.check_replaced(folder)
    if options.config.resume and not options.probe:
        folds.check_no_probe(folder)
    # Files of these names in a folder without a run belong to the user.
    check_output_files(folder, (PREDICTIONS, REPORT, *PLOTS), own=TRAIN, overwrite=is_run)


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

    def __post_init__(self) -> None:
        self.splits_path = self.output_dir / (folds.FOLDS_FILE if self.options.is_folded else folds.SPLIT_FILE)
        self.targets = self.store.targets(self.options.config.score_threshold)
        self.dropped: list[dict[str, Any]] = []
        if self.options.config.drop_nonfinite:
            self.targets, self.dropped = drop_nonfinite(self.store, self.targets)
        self.splits = self.ranks.on_rank_zero(self._load_or_make_splits)
        self.runs = folds.plan_runs(self.splits, self.options, self.output_dir)
        if self.options.config.resume:
            self.ranks.on_rank_zero(lambda: folds.check_resumed(self.output_dir, self.runs, self.options.models))
            if new := [n for n in self.options.models if not any((run.folder / n).exists() for run in self.runs)]:
                self.log(f"trained now, and not by the earlier run: {', '.join(new)}; --models chooses")
        self.entries: list[dict[str, Any]] = [{"fold": run.fold, "seed": run.seed, "models": {}} for run in self.runs]
        self.results = self._empty_results()

    def run(self, start: MemoryUse) -> dict[str, Any]:
        """Train, evaluate and write all files. Return the content of results.json.

        `start` is the memory in use before the store was opened.
        """
        options, seed = self.options, self.options.config.seed
        self._log_counts()
        check_finite(self.store, np.unique(np.concatenate([k for s in self.splits for k in s.indices.values()])))
        self._train_all(start)
        if not self.ranks.is_rank_zero:
            return self.results
        probes = {}
        if options.probe:
            probed = [run for run in self.runs if run.seed == seed]
            probes = {run.fold: run_probe(self.store, run.split, self.targets, seed) for run in probed}
        self._add_comparisons(probes)
        self.results["controls"] = control_entries(self.store, self.splits, self.targets, seed)
        self._write_results()
        tested = [{**e, "models": e["models"] | ({PROBE: probes[e["fold"]]} if probes else {})} for e in self.entries]
        write_predictions(self.output_dir / PREDICTIONS, tested, self.store)
        run_facts = RunFacts(options.command, peak_bytes=peak_memory())
        write_report(self.results, self.output_dir / REPORT, self.store, run_facts)
        write_plots(self.results, self.output_dir)
        return TrainingResults(self.results)

    def _load_or_make_splits(self) -> list[Split]:
        """Return the split, or the folds; with --resume those of the earlier run."""
        config, num_folds = self.options.config, self.options.folds
        if config.resume and self.splits_path.exists():
            return folds.read_splits(self.splits_path, self.store, self.targets, num_folds)
        if num_folds is None:
            return [make_split(self.store, self.targets, config.seed)]
        return make_folds(self.store, self.targets, num_folds, config.seed)

    def _log_counts(self) -> None:
        store, options = self.store, self.options
        sizes = ", ".join(f"{name} {len(indices)}" for name, indices in self.splits[0].indices.items())
        counts = f"{int(np.isnan(self.targets).sum()) - len(self.dropped):,} without a label or score"
        self.log(f"{store.path}: {plural(len(store), 'trace')}, {counts}; {'first fold: ' * options.is_folded}{sizes}")
        for text in (
            *store.describe_labels(options.config.score_threshold),
            *store.describe_shared_keys(self.targets),
        ):
            self.log(text)
        if options.config.drop_nonfinite:
            self.log(describe_dropped(self.dropped))
        if options.is_repeated:
            repeats = f"{plural(options.folds or 1, 'fold')} x {plural(options.seeds or 1, 'seed')}"
            self.log(f"{repeats}, {plural(len(self.runs) * len(options.models), 'training')}")

    def _empty_results(self) -> dict[str, Any]:
        """Return the results without metrics. They refer to the entries, which training fills."""
        options, used = self.options, np.concatenate([*self.splits[0].indices.values()])
        results: dict[str, Any] = {
            "models": {},
            "config": {
                **asdict(options.config),
                **asdict(self.model_config),
                "num_threads": torch.get_num_threads(),
                "world_size": self.ranks.world_size,
                "torch": torch.__version__,
            },
            "split": None if options.is_folded else self.splits[0].question_ids,
            "counts": [
                {name: {"hallucinated": h, "correct": c} for name, (h, c) in class_counts(split, self.targets).items()}
                for split in self.splits
            ],
            "store": self.store.info(),
            "traces": self.store.digest(used),
            "answers": digest_of_answers(options.models, self.model_config, self.store, used),
            "dropped_nonfinite": self.dropped,
        }
        if options.is_repeated:
            results["config"] |= {"folds": options.folds, "seeds": options.seeds}
            results["folds"] = [split.question_ids for split in self.splits]
            results["runs"] = self.entries
        else:
            results["models"] = self.entries[0]["models"]
        return results

    def _train_all(self, start: MemoryUse) -> None:
        """Train every model of every run, and write results.json after each."""
        options, ranks = self.options, self.ranks
        num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
        limit = memory_limit(options.memory_budget, start, num_processes)
        planned: dict[str, int | None] = {}
        if limit is not None:
            plan = partial(plan_micro_batches, options.models, self.store, options.config, options.model_options)
            num_train = len(self.splits[0].indices["train"])
            planned = ranks.on_rank_zero(lambda: plan(limit, start, num_train, ranks.world_size))
        with limited_memory(limit, start) as release_memory, StopSignals() as stop:
            # The earlier run is replaced only here, after all checks have passed.
            ranks.on_rank_zero(self._prepare_output_dir)
            trainer: Trainer | None = None
            for run, entry in zip(self.runs, self.entries, strict=True):
                for name in options.models:
                    if trainer is not None:
                        # A trainer is part of reference cycles, and keeps files of the store mapped.
                        trainer = None
                        gc.collect()
                    trainer = Trainer(
                        name,
                        self.store,
                        run.split,
                        self.targets,
                        self.model_config,
                        replace(options.config, seed=run.seed),
                        run.folder / name,
                        partial(_log_run, self.log, run) if options.is_repeated else self.log,
                        line=self.line,
                        ranks=ranks,
                        stop=stop,
                        micro_batch=planned.get(name),
                        on_fatal_oom=release_memory,
                        resume_command=options.resume_command,
                    )
                    entry["models"][name] = trainer.run()
                    if ranks.is_rank_zero:
                        self._remove_pages()  # of the results of before
                        self._write_results()

    def _remove_pages(self) -> None:
        for name in (PREDICTIONS, REPORT, *PLOTS):
            (self.output_dir / name).unlink(missing_ok=True)

    def _prepare_output_dir(self) -> None:
        """Write the splits and remove what belongs to an earlier run, unless it is resumed."""
        if self.options.config.resume and self.splits_path.exists():
            return
        self._remove_pages()  # before what shows that they are those of a run
        folds.remove_run(self.output_dir)
        ids = [split.question_ids for split in self.splits]
        write_json(self.splits_path, ids if self.options.is_folded else ids[0])

    def _add_comparisons(self, probes: dict[int | None, dict[str, Any]]) -> None:
        """Add the probe, the metrics aggregated over runs, and the comparisons between models."""
        seed, is_repeated, results = self.options.config.seed, self.options.is_repeated, self.results
        entries = {
            name: [(e["fold"] or 0, e["seed"], e["models"][name]) for e in self.entries] for name in self.options.models
        }
        if probes:
            entries[PROBE] = [(fold or 0, seed, entry) for fold, entry in probes.items()]
            results["probe"] = folds.aggregate_runs(entries[PROBE], seed) if is_repeated else probes[None]
        if is_repeated:
            results["models"] = {name: folds.aggregate_runs(of, seed) for name, of in entries.items() if name != PROBE}
            results["probes"] = [{"fold": fold, **entry} for fold, entry in probes.items()]
        scores = {name: [RunScores.from_entry(e, fold) for fold, _, e in of] for name, of in entries.items()}
        results["comparisons"] = compare(scores, seed)

    def _write_results(self) -> None:
        write_json(self.output_dir / RESULTS_FILE, console.nan_to_none(self.results))


def _log_run(log: Log, run: folds.TrainingRun, text: str) -> None:
    log(f"{run}: {text}")


def write_predictions(path: Path, runs: list[dict[str, Any]], store: TraceStore) -> None:
    """Write one row per run and tested trace, sorted by seed and trace.

    PREDICTION_COLUMNS are followed by one column per model: its probability that the answer
    is a hallucination. Where several stores are read as one, the last column names the store of the trace.

    Parameters
    ----------
    path : Path
    runs : list of dict
        For each run: fold (None without folds, written as an empty field), seed, and models,
        the results.json entries by name.
    store : TraceStore
    """
    names = list(runs[0]["models"]) if runs else []
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        scores = [run["models"][name]["test_scores"] for name in names]
        columns = [probability(np.array(s["logit"])).tolist() for s in scores]
        traces = scores[0]
        fold = "" if run["fold"] is None else run["fold"]
        for k, trace in enumerate(traces["trace_index"]):
            key = (traces["question_id"][k], traces["sample"][k], trace)
            values = (column[k] for column in columns)
            stored = store.internals.store_of(trace)
            rows.append((*key, "test", fold, run["seed"], traces["label"][k], *values, *stored))
    rows.sort(key=lambda row: (row[5], row[2]))
    write_rows(
        path, (*PREDICTION_COLUMNS, *names, *((STORE_COLUMN,) if len(store.internals.members) > 1 else ())), rows
    )
