"""Apply a trained detector to a store: logits in memory, or scores in a CSV file."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from tracestore.data.batches.batch_format import BatchFormat
from tracestore.data.epoch import mean_trace_bytes
from tracestore.detectors.interface import answer_positions
from tracestore.detectors.layers.model_config import ModelConfig, Precision
from tracestore.detectors.models import DetectorModel
from tracestore.detectors.registry import MODELS, make_model
from tracestore.detectors.saved import (
    MODEL_VERSION,
    FittedDetector,
    check_shape,
    checked_hashes,
    count_seen,
    from_content,
)
from tracestore.errors import InsufficientMemoryError, UsageError
from tracestore.evaluation.metrics import probability
from tracestore.oom.guard import OOMGuard
from tracestore.oom.memory_limits import RESERVE_BYTES, limited_memory
from tracestore.oom.oom_errors import is_out_of_memory
from tracestore.oom.optimizers import SGD
from tracestore.platform_support import memory_use
from tracestore.store.format.labels import DEFAULT_THRESHOLD, PREDICTED_COLUMNS, STORE_COLUMN
from tracestore.store.format.provenance import Provenance, require_compatible
from tracestore.store.io.fsio import map_os_errors, write_rows
from tracestore.store.read.store import StorePath, TraceStore, open_store
from tracestore.train.batches import BatchFeed
from tracestore.train.checkpoint import load_checkpoint
from tracestore.train.config import TrainConfig
from tracestore.train.devices import pick_device, torch_threads
from tracestore.train.distributed import DistributedContext
from tracestore.train.model_runner import ModelRunner
from tracestore.train.monitor import Log
from tracestore.words import format_size, plural


@dataclass
class TrainedDetector:
    """A detector with the weights of its best epoch.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    model : DetectorModel
        In evaluation mode.
    config : ModelConfig
    threshold, temperature : float
        Decision threshold of the logit, and temperature of the calibration.
    options : TrainConfig
        Attention threshold, top_k and precision of the training.
    trained_on : dict
        Form of the attention of the training store, and whether the positions of its answers are known.
    seen : torch.Tensor
        Of `seen_hashes`: the traces of training and validation.
    provenance : tuple of Provenance
        That of the training store.
    """

    name: str
    model: DetectorModel
    config: ModelConfig
    threshold: float
    temperature: float
    options: TrainConfig
    trained_on: dict[str, Any]
    seen: torch.Tensor
    provenance: tuple[Provenance, ...] = ()

    def check(self, store: TraceStore) -> None:
        """Check that the detector can read the traces of a store.

        Raises
        ------
        UsageError
            The number of layers or the hidden size differs.
        MissingFieldError
            The store lacks the view or the attention weights.
        """
        check_shape(self.name, (self.config.num_layers, self.config.hidden_dim), store)
        spec = MODELS[self.name]
        store.require_view(spec.view)
        spec.edge_format(self.config, store, "cpu")

    def differences(self, store: TraceStore) -> list[str]:
        """Return differences to the training store that do not prevent scoring, one sentence each."""
        if MODELS[self.name].view == "sequence":
            return []
        found = {"attention": store.attention_mode, "attention_layout": store.attention_layout}
        if MODELS[self.name].reads_answers(self.config):
            found["answer_positions"] = answer_positions(store)
        return [
            f"trained on {name.replace('_', ' ')} {self.trained_on[name]!r}, this store has {value!r}"
            for name, value in found.items()
            if self.trained_on[name] != value
        ]


def load_detector(path: Path) -> TrainedDetector | FittedDetector:
    """Load best.pt, or a checkpoint of ``tracestore benchmark --save-detectors``, without executing code.

    Raises
    ------
    UsageError
        The file is damaged, not a detector, or of another version.
    """
    saved = load_checkpoint(path)
    if "detector_version" in saved:  # of content()
        return from_content(saved, path)
    version = saved.get("version")
    if "model_config" not in saved or not isinstance(version, int):
        raise UsageError(f"{path}: not a detector; give the best.pt of a run of tracestore train")
    if version != MODEL_VERSION:
        raise UsageError(
            f"{path}: version {version}, written by tracestore {saved.get('tracestore')}; this tracestore reads "
            f"version {MODEL_VERSION}; train again"
        )
    try:
        config = ModelConfig(**saved["model_config"])
        # The meta device allocates nothing: the sizes that the file claims are first compared with its tensors.
        with torch.device("meta"):
            model = make_model(saved["name"], config)
        model.load_state_dict(saved["model"], assign=True)
        top_k = None if saved["top_k"] is None else float(saved["top_k"])
        names = ("threshold", "temperature", "attention_threshold")
        threshold, temperature, attention_threshold = numbers = [float(saved[name]) for name in names]
        if saved["precision"] not in get_args(Precision) or not np.isfinite(numbers).all():
            raise ValueError
        trained_on = {name: saved["store"][name] for name in ("attention", "attention_layout", "answer_positions")}
        return TrainedDetector(
            saved["name"],
            model.eval(),
            config,
            threshold,
            temperature,
            # Scoring uses no labels, so any score threshold will do.
            TrainConfig(
                precision=saved["precision"],
                attention_threshold=attention_threshold,
                top_k=top_k,
                score_threshold=DEFAULT_THRESHOLD,
            ),
            trained_on,
            checked_hashes(saved["store"]["seen"]),
            tuple(map(Provenance.from_json, saved["store"]["provenance"])),
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"{path}: not a complete detector: {type(error).__name__}") from None


def score_traces(
    detector: TrainedDetector,
    store: TraceStore,
    config: TrainConfig,
    *,
    indices: np.ndarray | None = None,
    memory_budget: int | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Compute the logits of the traces of a store, batch after batch, in store order.

    A batch that does not fit into memory is split in halves.

    Parameters
    ----------
    detector : TrainedDetector
    store : TraceStore
    config : TrainConfig
        The options of the detector, with the device, the batch size and the threads of the loader.
    indices : np.ndarray, optional
        Store indices. Default: all traces.
    memory_budget : int, optional
        Bytes for the batches of the loader.
    on_event : callable, optional
        Called with each recovered out-of-memory event.

    Yields
    ------
    indices : np.ndarray
        ``(b,)`` int64.
    logits : np.ndarray
        ``(b,)`` float64, NaN where a trace holds NaN or infinite values.

    Raises
    ------
    InsufficientMemoryError
        A single trace does not fit.
    """
    detector.check(store)
    indices = np.arange(len(store)) if indices is None else indices
    alone = DistributedContext(alone=True)
    feed = BatchFeed(
        detector.name, store, indices, config, detector.config, alone, shuffle="none", memory_budget=memory_budget
    )
    runner = ModelRunner(detector.model, detector.config, config)
    guard = OOMGuard(
        runner.model, SGD(runner.model.parameters(), lr=0.0), on_event=on_event, on_host_memory=feed.reduce_memory
    )
    nonfinite = store.has_nonfinite
    for _ in range(len(feed)):
        batches = feed.next_batches(1)
        if batches is None:
            raise InsufficientMemoryError("a batch does not fit into memory; lower --batch-size")
        with torch.no_grad():
            results = guard.evaluate(batches[0].size, partial(runner.score, batches[0]))
        batch_indices = batches[0].trace_index.numpy().copy()
        del batches  # Freed before the next batch is loaded.
        feed.gather_ahead(1)
        logits = np.array([logit for part, _ in results for logit in part.tolist()])
        yield batch_indices, np.where(nonfinite[batch_indices] | ~np.isfinite(logits), np.nan, logits)


