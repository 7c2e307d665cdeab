"""A trained detector at work: what its checkpoint holds, and the logits of other traces."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracestore.data.loader import TraceLoader
from tracestore.detectors.checkpoint import DETECTOR_VERSION
from tracestore.detectors.config import ModelConfig
from tracestore.detectors.graph.inputs import GraphInputs, edge_threshold
from tracestore.detectors.models import Detector
from tracestore.detectors.precision import autocast_for
from tracestore.detectors.registry import DETECTORS, make_model
from tracestore.errors import InsufficientMemoryError, UsageError
from tracestore.oom.errors import is_out_of_memory
from tracestore.oom.guard import OOMGuard
from tracestore.oom.optimizers import SGD
from tracestore.store.read.store import TraceStore
from tracestore.train.checkpoint import load_checkpoint


@dataclass
class TrainedDetector:
    """A detector as its best epoch left it."""

    name: str
    model: Detector
    config: ModelConfig
    threshold: float
    temperature: float
    attention_threshold: float
    top_k: float | None
    precision: str
    trained_on: dict[str, Any]

    def check(self, store: TraceStore) -> None:
        """UsageError or MissingFieldError where the store's traces are none that it can read."""
        for what, mine, found in (
            ("layers", self.config.num_layers, store.num_layers),
            ("columns of hidden states", self.config.hidden_dim, store.hidden_dim),
        ):
            if mine != found:
                raise UsageError(f"{store.path}: {self.name} was trained on {mine} {what}, this store has {found}")
        store.require_view(DETECTORS[self.name].view)
        if DETECTORS[self.name].view == "graph":
            self.config.edge_format(store, "cpu")

    def differences(self, store: TraceStore) -> list[str]:
        """How the store's traces differ from those it was trained on without being refused."""
        if DETECTORS[self.name].view == "sequence":
            return []
        return [
            f"trained on {name.replace('_', ' ')} {mine!r}, this store has {getattr(store, name)!r}"
            for name in ("attention", "attention_layout")
            if (mine := self.trained_on[name]) != getattr(store, name)
        ]


def load_detector(path: Path) -> TrainedDetector:
    """Reads best.pt, as data. UsageError where it is damaged, something else, or of another version."""
    saved = load_checkpoint(path)
    version = saved.get("version")
    if "model_config" not in saved or not isinstance(version, int):
        raise UsageError(f"{path}: not a detector; give the best.pt of a run of tracestore train")
    if version != DETECTOR_VERSION:
        raise UsageError(
            f"{path}: version {version} of tracestore {saved.get('tracestore')}, this one reads {DETECTOR_VERSION}; train again"
        )
    try:
        config = ModelConfig(**saved["model_config"])
        # On no device: sizes in a file cost nothing before they are compared with its tensors.
        with torch.device("meta"):
            model = make_model(saved["name"], config)
        model.load_state_dict(saved["model"], assign=True)
        top_k = saved["top_k"]
        return TrainedDetector(
            saved["name"],
            model.eval(),
            config,
            float(saved["threshold"]),
            float(saved["temperature"]),
            float(saved["attention_threshold"]),
            None if top_k is None else float(top_k),
            str(saved["precision"]),
            dict(saved["store"]),
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"{path}: not a whole detector: {type(error).__name__}") from None


def score_traces(
    detector: TrainedDetector,
    store: TraceStore,
    *,
    indices: np.ndarray | None = None,
    batch_size: int = 16,
    device: str = "cpu",
    num_threads: int = 2,
    memory_budget: int | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Store indices (b,) and logits (b,) float64, batch after batch, in the store's order.

    A logit is NaN where the trace holds NaN or infinite values. memory_budget bounds the
    batches; a batch whose forward pass does not fit is computed in halves. InsufficientMemoryError
    where one trace is too much."""
    detector.check(store)
    view = DETECTORS[detector.name].view
    loader = TraceLoader(
        store,
        view,
        batch_size=batch_size,
        shuffle="none",
        num_threads=num_threads,
        indices=indices,
        attention_threshold=detector.attention_threshold,
        top_k=detector.top_k,
        edge_format=DETECTORS[detector.name].edge_format(detector.config, store, torch.device(device).type),
        memory_budget=memory_budget,
        pin_memory=device != "cpu",
        rank=0,
        world_size=1,
        as_pyg=False,
    )
    model = detector.model.to(device)
    guard = OOMGuard(model, SGD(model.parameters(), lr=0.0), on_event=on_event)
    threshold = edge_threshold(detector.attention_threshold, detector.top_k)
    # The precision that the detector was tested in.
    autocast = autocast_for(model, detector.precision, torch.device(device))
    nonfinite = store.has_nonfinite
    batches = iter(loader)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise InsufficientMemoryError("a batch does not fit into memory; lower --batch-size") from None
        if batch is None:
            return
        inputs = batch.sequences if view == "sequence" else GraphInputs.from_batch(batch, threshold)
        size = len(batch.question_id)

        def run(begin: int, end: int, inputs: Any = inputs, size: int = size) -> torch.Tensor:
            if end - begin < size:
                inputs = inputs.traces(begin, end) if view == "graph" else inputs[begin:end]
            with autocast:
                logits: torch.Tensor = model(inputs.to(device)).logits
                return logits.double().cpu()

        with torch.no_grad():
            logits = torch.cat(guard.evaluate(size, run)).numpy()
        at = batch.trace_index.numpy()
        yield at.copy(), np.where(nonfinite[at] | ~np.isfinite(logits), np.nan, logits)
        del batch, inputs, run
