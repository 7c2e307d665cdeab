"""A comparison of detectors: frozen folds, results, and their files."""

import itertools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.benchmark.finished import FinishedResults
from tracestore.benchmark.fold_metrics import (
    compare_schemes,
    compare_sources,
    evaluate,
    scores_without_threshold,
    transfer_entry,
)
from tracestore.benchmark.fold_runs import Activity, LabeledStore, Measured, Show, external_scores
from tracestore.benchmark.frozen_folds import FrozenFolds, frozen_folds
from tracestore.console import nan_to_none
from tracestore.detectors.apart import named, properties
from tracestore.detectors.interface import missing_fields
from tracestore.detectors.registry import make_detector, registry
from tracestore.errors import TrainingError, UsageError
from tracestore.evaluation.store_split import describe_dropped, drop_nonfinite
from tracestore.features.feature_table import features
from tracestore.ingest.scores import read_scores
from tracestore.reports.benchmark_page import BenchmarkResults, format_results, write_benchmark
from tracestore.split import labeled_positions
from tracestore.store.format.labels import CORRECT, FOLD_PREFIX, STORE_COLUMN
from tracestore.store.format.provenance import require_compatible
from tracestore.store.io.destinations import BENCHMARK, check_output_dir, check_output_files
from tracestore.store.io.fsio import read_json, write_atomic, write_rows
from tracestore.store.read.store import TraceStore, open_store
from tracestore.train.monitor import Log
from tracestore.train.output_dir import lock_output_dir, write_json
from tracestore.words import plural

RESULTS, SCORES, TABLE, REPORT = "benchmark.json", "scores.csv", "table.txt", "report.html"
_FINISHED = ".finished.jsonl"
# The features of the fields that the detectors of this package read.
_FEATURES = {"last_token": "last", "hidden_states": "hidden", "attention": "attention", "answer": "tokens"}


@dataclass(frozen=True)
class BenchmarkOptions:
    """Options of a comparison; the defaults are those of ``tracestore benchmark``.

    Parameters
    ----------
    detectors : tuple of str
        Names in the registry. Controls and the edge-free twins of graph detectors are added.
    folds : int
    seed : int
        Seed of the folds, of the detectors and of the bootstrap.
    score : str, optional
        Named score that labels are derived from. Default: the default score of the store.
    score_threshold : float, optional
        Default: 0.5, for scores in [0, 1].
    drop_nonfinite : bool
        Leave out traces with NaN or infinite values.
    scores : mapping
        Files of scores that were computed elsewhere, by name.
    workers : int
        Processes that run detectors side by side.
    folds_dir : Path, optional
        Folder of the files of folds. Default: the output folder.
    save_detectors : bool
        Fit each detector to all labeled traces too, and write it to checkpoints/NAME.pt for ``tracestore predict``.
    command : str, optional
        The command, for the report.
    resume : bool
        Continue an interrupted run: detectors that it has finished on the same traces, labels and folds keep their results.
    overwrite : bool
        Replace earlier results. Folds are never replaced.
    allow_mixed_provenance : bool
    """

    detectors: tuple[str, ...]
    folds: int = 5
    seed: int = 42
    score: str | None = None
    score_threshold: float | None = None
    drop_nonfinite: bool = False
    scores: Mapping[str, Path] = field(default_factory=dict)
    workers: int = 1
    folds_dir: Path | None = None
    save_detectors: bool = False
    command: str | None = None
    resume: bool = False
    overwrite: bool = False
    allow_mixed_provenance: bool = False


