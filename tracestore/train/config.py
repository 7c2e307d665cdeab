"""How a detector is trained, and how far a run has come."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

HISTORY = ("train_loss", "val_loss", "val_auroc", "traces_per_s", "data_wait_share")
# What may differ between a run and its continuation: none of it changes the mathematics.
_FREE = (
    "epochs",
    "resume",
    "num_workers",
    "loader_threads",
    "max_cache_batches",
    "device",
    "activation_checkpointing",
    "checkpoint_interval_s",
    "tensorboard",
)
# Names of fields in last.pt where they differ.
_CHECKPOINT_KEYS = {"grad_accum_steps": "accumulate"}


@dataclass(frozen=True)
class TrainConfig:
    """How a detector is trained; the names are tracestore train's flags."""

    epochs: int = 50
    batch_size: int = 16
    grad_accum_steps: int = 1
    lr: float = 0.001
    seed: int = 42
    device: str = "cpu"
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    activation_checkpointing: bool = False
    shuffle: Literal["global", "buffer", "block", "none"] = "global"
    shuffle_buffer: int = 1000
    score_threshold: float = 0.5
    attention_threshold: float = 0.0
    top_k: float | None = None
    max_cache_batches: int = 2
    num_workers: int = 0
    loader_threads: int = 2
    checkpoint_interval_s: float = 300.0
    tensorboard: bool = False
    resume: bool = False

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one it continues."""
        return {_CHECKPOINT_KEYS.get(name, name): value for name, value in asdict(self).items() if name not in _FREE}


@dataclass
class Progress:
    """What a run has come to; everything a resumed run needs beside weights.

    `epoch` and `batch`: the next batch; batch may be the number of batches of the epoch,
    whose validation is then what comes next.
    """

    epoch: int = 0
    batch: int = 0
    history: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in HISTORY})
    seconds_per_epoch: list[float] = field(default_factory=list)
    best_val_auroc: float = -math.inf
    best_epoch: int = -1
    # Of the epoch that has begun:
    loss_sum: float = 0.0
    loss_count: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    @property
    def loss(self) -> float:
        """Mean training loss of the epoch so far."""
        return self.loss_sum / max(1, self.loss_count)

    @property
    def traces_per_s(self) -> float:
        return self.loss_count / max(self.seconds, 1e-9)

    @property
    def data_wait_share(self) -> float:
        return self.waited_s / max(self.seconds, 1e-9)

    def end_epoch(self, val_loss: float, val_auroc: float) -> None:
        """Writes the epoch down and begins the next one."""
        now = (self.loss, val_loss, val_auroc, self.traces_per_s, self.data_wait_share)
        for name, value in zip(HISTORY, now, strict=True):
            self.history[name].append(value)
        self.seconds_per_epoch.append(self.seconds)
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum, self.loss_count, self.seconds, self.waited_s = 0.0, 0, 0.0, 0.0
