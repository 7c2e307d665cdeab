"""Run one detector on the folds of a store, and on other stores, and measure time and memory."""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from threadpoolctl import threadpool_limits

from tracestore.detectors.apart import as_scores, one_line, plain, run_apart
from tracestore.detectors.interface import Detector
from tracestore.detectors.logistic import fit_linear
from tracestore.detectors.registry import make_detector, registry
from tracestore.detectors.saved import content
from tracestore.errors import MissingFieldError, RunInterruptedError, UsageError, escape_unprintable, some_of
from tracestore.evaluation.metrics import probability, youden_threshold
from tracestore.oom.memory_limits import PeakMemoryMonitor
from tracestore.platform_support import MemoryUse, memory_use
from tracestore.store.read.store import TraceStore
from tracestore.train.checkpoint import save_checkpoint
from tracestore.train.monitor import Log

# The arguments of `measure_detector`.
Job = tuple[str, "LabeledStore", Sequence["LabeledStore"], int, Path | None]
# Platt scaling is nearly unregularized.
_PLATT_C = 1000.0
# Receives the steps done, their number, and a text for the rest of the line.
Show = Callable[[int, int, Callable[[], str]], None]
_INTERVAL_S = 0.2
_NAMES = 3


@dataclass(frozen=True)
class LabeledStore:
    """The labeled traces of a store, and their folds.

    Attributes
    ----------
    name : str
        Name in the results.
    store : TraceStore
    indices, y : np.ndarray
        ``(n,)`` int64, store indices and labels.
    folds : mapping
        The fold ``(n,)`` of each trace, for "question" and perhaps "group".
    """

    name: str
    store: TraceStore
    indices: np.ndarray
    y: np.ndarray
    folds: Mapping[str, np.ndarray]


@dataclass
class Measured:
    """The scores of a detector on the traces of a store, and what they cost.

    Attributes
    ----------
    name : str
    scores, probabilities : dict of np.ndarray
        ``(n,)`` float64 for each scheme of folds: each trace is scored by the detector that was fitted to the other
        folds. NaN in `scores` where the detector has none.
    transfer : dict of np.ndarray
        Scores on other stores, fitted to all labeled traces of this one.
    chosen : dict of list
        What `fit` chose in each fold, for each scheme.
    provenance : dict
        What the detector reads.
    fit_s, score_s : float
        Wall seconds of all fits and scorings.
    cpu_s : float
        Processor seconds of the same.
    peak_bytes : int
        Peak of the memory of the process above that before its first detector, without mapped files.
    notes : list of str
        Why there is no checkpoint, or no transfer to a store.
    error : str or None
        Why there are no scores.
    """

    name: str
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    probabilities: dict[str, np.ndarray] = field(default_factory=dict)
    transfer: dict[str, np.ndarray] = field(default_factory=dict)
    chosen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    fit_s: float = 0.0
    score_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    error: str | None = None