def run_benchmark(
    stores: Sequence[Any], output_dir: Path, options: BenchmarkOptions, log: Log = print, show: Show | None = None
) -> dict[str, Any]:
    """Compare detectors on stores, and write benchmark.json, scores.csv, table.txt, report.html and the folds.

    Parameters
    ----------
    stores : sequence of str, Path or sequences of them
        An item that is a sequence is several stores as one. With several stores, each detector is also fitted to each store and tested on each other one.
    output_dir : Path
        Created if it does not exist.
    options : BenchmarkOptions
    log : callable
        Called with each line of the log.
    show : callable, optional
        Called several times a second with the steps done, their number, and a function that returns what runs.

    Returns
    -------
    dict
        The content of benchmark.json.

    Raises
    ------
    UsageError
        The output folder holds results, the stores do not fit each other, or no detector can run.
    InvalidInputError
        A file of folds was changed.
    """
    for folder in (output_dir, options.folds_dir or output_dir):
        check_output_dir(folder)
    mixed = options.allow_mixed_provenance
    opened = {_name(path): open_store(path, score=options.score, allow_mixed_provenance=mixed) for path in stores}
    if len(opened) != len(stores):
        raise UsageError("two stores have the same name; rename one of them")
    _check_stores(list(opened.values()), options)
    for store in opened.values():
        store.internals.score_threshold(options.score_threshold)  # refuses scores that need one
    with lock_output_dir(output_dir):
        is_whole = (output_dir / RESULTS).exists()
        are_saved = any(path.stem in registry() for path in output_dir.glob("checkpoints*/*.pt"))
        has_finished = (output_dir / _FINISHED).exists()
        if not options.overwrite and (is_whole or (options.save_detectors and are_saved and not has_finished)):
            raise UsageError(f"{output_dir} holds earlier results; pass --overwrite or another --output")
        if is_whole:
            _check_replaced(output_dir / RESULTS)
        pages = _pages(opened)
        has_folds = all((output_dir / f"folds-{name}.json").exists() for name in opened)
        is_run = is_whole or are_saved or has_finished or has_folds
        is_interrupted = has_finished or (is_run and any((output_dir / name).exists() for name in pages))
        if is_interrupted and not (options.resume or options.overwrite):
            raise UsageError(
                f"{output_dir} holds an interrupted run: continue it with --resume, or replace it with --overwrite"
            )
        check_output_files(output_dir, pages, own=BENCHMARK, overwrite=is_run, inputs=options.scores.values())
        with Activity(log, show) as activity:
            return _run(opened, output_dir, options, activity)


def _check_replaced(path: Path) -> None:
    """Raise UsageError for a file of results that may be of another program."""
    try:
        is_own = read_json(path).keys() >= {"config", "stores", "transfer"}
    except (OSError, ValueError, AttributeError):
        is_own = False
    if not is_own:
        raise UsageError(f"{path}: not the results of tracestore benchmark; choose another --output")


def _scores_file(name: str, stores: Collection[str]) -> str:
    """Return the name of the file of scores of one of the stores."""
    return SCORES if len(stores) == 1 else f"scores-{name}.csv"


def _pages(stores: Collection[str]) -> list[str]:
    """Return the names of the files besides the results and the folds."""
    return [REPORT, TABLE, *(_scores_file(name, stores) for name in stores)]


def _name(path: Any) -> str:
    if isinstance(path, Sequence) and not isinstance(path, str):
        return "+".join(map(_name, path))
    return str(path).rstrip("/").rpartition("/")[2].removesuffix(".zarr")


def _check_stores(stores: list[TraceStore], options: BenchmarkOptions) -> None:
    first = stores[0]
    for store in stores:
        if not options.allow_mixed_provenance:
            require_compatible(() if store is first else first.provenance, store.provenance, str(store.path))
        if (store.num_layers, store.hidden_dim) != (first.num_layers, first.hidden_dim):
            raise UsageError(f"{store.path}: its layers or hidden size differ from those of {first.path}")
    if options.scores and len(stores) > 1:
        raise UsageError("--scores needs one store, because a file has the scores of one")
    known = set(options.scores) & set(registry())
    if known:
        raise UsageError(f"--scores {min(known)}=...: the name of a detector; choose another name")


