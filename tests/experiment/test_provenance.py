"""Provenance of the store in `tracestore train`, `predict` and `compare`."""

import json

import pytest
import torch

import tracestore
from tests.helpers import command, error_of, make_trace
from tests.train.runs import FAST, ONLY, write_labeled
from tracestore.store.write.create import create

FLAG = "--allow-mixed-provenance"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train on stores with equal traces of two models; return the folder of stores and runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in "ab":
        store = write_labeled(folder / f"{name}.zarr", provenance={"model": name, "layer_ids": [1, 2, 3]})
        train(store, folder / name)
    command("merge", folder / "a.zarr", folder / "mixed.zarr", check=0)
    with create(folder / "mixed.zarr", append=True, provenance={"model": "b"}, allow_mixed_provenance=True) as writer:
        writer.append(make_trace(70, tokens=3), score=0.9)
    return folder


def words(store, out, *args):
    flags = [*FAST, *ONLY["lstm_solo"], "--no-probe", "--epochs", 1]
    return ["train", "--store", store, "--output-dir", out, *flags, *args]


def train(store, out, *args):
    return command(*words(store, out, *args), check=0)


@pytest.mark.long
def test_results_and_checkpoints_hold_the_provenance(runs):
    with tracestore.open(runs / "a.zarr") as store:
        expected = [store.provenance[0].to_json()]
    assert json.loads((runs / "a/results.json").read_text())["store"]["provenance"] == expected
    assert torch.load(runs / "a/lstm_solo/best.pt", weights_only=True)["store"]["provenance"] == expected
    assert torch.load(runs / "a/lstm_solo/last.pt", weights_only=True)["provenance"] == expected


@pytest.mark.long
def test_predict_refuses_a_store_of_another_model(runs, tmp_path):
    predict = ["predict", "--checkpoint", runs / "a/lstm_solo/best.pt", "--output", tmp_path / "s.csv", "--store"]
    command(*predict, runs / "a.zarr", check=0)
    (tmp_path / "s.csv").unlink()
    for name in ("b", "mixed"):
        message = error_of(*predict, runs / f"{name}.zarr", code=2)
        assert f"{name}.zarr: other provenance: model: found b, expected a" in message and FLAG in message
        assert not (tmp_path / "s.csv").exists()
    command(*predict, runs / "b.zarr", FLAG, check=0)


def test_an_invalid_provenance_in_a_checkpoint_is_one_line(runs, tmp_path):
    saved = torch.load(runs / "a/lstm_solo/best.pt", weights_only=True)
    saved["store"]["provenance"] = [{"model": 1}]
    torch.save(saved, tmp_path / "best.pt")
    command_words = ("predict", "--checkpoint", tmp_path / "best.pt", "--store", runs / "a.zarr")
    assert "not a complete detector" in error_of(*command_words, code=2)
    saved = torch.load(runs / "a/lstm_solo/last.pt", weights_only=True)
    for bad in ([{"model": 1}], 3):
        (tmp_path / "run/lstm_solo").mkdir(parents=True, exist_ok=True)
        torch.save(saved | {"provenance": bad}, tmp_path / "run/lstm_solo/last.pt")
        (tmp_path / "run/split.json").write_text((runs / "a/split.json").read_text())
        assert "last.pt" in error_of(*words(runs / "a.zarr", tmp_path / "run", "--resume"), code=2)


def test_training_refuses_a_mixed_store(runs, tmp_path):
    message = error_of(*words(runs / "mixed.zarr", tmp_path / "r"), code=2)
    assert "mixed.zarr: other provenance: model: found b, expected a" in message and not (tmp_path / "r").exists()
    train(runs / "mixed.zarr", tmp_path / "r", FLAG)
    # A store with provenances that the detector was trained on needs no permission.
    output = ("--output", tmp_path / "s.csv")
    checkpoint = tmp_path / "r/lstm_solo/best.pt"
    command("predict", "--checkpoint", checkpoint, "--store", runs / "mixed.zarr", *output, check=0)


def test_resuming_refuses_a_store_of_another_model(runs):
    message = error_of(*words(runs / "b.zarr", runs / "a", "--resume"), code=2)
    assert "last.pt is of another store: other provenance: model: found b, expected a" in message
    train(runs / "b.zarr", runs / "a", "--resume", FLAG)
    train(runs / "a.zarr", runs / "a", "--resume", FLAG)


def test_compare_refuses_runs_of_several_models(runs):
    message = error_of("compare", runs / "a", runs / "b", code=2)
    assert f"{runs / 'b'}: other provenance: model: found b, expected a" in message and FLAG in message
    command("compare", runs / "a", runs / "b", FLAG, check=0)