class Activity:
    """The steps of a benchmark. Use it as a context manager; safe to use from threads.

    Parameters
    ----------
    log : callable
        Called with each line of the log, by one thread at a time.
    show : callable, optional
        Called several times a second with the steps done, their number and what runs.
    """

    def __init__(self, log: Log, show: Show | None = None) -> None:
        self._log, self._show = log, show
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._running: list[str] = []
        self._done = self.total = 0
        self._thread = threading.Thread(target=self._run, name="tracestore-activity", daemon=True)

    def __enter__(self) -> Self:
        if self._show is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._show is not None:
            self._thread.join()

    def log(self, line: str) -> None:
        """Write a line of the log."""
        with self._lock:
            self._log(line)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show the name while the block runs, and count it as done."""
        with self._lock:
            self._running.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(name)
                self._done += 1

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            with self._lock:
                if self._show is not None and self._running:
                    self._show(self._done, max(self.total, self._done + 1), self._note)

    def _note(self) -> str:
        return f"now {some_of(self._running, _NAMES)}"


def measure_detector(
    name: str, data: LabeledStore, others: Sequence[LabeledStore], seed: int, checkpoint: Path | None = None
) -> Measured:
    """Fit and score a detector on every fold, and on all traces for the other stores and for a checkpoint.

    An error of the detector is returned, not raised, so that it hinders no other detector.
    """
    result = Measured(name)
    start, cpu = _memory_at_start(), time.process_time()
    # One thread, so that results do not depend on the processors; the models of `train` keep all threads.
    threads = 1 if registry()[name].model is None else None
    with threadpool_limits(threads), PeakMemoryMonitor() as monitor:
        try:
            for scheme, folds in data.folds.items():
                _cross_validate(result, data, scheme, folds, seed)
            if others or checkpoint is not None:
                _use_all(result, data, others, seed, checkpoint)
        except (RunInterruptedError, KeyboardInterrupt):
            raise
        except Exception as error:
            result.error = one_line(error)
    result.cpu_s = time.process_time() - cpu
    result.peak_bytes = max(0, monitor.peak.anonymous - start.anonymous)
    return result


@functools.cache
def _memory_at_start() -> MemoryUse:
    """Return the memory of this process with its libraries, before its first detector."""
    import sklearn.linear_model  # noqa: F401

    return memory_use()


def _fitted(result: Measured, data: LabeledStore, rows: np.ndarray, keep_together: Any, seed: int) -> Detector:
    detector = make_detector(result.name)
    detector.seed, detector.keep_together = seed, keep_together
    start = time.perf_counter()
    detector.fit(data.store, data.indices[rows], data.y[rows])
    result.fit_s += time.perf_counter() - start
    result.provenance = detector.provenance(data.store)
    return detector


def _scored(result: Measured, detector: Detector, data: LabeledStore, rows: np.ndarray) -> np.ndarray:
    start = time.perf_counter()
    scores = as_scores(detector.score(data.store, data.indices[rows]), rows.shape)
    result.score_s += time.perf_counter() - start
    return scores


def _cross_validate(result: Measured, data: LabeledStore, scheme: str, folds: np.ndarray, seed: int) -> None:
    scores, p = np.full(len(folds), np.nan), np.full(len(folds), np.nan)
    chosen = []
    for fold in np.unique(folds):
        train, test = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        detector = _fitted(result, data, train, scheme, seed)
        scores[test] = _scored(result, detector, data, test)
        if detector.gives_logits:
            p[test] = probability(scores[test])
        else:
            p[test] = platt(_scored(result, detector, data, train), data.y[train], scores[test])
        chosen.append(detector.chosen)
    result.scores[scheme], result.probabilities[scheme], result.chosen[scheme] = scores, p, chosen


def _use_all(
    result: Measured, data: LabeledStore, others: Sequence[LabeledStore], seed: int, checkpoint: Path | None
) -> None:
    """Fit the detector to all labeled traces, score the other stores, and save it."""
    scheme, rows = ("group" if "group" in data.folds else "question"), np.arange(len(data.y))
    detector = _fitted(result, data, rows, scheme, seed)
    for other in others:
        try:
            detector.check(other.store)
        except MissingFieldError as error:
            result.notes.append(f"no transfer: {error}")
            continue
        result.transfer[other.name] = _scored(result, detector, other, np.arange(len(other.y)))
    if checkpoint is None:
        return
    slope, intercept = 1.0, 0.0
    if not detector.gives_logits:
        slope, intercept = _platt_line(_scored(result, detector, data, rows), data.y)
    # The threshold comes from the out-of-fold probabilities.
    p = result.probabilities["question"]
    known = ~np.isnan(p)
    threshold = np.clip(youden_threshold(data.y[known], p[known]), 1e-12, 1 - 1e-12)
    logit = float(np.log(threshold) - np.log1p(-threshold))
    try:
        save_checkpoint(checkpoint, content(result.name, detector, data.store, data.indices, slope, intercept, logit))
    except UsageError as error:
        result.notes.append(str(error))


def platt(train: np.ndarray, y: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Return probabilities of test scores, from a logistic regression of the training labels on the training scores.

    NaN where a test score is NaN; the share of hallucinations if the training scores have one class or one value.

    References
    ----------
    Platt 1999, "Probabilistic Outputs for Support Vector Machines".
    """
    slope, intercept = _platt_line(train, y)
    return probability(slope * test + intercept)