def _run(
    opened: dict[str, TraceStore], output_dir: Path, options: BenchmarkOptions, activity: Activity
) -> dict[str, Any]:
    data, folds = {}, {}
    dropped: dict[str, list[dict[str, Any]]] = {}
    for name, store in opened.items():
        targets, dropped[name] = store.targets(options.score_threshold), []
        if options.drop_nonfinite:
            targets, dropped[name] = drop_nonfinite(store, targets)
        path = (options.folds_dir or output_dir) / f"folds-{name}.json"
        folds[name] = frozen_folds(path, store, targets, options.folds, options.seed)
        data[name] = _labeled(name, store, targets, folds[name])
        activity.log(
            f"{store.path}: {plural(len(data[name].y), 'labeled trace')}, {int(data[name].y.sum()):,} hallucinated; {path}"
        )
        for text in (*store.describe_labels(options.score_threshold), *store.describe_shared_keys(targets)):
            activity.log(text)
        for score in scores_without_threshold(store, options.score_threshold):
            activity.log(
                f"score {score}: values outside [0, 1], no source of labels; --score {score} --score-threshold T takes it"
            )
        if options.drop_nonfinite:
            activity.log(describe_dropped(dropped[name]))
        elif count := int(store.has_nonfinite[data[name].indices].sum()):
            activity.log(f"NaN or infinite values in {plural(count, 'trace')}; --drop-nonfinite leaves them out")
    for a, b in itertools.combinations(data.values(), 2):
        shared = {*a.store.question_ids.take(a.indices)} & {*b.store.question_ids.take(b.indices)}
        if shared:
            activity.log(f"{a.name} and {b.name} share {plural(len(shared), 'question')}: transfer is trained on them")
    # Checkpoints are those of the results: earlier ones go with theirs.
    folders = ["checkpoints", *(f"checkpoints-{name}" for name in data)] if options.overwrite else []
    replaced = [path for name in folders for path in (output_dir / name).glob("*.pt") if path.stem in registry()]
    # Where benchmark.json is, the results are complete: earlier ones go first, the new ones come last.
    pages = [output_dir / RESULTS, *map(output_dir.joinpath, _pages(opened))]
    if options.save_detectors:
        _remove(*pages, *replaced)
    finished = FinishedResults(output_dir / _FINISHED, resume=options.resume)
    results: dict[str, Any] = {"config": _config(options), "stores": {}, "transfer": []}
    scores: dict[str, list[Measured]] = {}
    for name, of_store in data.items():
        others = [other for other in data.values() if other.name != name]
        folder = output_dir / ("checkpoints" if len(data) == 1 else f"checkpoints-{name}")
        checkpoints = folder if options.save_detectors else None
        entry, measured = _run_store(of_store, others, folds[name], options, checkpoints, finished, activity)
        results["stores"][name], scores[name] = {**entry, "dropped_nonfinite": dropped[name]}, measured
        for other in others:
            results["transfer"] += [
                transfer_entry(m, name, other, options.seed) for m in measured if other.name in m.transfer
            ]
    _remove(*pages, *(() if options.save_detectors else replaced))
    activity.total += 1
    with activity.step("report"):
        write_benchmark(nan_to_none(results), output_dir / REPORT, options.command)
    for name, measured in scores.items():
        write_scores(output_dir / _scores_file(name, data), data[name], measured)
    write_atomic(output_dir / TABLE, (format_results(results) + "\n").encode())
    write_json(output_dir / RESULTS, nan_to_none(results))
    _remove(finished.path)
    return BenchmarkResults(results)


def _config(options: BenchmarkOptions) -> dict[str, Any]:
    names = ("folds", "seed", "score", "score_threshold", "drop_nonfinite", "workers")
    config = {"detectors": list(options.detectors)} | {name: getattr(options, name) for name in names}
    return config | {"scores": {name: str(path) for name, path in options.scores.items()}}


def _labeled(name: str, store: TraceStore, targets: np.ndarray, folds: FrozenFolds) -> LabeledStore:
    indices = labeled_positions(targets, str(store.path))
    by_scheme = {scheme: folds.folds(store, indices, scheme) for scheme in folds.fold_of}
    return LabeledStore(name, store, indices, (targets[indices] >= 0.5).astype(np.int64), by_scheme)


