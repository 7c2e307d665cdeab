"""Runs with folds and seeds: their files and metrics, and that no information leaks between splits."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

import tracestore
from tests.conftest import NUM_RESAMPLES
from tests.experiment.quiet import SMALL, train_quietly
from tests.helpers import make_traces, run_cli, write_store
from tracestore.detectors.layers.model_config import ModelConfig
from tracestore.detectors.registry import DEFAULT_MODELS
from tracestore.errors import UsageError
from tracestore.evaluation import metrics
from tracestore.evaluation import store_split as splits
from tracestore.evaluation.evaluate import BootstrapResampler, RunScores
from tracestore.evaluation.metrics import percentile_interval
from tracestore.train.config import TrainConfig
from tracestore.train.trainer import Trainer

CONFIG = TrainConfig(epochs=2, lr=0.01, loader_threads=1)


@pytest.mark.long
def test_folds_and_seeds_of_the_command(sampled, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BOOTSTRAP_SAMPLES", NUM_RESAMPLES)  # as in the process of the command
    out = tmp_path / "r"
    command = ["tools/train.py", "--store", sampled, "--output-dir", out, "--epochs", 2, "--num-threads", 1]
    command += ["--lstm-hidden", 8, "--no-run-gnn-det", "--no-run-gvae"]
    plain = TrainConfig(epochs=2)
    train_quietly(sampled, out, ["lstm_solo"], plain, {"lstm_hidden": 8}, folds=3, probe=True)
    before = (out / "fold-1/seed-42/lstm_solo/last.pt").read_bytes()
    results = json.loads((out / "results.json").read_text())
    assert [(r["fold"], r["seed"]) for r in results["runs"]] == [(0, 42), (1, 42), (2, 42)]
    first = [r["models"]["lstm_solo"] for r in results["runs"]]
    # Only the second seed is trained.
    done = run_cli(*command, "--folds", 3, "--seeds", 2, "--resume", check=0)
    assert done.stdout.count("already finished") == 3 and done.stdout.count("epoch 2/2") == 3
    assert (out / "fold-1/seed-42/lstm_solo/last.pt").read_bytes() == before
    results = json.loads((out / "results.json").read_text())
    assert set(results) >= {"models", "config", "split", "store", "folds", "runs", "comparisons", "counts"}
    assert [r["models"]["lstm_solo"] for r in results["runs"][::2]] == first
    tested = [q for fold in results["folds"] for q in fold["test"]]
    assert sorted(tested) == sorted(f"q{k}" for k in range(40))
    test = results["models"]["lstm_solo"]["test"]
    assert test["num_traces"] == 80 and test["num_questions"] == 40 and test["auroc_std_over_seeds"] > 0
    by_run = [r["models"]["lstm_solo"]["test"]["auroc"] for r in results["runs"]]
    assert test["auroc_by_run"] == by_run and test["auroc"] == pytest.approx(np.mean(by_run))
    assert len(results["models"]["lstm_solo"]["history"]["train_loss"]) == 2
    assert len(results["probes"]) == 3 and results["probe"]["test"]["num_traces"] == 80
    (pair,) = results["comparisons"]
    assert pair["method"] == "bootstrap" and pair["interval"][0] <= pair["difference"] <= pair["interval"][1]
    assert "lstm_solo - logistic probe" in done.stdout and "Holm" in done.stdout
    with (out / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 160 and {(r["question_id"], r["sample"], r["seed"]) for r in rows} == {
        (f"q{k}", str(s), str(seed)) for k in range(40) for s in (0, 1) for seed in (42, 43)
    }
    by_fold = {q: str(k) for k, fold in enumerate(results["folds"]) for q in fold["test"]}
    assert all(r["split"] == "test" and r["fold"] == by_fold[r["question_id"]] for r in rows)
    assert all(0 < float(r[name]) < 1 for r in rows for name in ("lstm_solo", "logistic_probe"))
    with pytest.raises(UsageError, match="3 folds, not 4"):
        train_quietly(sampled, out, ["lstm_solo"], replace(plain, resume=True), {"lstm_hidden": 8}, folds=4, probe=True)


@pytest.mark.long
def test_seeds_alone_share_the_split(sampled, tmp_path):
    results = train_quietly(sampled, tmp_path / "r", ["lstm_solo"], CONFIG, SMALL, seeds=2)
    assert [(r["fold"], r["seed"]) for r in results["runs"]] == [(None, 42), (None, 43)]
    a, b = (r["models"]["lstm_solo"] for r in results["runs"])
    assert a["test_scores"]["trace_index"] == b["test_scores"]["trace_index"]
    assert a["history"]["train_loss"] != b["history"]["train_loss"]
    assert (tmp_path / "r/split.json").exists() and (tmp_path / "r/seed-43/lstm_solo/best.pt").exists()
    # The first seed gives the results of a run without --seeds.
    plain = train_quietly(sampled, tmp_path / "p", ["lstm_solo"], CONFIG, SMALL)
    for name in ("test", "test_scores", "threshold", "best_val_auroc"):
        assert plain["models"]["lstm_solo"][name] == a[name]
    assert "runs" not in plain and plain["split"] == results["split"]


def test_unreadable_folds_of_an_earlier_run_are_refused(sampled, tmp_path):
    (tmp_path / "folds.json").write_text("{")
    with pytest.raises(UsageError, match="not the folds"):
        train_quietly(sampled, tmp_path, ["lstm_solo"], replace(CONFIG, resume=True), SMALL, folds=3)


@pytest.fixture(scope="module")
def meaningless(tmp_path_factory):
    """A store of 120 distinct questions with two nearly equal samples each, and random labels by question.

    A model can only predict the label of a question that it was trained on.
    """
    path = tmp_path_factory.mktemp("meaningless") / "store.zarr"
    labels = np.random.default_rng(0).permutation(120) % 2
    traces = []
    for trace in make_traces(120, tokens=3, layers=2, dim=48):
        for sample in range(2):
            near = [h + np.float16(0.01 * sample) for h in trace["hidden_states"]]
            traces.append(trace | {"hidden_states": near, "sample": sample})
    return write_store(path, traces, score=lambda n: float(labels[n // 2]))


def interval_999(results, name):
    """Return the 99.9 % interval: of eight intervals of 95 %, one would miss in a third of the cases."""
    runs = results.get("runs", [results])
    probes = results.get("probes") or [results.get("probe")]
    entries = probes if name == "probe" else [r["models"][name] for r in runs]
    scores = [RunScores.from_entry(e, k) for k, e in enumerate(entries)]
    return percentile_interval(BootstrapResampler(scores, 0).draws[:, 0], 0.999)


@pytest.mark.long
@pytest.mark.parametrize("num_folds", [None, 3])
def test_random_labels_give_an_auroc_of_one_half(meaningless, tmp_path, num_folds):
    config = replace(CONFIG, epochs=4)
    results = train_quietly(
        meaningless, tmp_path / "r", list(DEFAULT_MODELS), config, SMALL, folds=num_folds, probe=True
    )
    entries = {**results["models"], "probe": results["probe"]}
    assert set(entries) == {*DEFAULT_MODELS, "probe"}
    for name, entry in entries.items():
        low, high = interval_999(results, name)
        assert low <= 0.5 <= high, f"{name}: {entry['test']['auroc']:.3f}, {low:.3f} to {high:.3f}"
    assert all(pair["p_holm"] > 0.01 for pair in results["comparisons"])


@pytest.mark.long
def test_a_leak_would_be_detected(meaningless, tmp_path):
    """The data of the test above, but with one sample of each question in training and the other in test."""
    store = tracestore.open(meaningless)
    targets, every = store.targets(), np.arange(240)
    split = splits.Split({"train": every[::2].copy(), "val": every[1::4].copy(), "test": every[3::4].copy()}, {})
    config, sizes = replace(CONFIG, epochs=25), ModelConfig(2, 48, **SMALL, dropout=0.0)
    run = Trainer("lstm_solo", store, split, targets, sizes, config, tmp_path / "m", lambda _: None)
    entry = run.run()
    low, _ = interval_999({"models": {"lstm_solo": entry}}, "lstm_solo")
    assert low > 0.6
