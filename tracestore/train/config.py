"""The configuration of a training run and its state."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from tracestore.data.order import Shuffle
from tracestore.detectors.model_config import Precision

T = TypeVar("T")
WEIGHT_DECAY = 1e-5
HISTORY = ("train_loss", "val_loss", "val_auroc", "traces_per_s", "data_wait_share")
# Keys of last.pt that differ from the names of the fields.
_CHECKPOINT_KEYS = {"grad_accum_steps": "accumulate"}


def _resumable(default: T) -> T:
    """Return a field that may change when a run resumes, because it does not change the results."""
    return field(default=default, metadata={"is_resumable": True})


@dataclass(frozen=True)
class TrainConfig:
    """Training options of a detector. The fields are named like the flags of ``tracestore train``."""

    epochs: int = _resumable(50)
    batch_size: int = 16
    grad_accum_steps: int = 1
    lr: float = 0.001
    seed: int = 42
    device: str = _resumable("cpu")
    precision: Precision = "float32"
    activation_checkpointing: bool = _resumable(False)
    shuffle: Shuffle = "global"
    shuffle_buffer: int = 1000
    score: str | None = None
    score_threshold: float | None = None
    drop_nonfinite: bool = False
    attention_threshold: float = 0.0
    top_k: float | None = None
    max_cache_batches: int = _resumable(2)
    num_workers: int = _resumable(0)
    loader_threads: int = _resumable(2)
    checkpoint_interval_s: float = _resumable(300.0)
    logger: Literal["tensorboard", "wandb", "mlflow"] | None = _resumable(None)
    resume: bool = _resumable(False)
    allow_mixed_provenance: bool = _resumable(False)

    def identity(self) -> dict[str, Any]:
        """Return the options that must not change when a run resumes."""
        names = [f.name for f in fields(self) if not f.metadata.get("is_resumable")]
        return {_CHECKPOINT_KEYS.get(name, name): getattr(self, name) for name in names}


@dataclass
class TrainState:
    """Progress of a run, apart from weights and optimizer.

    `epoch` and `batch` are the position of the next batch. If `batch` is the number of batches of
    the epoch, its validation comes next.
    """

    epoch: int = 0
    batch: int = 0
    history: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in HISTORY})
    seconds_per_epoch: list[float] = field(default_factory=list)
    best_val_auroc: float = -math.inf
    best_epoch: int = -1
    # Sums over the current epoch:
    loss_sum: float = 0.0
    loss_count: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "TrainState":
        """Return the progress in a checkpoint; raise ValueError if it is none."""
        state = cls(**saved)
        curves = [*state.history.values(), state.seconds_per_epoch]
        counts = (state.epoch, state.batch, state.best_epoch + 1, state.loss_count)
        sums = (state.loss_sum, state.seconds, state.waited_s)
        if (
            not all(type(count) is int and count >= 0 for count in counts)
            or not all(type(value) is float for value in (state.best_val_auroc, *sums))
            or state.history.keys() != {*HISTORY}
            or not all(len(curve) == state.epoch and set(map(type, curve)) <= {float} for curve in curves)
        ):
            raise ValueError("not the progress of a training")
        return state

    @property
    def loss(self) -> float:
        """Mean training loss of the current epoch."""
        return self.loss_sum / max(1, self.loss_count)

    @property
    def traces_per_s(self) -> float:
        """Training speed in the current epoch."""
        return self.loss_count / max(self.seconds, 1e-9)

    @property
    def data_wait_share(self) -> float:
        """Fraction of the training time of the current epoch spent waiting for data."""
        return self.waited_s / max(self.seconds, 1e-9)

    def end_epoch(self, val_loss: float, val_auroc: float) -> None:
        """Add the epoch to the history and begin the next one."""
        values = (self.loss, val_loss, val_auroc, self.traces_per_s, self.data_wait_share)
        for name, value in zip(HISTORY, values, strict=True):
            self.history[name].append(value)
        self.seconds_per_epoch.append(self.seconds)
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum, self.loss_count, self.seconds, self.waited_s = 0.0, 0, 0.0, 0.0
