"""The configuration of a training run and its state."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tracestore.console import float_where, int_between, option
from tracestore.data.order import Shuffle
from tracestore.detectors.layers.model_config import Precision
from tracestore.store.format.labels import THRESHOLD_HELP
from tracestore.store.format.provenance import ALLOW_HELP

HISTORY = ("train_loss", "val_loss", "val_auroc", "traces_per_s", "data_wait_share")
# Keys of last.pt that differ from the names of the fields.
_CHECKPOINT_KEYS = {"grad_accum_steps": "accumulate"}


@dataclass(frozen=True)
class StepOptions:
    """Options that change the cost of a step, which ``tracestore plan`` has too."""

    batch_size: int = option(16, "traces in a step")
    precision: Precision = option("float32", "fp16 needs a GPU")
    activation_checkpointing: bool = option(
        False, "less memory: compute activations a second time in backward", is_resumable=True
    )
    max_cache_batches: int = option(2, "decoded batches to keep of a compressed store", is_resumable=True)
    attention_threshold: float = option(0.0, "edges are pairs with attention above this")
    top_k: float | None = option(
        None,
        "keep this fraction of the pairs of each layer, those with the largest attention "
        "(default: all above --attention-threshold)",
        type=float_where(lambda f: 0 < f <= 1, "a fraction above 0 and at most 1"),
        metavar="FRACTION",
    )


@dataclass(frozen=True)
class TrainConfig(StepOptions):
    """Training options of a detector. The fields are named like the flags of ``tracestore train``."""

    epochs: int = option(50, "passes over the training split", is_resumable=True)
    lr: float = option(0.001, "learning rate of Adam", type=float_where(lambda r: 0 < r < math.inf, "a number above 0"))
    seed: int = option(
        42, "seed of split, folds and weights", type=int_between(0, 2**32 - 1, "a whole number from 0 to 2^32 - 1")
    )
    grad_accum_steps: int = option(1, "batches per optimizer step; equals one batch of N times the size")
    shuffle: Shuffle = option("global", "order of the traces in an epoch")
    shuffle_buffer: int = option(1000, "traces in the window of --shuffle buffer", metavar="TRACES")
    score: str | None = option(None, "named score that labels are derived from (default: the store's)", metavar="NAME")
    score_threshold: float | None = option(None, THRESHOLD_HELP, metavar="T")
    drop_nonfinite: bool = option(False, "leave out traces with NaN or infinite values, and list them")
    checkpoint_interval_s: float = option(
        300.0,
        "write last.pt this often within an epoch, and after each (default: 300; 0: after every step)",
        is_resumable=True,
        type=float_where(lambda s: 0 <= s < math.inf, "seconds, at least 0"),
        metavar="SECONDS",
    )
    logger: Literal["tensorboard", "wandb", "mlflow"] | None = option(
        None,
        "write the metrics of steps and epochs for this library, too, below OUTPUT/<model>/events (default: none)",
        is_resumable=True,
    )
    allow_mixed_provenance: bool = option(False, ALLOW_HELP, is_resumable=True)
    device: str = option("cpu", None, is_resumable=True)
    num_workers: int = option(0, None, is_resumable=True)
    loader_threads: int = option(2, None, is_resumable=True)
    resume: bool = option(False, None, is_resumable=True)

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
