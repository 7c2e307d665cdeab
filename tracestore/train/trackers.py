"""Runs of Weights & Biases and MLflow, with the methods of TensorBoard's SummaryWriter that a training uses."""

import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tracestore.errors import TracestoreWarning, UsageError, escape_unprintable
from tracestore.store.io.fsio import read_json
from tracestore.train.output_dir import write_json

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
