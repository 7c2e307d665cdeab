"""Write the scores of a trained detector for every trace of a store to a CSV file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracestore.console import format_size
from tracestore.data.batch_format import BatchFormat
from tracestore.data.epoch import mean_trace_bytes
from tracestore.detectors.registry import DETECTORS
from tracestore.errors import UsageError
from tracestore.evaluation.metrics import probability
from tracestore.evaluation.tables import write_rows
from tracestore.inference.scoring import TrainedDetector, load_detector, score_traces
from tracestore.oom.limits import RESERVE_BYTES, limited_memory, memory_use
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.read.store import TraceStore, open_store
from tracestore.train.devices import pick_device, torch_threads
from tracestore.train.monitor import Log

HEADER = ("question_id", "sample", "hallucination_score", "predicted")


@dataclass
class PredictReport:
    """Result of `predict_store`, and the JSON document of ``tracestore predict``."""

    output: str
    checkpoint: str
    store: str
    model: str
    threshold: float
    num_traces: int
    num_predicted: int = 0
    num_without_score: int = 0


def predict_store(
    checkpoint: Path,
    store_path: Any,
    output: Path,
    *,
    batch_size: int = 16,
    device: str = "auto",
    num_threads: int | None = None,
    memory_budget: int | None = None,
    log: Log = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PredictReport:
    """Write a CSV file with the columns HEADER and a row for each trace of a store.

    Parameters
    ----------
    checkpoint : Path
        best.pt of a training.
    store_path : str or Path
    output : Path
        Replaced when all traces are scored.
    batch_size : int
    device : {"auto", "cpu", "cuda"}
    num_threads : int, optional
        Threads of torch and of the loader. Default: those of torch, and 2.
    memory_budget : int, optional
        Bytes that scoring may use in addition to the libraries.
    log : callable
        Called with each note.
    progress : callable
        Called with the numbers of scored traces and of all traces.

    Raises
    ------
    UsageError
        The detector cannot read the store, or the budget is too small.
    """
    with torch_threads(num_threads):
        device = pick_device(device)
        detector = load_detector(checkpoint)
        start = memory_use()
        store = open_store(store_path)
        detector.check(store)
        for difference in detector.differences(store):
            log(f"note: {difference}; scores may not carry over")
        if memory_budget is not None:
            _check_budget(detector, store, memory_budget)
        report = PredictReport(
            str(output), str(checkpoint), str(store_path), detector.name, detector.threshold, len(store)
        )

        def rows() -> Iterator[tuple[Any, ...]]:
            done = 0
            for indices, logits in score_traces(
                detector,
                store,
                batch_size=batch_size,
                device=device,
                num_threads=num_threads or 2,
                memory_budget=None if memory_budget is None else memory_budget // 2,
                on_event=lambda event: log(
                    f"out of memory: {event['size_before']} traces at once -> {event['size_after']}"
                ),
            ):
                scores, predicted = probability(logits), logits >= detector.threshold
                questions, is_scored = store.question_ids.take(indices), ~np.isnan(logits)
                for k, question, score, hit, has_score in zip(
                    indices, questions, scores, predicted, is_scored, strict=True
                ):
                    yield question, store[int(k)].sample, *((float(score), int(hit)) if has_score else ("", ""))
                    report.num_without_score += not has_score
                    report.num_predicted += bool(hit)
                done += len(indices)
                progress(done, report.num_traces)

        with limited_memory(memory_budget, start), map_os_errors(output):
            write_rows(output, HEADER, rows())
    return report


def _check_budget(detector: TrainedDetector, store: TraceStore, memory_budget: int) -> None:
    """Raise UsageError where a single trace needs more memory."""
    # Room for a few traces in flight, one in the forward pass, and the memory of the threads.
    spec = DETECTORS[detector.name]
    form = BatchFormat(spec.view, edge_format=spec.edge_format(detector.config, store, "cpu"))
    floor = 2 * RESERVE_BYTES + 8 * mean_trace_bytes(store, form)
    if memory_budget < floor:
        raise UsageError(
            f"--memory-budget {format_size(memory_budget)} is below {format_size(floor)}, the least that a single trace needs"
        )