@dataclass
class PredictReport:
    """Result of `predict_store`, and the JSON document of ``tracestore predict``."""

    output: str
    checkpoint: str
    store: str
    model: str
    threshold: float
    num_traces: int
    num_seen: int
    num_predicted: int = 0
    num_without_score: int = 0


def predict_store(
    checkpoint: Path,
    store_path: StorePath,
    output: Path,
    *,
    overwrite: bool = False,
    batch_size: int = 16,
    device: str = "auto",
    num_threads: int | None = None,
    memory_budget: int | None = None,
    allow_mixed_provenance: bool = False,
    log: Log = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PredictReport:
    """Write a CSV file with the columns PREDICTED_COLUMNS and a row for each trace of a store.

    Of several stores, which are read as one, the last column names the store of the trace.

    Parameters
    ----------
    checkpoint : Path
        best.pt of a training, or a checkpoint of ``tracestore benchmark --save-detectors``.
    store_path : str, Path or sequence of them
    output : Path
        Appears when all traces are scored.
    overwrite : bool
        Replace a file that exists then.
    batch_size : int
    device : {"auto", "cpu", "cuda"}
    num_threads : int, optional
        Threads of torch and of the loader. Default: those of torch, and 2.
    memory_budget : int, optional
        Bytes that scoring with a detector of a training may use in addition to the libraries.
    allow_mixed_provenance : bool
        Score a store whose provenance conflicts with that of the training store.
    log : callable
        Called with each note.
    progress : callable
        Called with the numbers of scored traces and of all traces.

    Raises
    ------
    UsageError
        The detector cannot read the store, the provenance conflicts, or the budget is too small.
    """
    with torch_threads(num_threads):
        detector = load_detector(checkpoint)
        start = memory_use()
        store = open_store(store_path, allow_mixed_provenance=allow_mixed_provenance)
        detector.check(store)
        if not allow_mixed_provenance:
            require_compatible(detector.provenance, store.provenance, str(store.path))
        num_seen = count_seen(detector.seen, store)
        report = PredictReport(
            str(output), str(checkpoint), str(store.path), detector.name, detector.threshold, len(store), num_seen
        )
        if num_seen:
            of_all = f"{num_seen:,} of {plural(len(store), 'trace')}"
            log(f"note: {of_all} trained or validated the detector; their scores are not those of new answers")
        for text in store.describe_shared_keys():
            log(text)
        batches: Iterable[tuple[np.ndarray, np.ndarray]]
        if isinstance(detector, FittedDetector):
            memory_budget = None
            batches = [(store.indices, detector.logits(store, store.indices))]
        else:
            for difference in detector.differences(store):
                log(f"note: {difference}; scores may not carry over")
            if memory_budget is not None:
                _check_budget(detector, store, memory_budget)
            config = replace(
                detector.options, batch_size=batch_size, device=pick_device(device), loader_threads=num_threads or 2
            )
            batches = score_traces(
                detector,
                store,
                config,
                memory_budget=None if memory_budget is None else memory_budget // 2,
                on_event=lambda event: log(
                    f"out of memory: {plural(event['size_before'], 'trace')} at once -> {event['size_after']}"
                ),
            )

        def rows() -> Iterator[tuple[Any, ...]]:
            done = 0
            for indices, logits in batches:
                is_scored = ~np.isnan(logits)
                scores, predicted = probability(np.where(is_scored, logits, 0)), logits >= detector.threshold
                given = indices, store.question_ids.take(indices), scores, predicted, is_scored
                for k, question, score, hit, has_score in zip(*given, strict=True):
                    values = (float(score), int(hit)) if has_score else ("", "")
                    yield question, store[int(k)].sample, *values, *store.internals.store_of(int(k))
                    report.num_without_score += not has_score
                    report.num_predicted += bool(hit)
                done += len(indices)
                progress(done, report.num_traces)

        with limited_memory(memory_budget, start), map_os_errors(output):
            are_several = len(store.internals.members) > 1
            columns = (*PREDICTED_COLUMNS, *((STORE_COLUMN,) if are_several else ()))
            write_rows(output, columns, rows(), overwrite=overwrite)
    return report


def _check_budget(detector: TrainedDetector, store: TraceStore, memory_budget: int) -> None:
    """Raise UsageError where a single trace needs more memory."""
    # Room for a few traces in flight, one in the forward pass, and the memory of the threads.
    spec = MODELS[detector.name]
    form = BatchFormat(spec.view, edge_format=spec.edge_format(detector.config, store, "cpu"))
    floor = 2 * RESERVE_BYTES + 8 * mean_trace_bytes(store, form)
    if memory_budget < floor:
        raise UsageError(
            f"--memory-budget {format_size(memory_budget)} is below {format_size(floor)}, the least that a single trace needs"
        )
