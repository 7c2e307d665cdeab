"""The models of `tracestore train` as detectors of the benchmark."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from tracestore.detectors.interface import Detector
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import MODELS
from tracestore.evaluation.store_split import Split, inner_bins
from tracestore.inference.predict import TrainedDetector, load_detector, score_traces
from tracestore.store.read.store import TraceStore
from tracestore.train.config import TrainConfig
from tracestore.train.devices import torch_threads
from tracestore.train.trainer import Trainer

# One in so many questions of the training split validates.
_VALIDATION_BINS = 6


@dataclass
class TorchModel(Detector):
    """A model of tracestore train, with its out-of-memory guard; the epoch is chosen on a part of the training split.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    epochs : int
    standardize : bool
        Standardize the inputs with statistics of the training traces.
    """

    name: str = "lstm_solo"
    epochs: int = 12
    standardize: bool = True
    _trained: TrainedDetector | None = field(default=None, init=False, repr=False)

    cost: ClassVar[str] = "training takes minutes"
    reference: ClassVar[str] = "docs/training.md"

    @property
    def summary(self) -> str:  # type: ignore[override]
        """The architecture of the model."""
        return MODELS[self.name].summary

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """The fields of the model's view."""
        return ("last_token",) if MODELS[self.name].view == "sequence" else ("hidden_states", "attention")

    @property
    def layers(self) -> str:  # type: ignore[override]
        """The layers that the model reads by default."""
        return "from a quarter to seven eighths of the depth" if MODELS[self.name].reads_middle else "all"

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Train the model with the guarded trainer."""
        bins = inner_bins(store, indices, labels, _VALIDATION_BINS, self.seed, self.keep_together)
        parts = {"train": indices[bins > 0], "val": indices[bins == 0]}
        # The trainer scores a test split once; here that is the validation split again.
        parts["test"] = parts["val"]
        split = Split(parts, {name: store.question_ids.take(part) for name, part in parts.items()})
        targets = np.full(len(store), np.nan)
        targets[indices] = labels
        config = ModelConfig.from_store(store, standardize=self.standardize)
        options = TrainConfig(epochs=self.epochs, seed=self.seed)
        with tempfile.TemporaryDirectory() as folder, torch_threads(None):
            Trainer(self.name, store, split, targets, config, options, Path(folder), lambda _: None).run()
            trained = load_detector(Path(folder) / "best.pt")
        assert isinstance(trained, TrainedDetector)
        self._trained = trained
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return logits divided by the temperature that fits the validation split."""
        assert self._trained is not None, "fit() comes first"
        logits = np.full(len(store), np.nan)
        with torch_threads(None):
            for batch, values in score_traces(self._trained, store, self._trained.options, indices=indices):
                logits[batch] = values
        scaled: np.ndarray = logits[indices] / self._trained.temperature
        return scaled

    @property
    def chosen(self) -> dict[str, Any]:
        """The decision threshold and the temperature."""
        trained = self._trained
        return {} if trained is None else {"threshold": trained.threshold, "temperature": trained.temperature}