def _with_references(names: Sequence[str]) -> list[str]:
    """Return the names of the detectors that are wanted, twins of these, or controls, in the order of the registry."""
    found = []
    for name, entry in registry().items():
        # A detector of another package is imported only if it is wanted.
        is_control = entry.package == "tracestore" and make_detector(name).kind == "control"
        is_twin = entry.model is not None and entry.model.twin_of in names
        if name in names or is_twin or is_control:
            found.append(name)
    return found


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _run_store(
    data: LabeledStore,
    others: Sequence[LabeledStore],
    folds: FrozenFolds,
    options: BenchmarkOptions,
    checkpoints: Path | None,
    finished: FinishedResults,
    activity: Activity,
) -> tuple[dict[str, Any], list[Measured]]:
    """Return the entry of a store in the results, and the scores of the detectors that could run."""
    external = {name: _read_external(name, path, data) for name, path in options.scores.items()}
    skipped, runnable, failed, info = {}, [], [], {}
    for name in _with_references(options.detectors):
        entry = registry()[name]
        try:
            info[name] = properties(name) | {"package": entry.package}
            fields = tuple(info[name]["fields"])
            reason = next((m for s in (data, *others) for m in missing_fields(s.store, fields)), None)
        except UsageError as error:
            reason = named(entry, error)
            failed.append(name)
        if reason is None:
            runnable.append(name)
        else:
            skipped[name] = reason
    activity.total += len(runnable) + 1
    start = time.perf_counter()
    wanted = {f for name in runnable if info[name]["package"] == "tracestore" for f in info[name]["fields"]}
    for group in dict.fromkeys(_FEATURES[f] for f in _FEATURES if f in wanted):
        activity.total += 1
        with activity.step(f"features of {group}"):
            for of_store in (data, *others):
                features(of_store.store, group)
    features_s = time.perf_counter() - start
    activity.log(f"features of all layers: {features_s:.1f} s")
    measured = []
    jobs = [(n, data, others, options.seed, checkpoints and checkpoints / f"{n}.pt") for n in runnable]
    for result in finished.measure(jobs, options.workers, activity):
        if result.error is None:
            measured.append(result)
        else:
            skipped[result.name] = result.error
            failed.append(result.name)
    for name, path in options.scores.items():
        measured.append(external_scores(name, data, external[name]))
        info[name] = {"kind": "external", "summary": path.name, "package": ""}
    if not measured:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise TrainingError(f"{data.store.path}: no detector can run: {reasons}")
    with activity.step("metrics and tests"):
        detectors = {m.name: info[m.name] | evaluate(m, data, options.seed) for m in measured}
        comparisons = compare_schemes(measured, data, options.seed)
        label_sources = compare_sources(data, measured, options.score_threshold, options.seed)
    return {
        "store": data.store.info(),
        "folds": {"sha256": folds.digest, "num_folds": folds.num_folds, "seed": folds.seed, "schemes": [*data.folds]},
        "num_traces": len(data.y),
        "num_hallucinated": int(data.y.sum()),
        "num_groups": len({data.store.group(int(k)) for k in data.indices} - {""}),
        "features_s": features_s,
        "detectors": detectors,
        "comparisons": comparisons,
        "label_sources": label_sources,
        "skipped": skipped,
        "failed": failed,
    }, measured


def _read_external(name: str, path: Path, data: LabeledStore) -> np.ndarray:
    """Return the scores ``(n,)`` of a file, high for hallucinations. UsageError if a labeled trace has none."""
    scores = read_scores(path, name=name)
    sign = -1.0 if scores.direction == CORRECT else 1.0
    questions = data.store.question_ids.take(data.indices)
    samples = [data.store[int(k)].sample for k in data.indices]
    rows = [scores.row_of(q, s) for q, s in zip(questions, samples, strict=True)]
    values = sign * np.array([math.nan if row is None else row.score for row in rows])
    missing = np.flatnonzero(np.isnan(values))
    if len(missing):
        first = questions[int(missing[0])]
        raise UsageError(f"{path}: no score for {len(missing)} of {len(values)} labeled traces, first {first!r}")
    return values


def write_scores(path: Path, data: LabeledStore, measured: Sequence[Measured]) -> None:
    """Write a row for each labeled trace: its key, label and folds, and the out-of-fold scores of each detector.

    The columns of a detector are its name and the scheme of the folds, separated by a colon. Where several stores are read
    as one, the last column names the store of the trace.
    """
    columns = [(f"{m.name}:{scheme}", scores) for m in measured for scheme, scores in m.scores.items()]
    folds = [f"{FOLD_PREFIX}{scheme}" for scheme in data.folds]
    stores = [STORE_COLUMN] if len(data.store.internals.members) > 1 else []
    header = ("question_id", "sample", "label", "group", *folds, *(name for name, _ in columns), *stores)
    rows = []
    for k, (index, question) in enumerate(
        zip(data.indices.tolist(), data.store.question_ids.take(data.indices), strict=True)
    ):
        trace = data.store[index]
        values = ["" if np.isnan(scores[k]) else float(scores[k]) for _, scores in columns]
        fold_of = [int(numbers[k]) for numbers in data.folds.values()]
        key = question, trace.sample, int(data.y[k]), trace.group
        rows.append((*key, *fold_of, *values, *data.store.internals.store_of(index)))
    write_rows(path, header, rows)
