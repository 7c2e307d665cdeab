"""Options of training: gradient accumulation, activation checkpointing, precision, TensorBoard."""

import csv
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.experiment.quiet import SMALL, train_quietly
from tests.helpers import command
from tests.machine import bounded
from tests.train.runs import FAST, ONLY, STEPS_OF, outcome, write_labeled
from tracestore.cli.commands.train import _selected_models, add_arguments
from tracestore.console import Parser
from tracestore.detectors import models
from tracestore.errors import UsageError
from tracestore.experiment import training_run
from tracestore.experiment.train_options import TrainOptions
from tracestore.train.config import TrainConfig
from tracestore.train.distributed import DistributedContext


@pytest.fixture
def train(labeled, tmp_path, monkeypatch):
    """Return a function that trains for two epochs and returns the outcome and the results."""
    monkeypatch.setattr(training_run, "write_report", lambda *_: None)

    def go(name, out, dropout=0.3, **options):
        config = TrainConfig(epochs=2, **options)
        results = train_quietly(labeled, tmp_path / out, [name], config, SMALL | {"dropout": dropout})
        return outcome(tmp_path / out), results

    return go


def weights(folder: Path):
    (path,) = folder.glob("*/last.pt")
    return torch.load(path, weights_only=True)["model"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["lstm_solo", "gnn_det_lstm"])
