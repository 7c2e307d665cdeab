"""Report the progress of a run: log lines, a progress line, and numbers for TensorBoard, Weights & Biases or MLflow."""

import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from tracestore import console
from tracestore.errors import TracestoreWarning, UsageError, escape_unprintable
from tracestore.platform_support import memory_use
from tracestore.store.io.fsio import read_json
from tracestore.train.config import TrainState
from tracestore.train.output_dir import write_json

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


# MLflow accepts so many numbers in a request.
_MAX_POINTS = 1000
# A key, a value and a step.
Point = tuple[str, float, int]


class _TrackedRun(ABC):
    """A run whose numbers are sent at each checkpoint, each once also if the training is killed and resumes.

    Parameters
    ----------
    folder : Path
        Folder of the training of one detector. Its path is the name of the run.
    options : mapping
        Options of the training.
    is_new : bool
        Start a new run, whatever an earlier training has left in the folder.
    """

    #: The name of the service, as ``--logger`` takes it. Each service knows the ids of its own runs only.
    logger: ClassVar[str]

    def __init__(self, folder: Path, options: Mapping[str, Any], *, is_new: bool) -> None:
        self.file = folder / "events" / f"run-{self.logger}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._points: list[Point] = []
        try:
            known = {} if is_new or not self.file.exists() else read_json(self.file)
            self._sent: dict[str, int] = dict(known.get("sent", {}))
            self._id = self._start(known.get("id"), str(folder), options)
        except Exception as error:
            raise UsageError(f"--logger: {escape_unprintable(str(error) or type(error).__name__, 300)}") from error

    def add_scalar(self, key: str, value: float, step: int) -> None:
        """Keep a number for the next flush, unless it was sent before the training resumed."""
        if step > self._sent.get(key, -1):
            self._sent[key] = step
            self._points.append((key, value, step))

    def flush(self) -> None:
        """Send the numbers. If that fails, warn and keep them for the next time."""
        try:
            self._send(self._points)
        except Exception as error:
            text = f"--logger: {escape_unprintable(str(error), 300)}; the numbers are sent with the next ones"
            warnings.warn(text, TracestoreWarning, stacklevel=2)
            return
        self._points.clear()
        write_json(self.file, {"id": self._id, "sent": self._sent})

    def close(self) -> None:
        """Send the last numbers, and end the run."""
        self.flush()
        self._end()

    @abstractmethod
    def _start(self, run_id: str | None, name: str, options: Mapping[str, Any]) -> str:
        """Continue a run or start a new one, and return its id."""

    @abstractmethod
    def _send(self, points: Sequence[Point]) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


class WandbRun(_TrackedRun):
    """A run of Weights & Biases. Its environment variables choose project and mode."""

    logger = "wandb"

    def _start(self, run_id: str | None, name: str, options: Mapping[str, Any]) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run = wandb.init(
            dir=str(self.file.parent),
            project=os.environ.get("WANDB_PROJECT", "tracestore"),
            name=name,
            id=run_id,
            resume="allow",
            config=dict(options),
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True),
        )
        return str(self._run.id)

    def _send(self, points: Sequence[Point]) -> None:
        for key, value, step in points:
            self._run.log({key: value}, step=step)

    def _end(self) -> None:
        self._run.finish()


class MlflowRun(_TrackedRun):
    """A run of MLflow, on the server of MLFLOW_TRACKING_URI or else in the folder ``mlruns`` next to the events."""

    logger = "mlflow"

    def _start(self, run_id: str | None, name: str, options: Mapping[str, Any]) -> str:
        # MLflow counts its uses on a server of its own, and refuses folders, unless it is told otherwise.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder = (self.file.parent / "mlruns").absolute()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or folder.as_uri())
        if run_id is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tracestore")
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            run_id = str(self._client.create_run(number, run_name=name).info.run_id)
            self._client.log_batch(run_id, params=[Param(key, str(value)) for key, value in options.items()])
        return run_id

    def _send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for k in range(0, len(points), _MAX_POINTS):
            metrics = [Metric(key, value, now, step) for key, value, step in points[k : k + _MAX_POINTS]]
            self._client.log_batch(self._id, metrics=metrics)

    def _end(self) -> None:
        self._client.set_terminated(self._id)
