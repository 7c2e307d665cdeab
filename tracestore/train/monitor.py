"""Report the progress of a run: log lines, a progress line, and numbers for TensorBoard, Weights & Biases or MLflow."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tracestore import console
from tracestore.platform_support import memory_use
from tracestore.train.config import TrainState
from tracestore.train.trackers import MlflowRun, WandbRun

Log = Callable[[str], None]


class Monitor:
    """Reports one detector's run to the log, the progress line and a logger, which counts in batches.

    A resumed run begins at the position of its checkpoint. TensorBoard drops the events that the killed run
    wrote after it; the other loggers are sent nothing twice.
    """

    def __init__(self, name: str, epochs: int, log: Log, line: console.Progress | None) -> None:
        self.name, self.epochs, self._log, self._line = name, epochs, log, line
        self._events: Any = None

    def open_logger(
        self, logger: str, folder: Path, options: Mapping[str, Any], state: TrainState, num_batches: int
    ) -> None:
        """Write numbers below the folder of the run from now on. UsageError if the logger cannot start."""
        step = state.epoch * num_batches + state.batch
        if logger == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / "events"), purge_step=step)
        else:
            self._events = {"wandb": WandbRun, "mlflow": MlflowRun}[logger](folder, options, is_new=step == 0)
        if state.batch == 0:
            self._add_epoch(state, num_batches)

    def flush(self) -> None:
        """Write all events, before a checkpoint: a resumed run does not write them again."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Remove the progress line and close the events."""
        if self._line is not None:
            self._line.clear()
        if self._events is not None:
            self._events.close()

    def log(self, text: str) -> None:
        """Log one line."""
        if self._line is not None:
            self._line.clear()
        self._log(f"{self.name}: {text}")

    def step(self, state: TrainState, num_batches: int, loss: float) -> None:
        """Report a step of the optimizer."""
        if self._line is not None:
            self._line.update(
                state.epoch * num_batches + state.batch,
                self.epochs * num_batches,
                lambda: (
                    f"{self.name} epoch {state.epoch + 1}/{self.epochs}: loss {state.loss:.4f}, "
                    f"{_speed(state.traces_per_s, state.data_wait_share)}"
                ),
            )
        if self._events is not None:
            number = state.epoch * num_batches + state.batch - 1
            self._events.add_scalar("loss/step", loss, number)
            for kind, mib in _memory_mib().items():
                self._events.add_scalar(f"memory/{kind}_mib", mib, number)

    def out_of_memory(self, event: dict[str, Any]) -> None:
        """Log an event of the guard."""
        self.log(
            f"out of memory in {event['phase']} of epoch {event['epoch'] + 1}, step {event['step']}: "
            f"micro-batch {event['size_before']} -> {event['size_after']}"
        )

    def epoch(self, state: TrainState, num_batches: int) -> None:
        """Report an epoch after its validation."""
        latest = {name: values[-1] for name, values in state.history.items()}
        if self._line is not None:
            self._line.clear()
        self._log(
            f"{self.name} epoch {state.epoch}/{self.epochs}: loss {latest['train_loss']:.4f}, "
            f"val loss {latest['val_loss']:.4f}, val AUROC {latest['val_auroc']:.3f}, "
            f"{_speed(latest['traces_per_s'], latest['data_wait_share'])}"
        )
        self._add_epoch(state, num_batches)

    def _add_epoch(self, state: TrainState, num_batches: int) -> None:
        if self._events is not None:
            for name, values in state.history.items():
                if values:
                    self._events.add_scalar(f"epoch/{name}", values[-1], state.epoch * num_batches)


def _memory_mib() -> dict[str, float]:
    """Return the memory of this process in MiB, and the peak of tensors on the GPU.

    The system may reclaim the pages of files, for example of the store, at any time.
    """
    use = memory_use()
    found = {"anonymous": use.anonymous / 2**20, "file": use.file / 2**20}
    if torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def _speed(traces_per_s: float, data_wait_share: float) -> str:
    mib = _memory_mib()
    gpu = f", GPU {mib['gpu']:,.0f} MiB" if "gpu" in mib else ""
    return (
        f"{traces_per_s:,.0f} traces/s, data wait {data_wait_share:.0%}, RSS {mib['anonymous']:,.0f} MiB, "
        f"page cache {mib['file']:,.0f} MiB{gpu}"
    )