def test_accumulated_batches_equal_one_large_batch(train, tmp_path, monkeypatch, name):
    """44 traces: batches of 12, 12, 12 and 8, or batches of 4 with three per step."""
    monkeypatch.setattr(models, "GNN_DROPOUT", 0.0)
    monkeypatch.setattr(torch.nn, "ReLU", torch.nn.GELU)  # the rounding of a unit at zero decides on its gradient
    _, large = train(name, "large", dropout=0.0, batch_size=12)
    _, small = train(name, "small", dropout=0.0, batch_size=4, grad_accum_steps=3)
    a, b = weights(tmp_path / "large"), weights(tmp_path / "small")
    assert all(torch.allclose(a[k], b[k], rtol=1e-4, atol=1e-6) for k in a)
    losses = [r["models"][name]["history"]["train_loss"] for r in (large, small)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert small["config"]["grad_accum_steps"] == 3 and small["config"]["batch_size"] == 4


@pytest.mark.long
@pytest.mark.parametrize("name", ONLY)
def test_activation_checkpointing_changes_no_bit(train, name):
    """Dropout is active, so its masks are drawn a second time."""
    kept, _ = train(name, "kept", batch_size=16)
    again, results = train(name, "again", batch_size=16, activation_checkpointing=True)
    assert kept == again and results["config"]["activation_checkpointing"]


@pytest.mark.long
def test_bfloat16_computes_and_keeps_float32_weights(train, tmp_path):
    _, full = train("lstm_solo", "full", batch_size=16)
    _, half = train("lstm_solo", "half", batch_size=16, precision="bf16")
    losses = [r["models"]["lstm_solo"]["history"]["train_loss"] for r in (full, half)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)
    assert all(w.dtype == torch.float32 for w in weights(tmp_path / "half").values())
    assert half["config"]["precision"] == "bf16"


def test_half_precision_on_the_cpu_is_refused(labeled, tmp_path):
    flags = ["--store", labeled, "--output-dir", tmp_path / "r", *FAST, "--precision", "fp16", "--device", "cpu"]
    done = command("train", *flags, check=2)
    assert "bf16" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("options", [["--edge-features", "heads", "--standardize"], ["--layers", "0,2"]])
def test_heads_and_layers_in_training_planning_and_prediction(labeled, tmp_path, options):
    """All three commands accept the options, and refuse a store that lacks the weights or layers."""
    heads = write_labeled(tmp_path / "heads.zarr", "heads")
    more = [*FAST, *options, "--batch-size", 16]
    results = tmp_path / "r"
    run = ["--store", heads, "--output-dir", results, *more, "--epochs", 2, "--no-probe"]
    command("train", *run, check=0)
    command("train", *run, "--resume", check=0)
    for name in ONLY:
        scores = tmp_path / f"{name}.csv"
        command("predict", "--checkpoint", results / name / "best.pt", "--store", heads, "--output", scores, check=0)
        scored = {r["question_id"]: r["hallucination_score"] for r in csv.DictReader(scores.open())}
        tested = list(csv.DictReader((results / "predictions.csv").open()))
        assert {r["question_id"]: float(r[name]) for r in tested} == pytest.approx(
            {r["question_id"]: float(scored[r["question_id"]]) for r in tested}, abs=1e-5
        )
    command("plan", heads, *more, check=0)
    # lstm_solo reads no edges, so it accepts the other store.
    checkpoint = results / "lstm_solo/best.pt"
    command("predict", "--checkpoint", checkpoint, "--store", labeled, "--output", scores, "--overwrite", check=0)
    bad = ["0,3" if value == "0,2" else value for value in more]
    kept = (results / "gnn_det_lstm/best.pt").read_bytes()
    for done in (
        command("train", "--store", labeled, "--output-dir", results, *bad, check=2),
        command("plan", labeled, *bad, check=2),
    ):
        assert (results / "gnn_det_lstm/best.pt").read_bytes() == kept
        assert done.stderr.count("\n") == 1 and ("--attention heads" in done.stderr or "some of 0 to 2" in done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("logger", STEPS_OF)
def test_a_logger_shows_each_step_once_after_kills(logger, driver, labeled, tmp_path):
    pytest.importorskip(logger)
    flags = ["--store", labeled, *FAST, *ONLY["lstm_solo"], "--no-probe", "--epochs", 6, "--batch-size", 4]
    found = driver("killed_at_random", [*flags, "--logger", logger], tmp_path, 2, 3)
    for attempt in range(found["compared"]):
        steps = STEPS_OF[logger](tmp_path / f"cut{attempt}/lstm_solo/events")
        assert steps["loss/step"] == list(range(66))
        assert steps["epoch/val_auroc"] == [11, 22, 33, 44, 55, 66]


@pytest.mark.parametrize("logger", STEPS_OF)
def test_a_logger_that_is_not_installed_is_reported(logger, train, monkeypatch):
    monkeypatch.setitem(sys.modules, logger, None)
    with pytest.raises(UsageError, match=rf"tracestore\[{logger}\]"):
        train("lstm_solo", "r", logger=logger)


@pytest.mark.long
def test_malicious_checkpoints_are_refused(labeled, tmp_path):
    """Impossible sizes, compression, FIFOs and tensors without data are refused with one line, at once."""
    command(
        "train", "--store", labeled, "--output-dir", tmp_path / "r", *FAST, *ONLY["lstm_solo"], "--epochs", 1, check=0
    )
    best = tmp_path / "r/lstm_solo/best.pt"
    saved = torch.load(best, weights_only=True)
    bad = {}
    for name, value in (
        ("lstm_hidden", 1 << 40),
        ("num_lstm_layers", 10**9),
        ("num_layers", 10**12),
        ("hidden_dim", -1),
    ):
        bad[name] = {**saved, "model_config": {**saved["model_config"], name: value}}
    weight = next(iter(saved["model"]))
    huge = torch.zeros(1).expand(1 << 40)
    bad["a tensor without its values"] = {**saved, "model": {**saved["model"], weight: huge}}
    paths = []
    for k, value in enumerate(bad.values()):
        paths.append(tmp_path / f"{k}.pt")
        torch.save(value, paths[-1])
    paths.append(tmp_path / "bomb.pt")
    with zipfile.ZipFile(best) as archive, zipfile.ZipFile(paths[-1], "w", zipfile.ZIP_DEFLATED) as bomb:
        for entry in archive.infolist():
            bomb.writestr(entry.filename, bytes(1 << 27) if entry.filename.endswith("/data/0") else archive.read(entry))
    paths.append(tmp_path / "fifo.pt")
    os.mkfifo(paths[-1])
    for path in paths:
        with bounded():
            done = command("predict", "--checkpoint", path, "--store", labeled, "--output", tmp_path / "p.csv")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, (path, done.stderr)
    for path in (tmp_path / "r/results.json", tmp_path / "r/split.json"):
        path.unlink()
        os.mkfifo(path)
    command("compare", tmp_path / "r", tmp_path, check=2)
    again = ["--store", labeled, "--output-dir", tmp_path / "r", *FAST, *ONLY["lstm_solo"], "--epochs", 2, "--resume"]
    assert "not a regular file" in command("train", *again, check=2).stderr


def test_batch_normalization_with_several_ranks_is_refused(labeled, tmp_path):
    ranks = DistributedContext(alone=True)
    ranks.world_size = 2
    options = TrainOptions(("gnn_det_lstm",), TrainConfig(epochs=1), SMALL | {"normalization": "batch"})
    with pytest.raises(UsageError, match="one process"):
        training_run.run_experiment(labeled, tmp_path / "r", options, ranks=ranks)


def selected(*flags):
    parser = Parser()
    add_arguments(parser)
    return _selected_models(parser.parse_args(["https://example.org/s.zarr", *flags]))


@pytest.mark.parametrize(
    ("flags", "models"),
    [
        ("", "lstm_solo gnn_det_lstm gvae_lstm"),
        ("--run-lstm --run-gvae", "lstm_solo gnn_det_lstm gvae_lstm"),
        ("--no-run-gnn-det", "lstm_solo gvae_lstm"),
        ("--no-run-lstm --no-run-gvae", "gnn_det_lstm"),
        ("--twins", "lstm_solo gnn_det_lstm gnn_det_lstm_no_edges gvae_lstm gvae_lstm_no_edges"),
        ("--twins --no-run-gnn-det", "lstm_solo gvae_lstm gvae_lstm_no_edges"),
        ("--models gvae_lstm,lstm_solo", "lstm_solo gvae_lstm"),
        ("--models gvae_lstm_v0", "gvae_lstm_v0"),
        ("--models gnn_det_lstm_v0,gnn_det_lstm --twins", "gnn_det_lstm gnn_det_lstm_no_edges gnn_det_lstm_v0"),
        ("--models gvae_lstm_no_edges", "gvae_lstm_no_edges"),
    ],
)
def test_models_are_those_of_the_flags(flags, models):
    assert selected(*flags.split()) == tuple(models.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--models lstm_solo,gnn", "found 'gnn', expected names of lstm_solo, "),
        ("--models lstm_solo --run-gvae", "found --models and a switch of a model"),
        ("--models lstm_solo --twins", "--twins needs a model that has a twin, found lstm_solo"),
        ("--no-run-gnn-det --no-run-gvae --twins", "--twins needs a model that has a twin, found lstm_solo"),
        ("--no-run-gnn-det --no-run-gvae --no-run-lstm", "every model is switched off"),
    ],
)
def test_contradictory_models_are_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        selected(*flags.split())
