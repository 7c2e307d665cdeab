"""The loss of a step is read after the next step was submitted, and before anything is saved."""

import numpy as np
import pytest
import torch

import tracestore
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.errors import TrainingError
from tracestore.evaluation.store_split import Split
from tracestore.train import trainer as module
from tracestore.train.checkpoint import load_checkpoint
from tracestore.train.config import TrainConfig, TrainState
from tracestore.train.trainer import Trainer

SIZE = 8


@pytest.fixture
def make(labeled, tmp_path):
    def go(**options):
        store = tracestore.open(labeled)
        indices = np.arange(48)
        config = TrainConfig(batch_size=SIZE, loader_threads=1, shuffle="none", **options)
        split = Split(dict.fromkeys(("train", "val", "test"), indices), {})
        sizes = ModelConfig.from_store(store, lstm_hidden=4)
        run = Trainer("lstm_solo", store, split, np.arange(64) % 2, sizes, config, tmp_path / "m", lambda _: None)
        (tmp_path / "m").mkdir()
        run._setup()
        return run

    return go


def spoil(run, step):
    """Let the loss of one step be NaN."""
    count, step_loss = iter(range(100)), run.runner.step_loss
    run.runner.step_loss = lambda *a: step_loss(*a) * (torch.nan if next(count) == step else 1)


@pytest.mark.parametrize("step", [0, 2, 5])
@pytest.mark.parametrize("interval", [0.0, 1e9])
def test_a_loss_that_is_not_finite_names_its_traces_and_is_never_saved(make, tmp_path, step, interval):
    run = make(checkpoint_interval_s=interval)
    spoil(run, step)
    with pytest.raises(TrainingError, match=f"the loss is nan: questions of the step: q{step * SIZE}, "):
        run._train_epoch(TrainState())
    path = tmp_path / "m" / "last.pt"
    assert path.exists() == (interval == 0 and step > 0)
    if path.exists():
        saved = load_checkpoint(path)
        assert saved["progress"]["batch"] == step and all(value.isfinite().all() for value in saved["model"].values())


def test_each_checkpoint_has_the_losses_of_all_its_steps(make, monkeypatch):
    run, saved, reported = make(checkpoint_interval_s=0.0), [], []
    monkeypatch.setattr(module, "save_checkpoint", lambda _, state: saved.append(state["progress"]))
    monkeypatch.setattr(run.monitor, "step", lambda state, *_: reported.append(state.batch))
    run._train_epoch(TrainState())
    assert [(s["batch"], s["loss_count"]) for s in saved] == [(k, k * SIZE) for k in range(1, 7)]
    assert reported == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_losses_do_not_depend_on_when_they_are_read(make, tmp_path):
    states = []
    for interval in (0.0, 1e9):
        run = make(checkpoint_interval_s=interval)
        states.append(state := TrainState())
        run._train_epoch(state)
        for path in (tmp_path / "m").iterdir():
            path.unlink()
        (tmp_path / "m").rmdir()
    assert states[0].loss_sum == states[1].loss_sum and states[0].loss_count == states[1].loss_count == 48