def _platt_line(scores: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return slope and intercept of the logit of the label as a function of the score."""
    known = ~np.isnan(scores)
    x, labels = scores[known, None], y[known]
    if not 0 < labels.sum() < len(labels) or np.ptp(x) == 0:
        return 0.0, float(np.log(y.mean() / (1 - y.mean())))
    model = fit_linear(x, labels, _PLATT_C)
    slope = float(model.weight[0] / model.scale[0])
    return slope, model.intercept - slope * float(model.mean[0])


def external_scores(name: str, data: LabeledStore, scores: np.ndarray) -> Measured:
    """Return the result of scores ``(n,)`` that were computed elsewhere, calibrated on the training split of each fold."""
    result = Measured(name, provenance={"fields": [], "layers": "unknown"})
    for scheme, folds in data.folds.items():
        p = np.full(len(folds), np.nan)
        for fold in np.unique(folds):
            train, test = folds != fold, folds == fold
            p[test] = platt(scores[train], data.y[train], scores[test])
        result.scores[scheme], result.probabilities[scheme], result.chosen[scheme] = scores, p, []
    return result


def measure_all(
    jobs: Sequence[Job], workers: int, activity: Activity, on_finished: Callable[[Measured], None]
) -> Iterator[Measured]:
    """Yield the result of every job in their order, computed by so many processes side by side.

    `on_finished` is called in a thread with each result that has no error, once it is known.

    A detector of another package runs in a process of its own, also with one worker.
    """
    cancelled = threading.Event()

    def measure(job: Job, pool: ProcessPoolExecutor | None) -> Measured:
        with activity.step(job[0]):
            if registry()[job[0]].is_foreign:
                result = _measure_apart(job, cancelled)
            elif pool is None:
                result = measure_detector(*job)
            else:
                try:
                    result = pool.submit(measure_detector, *job).result()
                except BrokenProcessPool:  # A process was killed: all of the pool end, whichever it was.
                    result = _measure_apart(job, cancelled)
        costs = [f"{result.fit_s + result.score_s:.1f} s", *result.notes]
        activity.log(f"{result.name}: {result.error or '; '.join(costs)}")
        if result.error is None:
            on_finished(result)
        return result

    if workers == 1 or len(jobs) <= 1:
        yield from (measure(job, None) for job in jobs)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    # Ctrl-C is for this process: what a thread starts inherits its signal mask, from the first instruction on.
    threads = ThreadPoolExecutor(
        workers, initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, {signal.SIGINT})
    )
    try:
        # The last ones of the registry take the longest, and begin first.
        futures = [threads.submit(measure, job, pool) for job in reversed(jobs)]
        yield from (future.result() for future in reversed(futures))
    finally:
        cancelled.set()
        threads.shutdown(wait=False, cancel_futures=True)
        for process in list((pool._processes or {}).values()):
            process.kill()  # it waits for a job, or its job is not wanted
        pool.shutdown(cancel_futures=True)
        threads.shutdown()


def _end_with_parent() -> None:
    """Let this process end when its parent has ended, also by a signal: it would wait for jobs for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _measure_apart(job: Job, cancelled: threading.Event) -> Measured:
    """Return the result of a detector in a process of its own, or what the process did instead as its error."""
    try:
        result: Measured = run_apart(f"{__name__}:measure_plain", *job, cancelled=cancelled)
    except UsageError as error:
        return Measured(job[0], error=str(error))
    return result


def measure_plain(name: str, *arguments: Any) -> Measured:
    """Return the result of `measure_detector` without values of classes that the detector defines."""
    result = measure_detector(name, *arguments)
    result.chosen, result.provenance = plain(result.chosen), plain(result.provenance)
    result.notes = [escape_unprintable(note) for note in result.notes]
    return result
