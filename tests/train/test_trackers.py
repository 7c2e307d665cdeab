"""Numbers of a training for Weights & Biases and MLflow: each is sent once, whatever the service does."""

import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import command
from tests.machine import wait_until
from tests.train.runs import FAST, STEPS_OF
from tracestore.errors import TracestoreWarning, UsageError
from tracestore.experiment import training_run
from tracestore.train import monitor
from tracestore.train.monitor import MlflowRun, WandbRun, _TrackedRun

RUNS = {"wandb": WandbRun, "mlflow": MlflowRun}


class Service(_TrackedRun):
    """A service that keeps the numbers, and fails on demand."""

    logger = "service"
    received = None
    fails = False

    def _start(self, run_id, name, options):
        return run_id or "id"

    def _send(self, points):
        if self.fails:
            raise ConnectionError("no route to host")
        self.received.extend(points)

    def _end(self):
        pass


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6), st.booleans()), max_size=8))
def test_every_step_is_sent_once_whenever_a_training_is_killed_and_resumes(tmp_path_factory, parts):
    """Each part goes back by some steps, as a resumed training does, runs, and ends with or without a checkpoint."""
    folder, received, saved = tmp_path_factory.mktemp("run"), [], 0
    for k, (back, count, has_checkpoint) in enumerate([*parts, (0, 3, True)]):
        run = Service(folder, {}, is_new=k == 0)
        run.received = received
        first = max(0, saved - back) if has_checkpoint else saved
        for step in range(first, saved + count):
            run.add_scalar("loss", step / 2, step)
        if has_checkpoint:
            run.flush()
            saved += count
    assert received == [("loss", step / 2, step) for step in range(saved)]


def test_numbers_that_a_service_refuses_are_sent_later(tmp_path):
    run = Service(tmp_path, {}, is_new=True)
    run.received, run.fails = [], True
    run.add_scalar("loss", 1.0, 0)
    with pytest.warns(TracestoreWarning, match=r"--logger: no route to host; .* sent with the next ones"):
        run.flush()
    run.fails = False
    run.add_scalar("loss", 2.0, 1)
    run.close()
    assert run.received == [("loss", 1.0, 0), ("loss", 2.0, 1)]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sent": 3}', b"\xff"])
def test_a_damaged_file_of_a_run_is_refused(tmp_path, content):
    Service(tmp_path, {}, is_new=True).file.write_bytes(content)
    with pytest.raises(UsageError, match=r"--logger: "):
        Service(tmp_path, {}, is_new=False)


@pytest.mark.long
@pytest.mark.parametrize("logger", RUNS)
def test_a_run_continues_after_a_kill(logger, tmp_path, monkeypatch):
    pytest.importorskip(logger)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for first in (0, 2):
        run = RUNS[logger](tmp_path, {"lr": 0.1, "layers": None, "epochs": first}, is_new=first == 0)
        for step in range(first, first + 4):
            run.add_scalar("loss/step", 0.5, step)
            run.add_scalar("memory/file_mib", 1.0, step)
        run.flush()
        if logger == "wandb":
            run.close()  # in one process, the service would continue the same run
    expected = {key: list(range(6)) for key in ("loss/step", "memory/file_mib")}
    # The process of wandb writes the end of its file after finish() has returned.
    wait_until(lambda: STEPS_OF[logger](tmp_path / "events") == expected)


@pytest.mark.parametrize(
    "trainings",
    [
        ["--epochs 2 --logger wandb", "--seed 7 --overwrite", "--seed 7 --epochs 2 --resume --logger wandb"],
        ["--epochs 2 --logger mlflow", "--seed 7 --overwrite", "--seed 7 --epochs 2 --resume --logger mlflow"],
        ["--logger wandb", "--epochs 2 --resume --logger mlflow", "--epochs 3 --resume --logger wandb"],
        ["--logger mlflow", "--epochs 2 --resume", "--epochs 3 --resume --logger mlflow"],
        ["--seeds 2 --logger wandb", "--seeds 2 --overwrite", "--seeds 2 --epochs 2 --resume --logger wandb"],
    ],
)
@pytest.mark.long
def test_each_service_gets_all_numbers_of_the_trainings_that_name_it(trainings, labeled, tmp_path, monkeypatch):
    runs, expected = defaultdict(list), []

    class Fake(Service):
        def _start(self, run_id, name, options):
            run_id = run_id or f"{self.logger}{len(runs)}"
            self.received = runs[run_id]
            if run_id not in runs or not run_id.startswith(self.logger):
                raise KeyError(run_id)
            return run_id

    monkeypatch.setattr(training_run, "require", lambda extra: None)
    for name, base in (("wandb", "WandbRun"), ("mlflow", "MlflowRun")):
        monkeypatch.setattr(monitor, base, type(base, (Fake,), {"logger": name}))
    trained = 0
    for line in trainings:
        words = line.split()
        epochs = int(words[words.index("--epochs") + 1]) if "--epochs" in words else 1
        flags = [] if "--epochs" in words else ["--epochs", 1]
        more = ["--models", "lstm_solo", "--no-probe", *flags, *FAST]
        command("train", labeled, "--output", tmp_path / "r", *words, *more, check=0)
        begin = trained if "--resume" in words else 0
        trained = epochs
        if "--logger" in words:
            num_seeds = 1 + ("--seeds" in words)
            expected += [(words[-1], step) for step in range(begin * 3, epochs * 3)] * num_seeds
    found = [(k.rstrip("0123456789"), step) for k, r in runs.items() for key, _, step in r if key == "loss/step"]
    assert sorted(found) == sorted(expected)


@pytest.mark.long
@pytest.mark.parametrize("logger", RUNS)
def test_training_writes_for_a_logger(logger, labeled, tmp_path, monkeypatch):
    pytest.importorskip(logger)
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["--models", "lstm_solo", "--no-probe", "--epochs", 2, "--logger", logger, *FAST]
    command("train", labeled, "--output", tmp_path / "r", *words, check=0)
    steps = STEPS_OF[logger](tmp_path / "r/lstm_solo/events")
    assert steps["epoch/val_auroc"] and steps["loss/step"] == list(range(len(steps["loss/step"])))
    assert json.loads((tmp_path / f"r/lstm_solo/events/run-{logger}.json").read_text())["id"]
