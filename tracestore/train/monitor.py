"""What a person sees of a run: log lines, a progress line, TensorBoard."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tracestore import console
from tracestore.extras import needs
from tracestore.oom.limits import memory_use
from tracestore.train.config import Progress

Log = Callable[[str], None]


def check_tensorboard() -> None:
    """MissingExtraError where its package is missing."""
    with needs("tensorboard"):
        importlib.import_module("tensorboard")


class Monitor:
    """One detector's log, its line on a terminal and its events for TensorBoard.

    Events are counted in batches. A resumed run begins where its checkpoint stands:
    TensorBoard drops what the killed run wrote from there on."""

    def __init__(self, name: str, epochs: int, log: Log, line: console.Progress | None) -> None:
        self.name, self.epochs, self.log, self._line = name, epochs, log, line
        self._events: Any = None

    def open_events(self, folder: Path, progress: Progress, num_batches: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder), purge_step=progress.epoch * num_batches + progress.batch)
        if progress.batch == 0:
            self._add_epoch(progress, num_batches)

    def flush(self) -> None:
        """Before a checkpoint: what it has behind it is not written again."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        if self._line is not None:
            self._line.clear()
        if self._events is not None:
            self._events.close()

    def say(self, text: str) -> None:
        if self._line is not None:
            self._line.clear()
        self.log(f"{self.name}: {text}")

    def step(self, progress: Progress, num_batches: int, loss: float) -> None:
        """After each step of the optimizer."""
        if self._line is not None:
            self._line.update(
                lambda _: (
                    f"{self.name} epoch {progress.epoch + 1}/{self.epochs}, batch {progress.batch}/{num_batches}: "
                    f"loss {progress.loss:.4f}, {_speed(progress.traces_per_s, progress.data_wait_share)}"
                )
            )
        if self._events is not None:
            number = progress.epoch * num_batches + progress.batch - 1
            self._events.add_scalar("loss/step", loss, number)
            for kind, mib in _memory_mib().items():
                self._events.add_scalar(f"memory/{kind}_mib", mib, number)

    def epoch(self, progress: Progress, num_batches: int) -> None:
        """After each epoch and its validation."""
        h = {name: values[-1] for name, values in progress.history.items()}
        if self._line is not None:
            self._line.clear()
        self.log(
            f"{self.name} epoch {progress.epoch}/{self.epochs}: loss {h['train_loss']:.4f}, "
            f"val loss {h['val_loss']:.4f}, val AUROC {h['val_auroc']:.3f}, "
            f"{_speed(h['traces_per_s'], h['data_wait_share'])}"
        )
        self._add_epoch(progress, num_batches)

    def _add_epoch(self, progress: Progress, num_batches: int) -> None:
        if self._events is not None:
            for name, values in progress.history.items():
                if values:
                    self._events.add_scalar(f"epoch/{name}", values[-1], progress.epoch * num_batches)


def _memory_mib() -> dict[str, float]:
    """The process's own memory; apart from it pages of files, the store's among them, which the
    system may take back at any time; the most that tensors have taken of a GPU."""
    use = memory_use()
    found = {"anonymous": use.anonymous / 2**20, "file": use.file / 2**20}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def _speed(traces_per_s: float, data_wait_share: float) -> str:
    mib = _memory_mib()
    gpu = f", of the GPU {mib['gpu']:,.0f} MiB" if "gpu" in mib else ""
    return (
        f"{traces_per_s:,.0f} traces/s, waiting for data {data_wait_share:.0%}, memory {mib['anonymous']:,.0f} MiB "
        f"and {mib['file']:,.0f} MiB of files{gpu}"
    )
