"""Whole training runs: results, resuming, errors."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.helpers import ROOT, command, make_trace, make_traces, run_cli, write_store
from tests.train.runs import FAST


def train(store, out, *args, check=0, **options):
    return command("train", "--store", store, "--output-dir", out, *FAST, *args, check=check, **options)


def final_weights(out, model):
    return torch.load(out / model / "last.pt", weights_only=True)["model"]


@pytest.mark.long
def test_results_follow_the_public_contract(labeled, tmp_path):
    done = train(labeled, tmp_path / "r", "--epochs", 6, "--lr", 0.01, "--twins")
    results = json.loads((tmp_path / "r/results.json").read_text())
    assert set(results) >= {"models", "config", "split", "store"}
    twins = {"gnn_det_lstm_no_edges", "gvae_lstm_no_edges"}
    assert set(results["models"]) == {"lstm_solo", "gnn_det_lstm", "gvae_lstm"} | twins
    for name, entry in results["models"].items():
        assert set(entry["test"]) >= {"auroc", "accuracy", "precision", "recall", "f1"}
        assert {"best_val_auroc", "threshold", "history", "oom_events", "seconds_per_epoch"} <= set(entry)
        assert len(entry["seconds_per_epoch"]) == 6 and entry["oom_events"] == []
        assert (tmp_path / "r" / name / "best.pt").exists() and (tmp_path / "r" / name / "last.pt").exists()
    assert results["models"]["lstm_solo"]["test"]["auroc"] > 0.9
    ids = [set(results["split"][name]) for name in ("train", "val", "test")]
    assert not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    assert set.union(*ids) == {f"q{k}" for k in range(60)}, "a trace without a score is in no split"
    assert json.loads((tmp_path / "r/split.json").read_text()) == results["split"]
    assert (tmp_path / "r/report.html").stat().st_size > 1000 and "report.html" in done.stdout
    assert {p.stem for p in (tmp_path / "r").glob("*.svg")} == {"loss", "auroc", "roc", "precision_recall"}
    assert "logistic probe" in done.stdout


@pytest.mark.long
def test_same_seed_same_results_and_flags(labeled, tmp_path):
    only = ["--no-run-gnn-det", "--no-run-gvae", "--epochs", 2, "--no-probe", "--json"]
    first = json.loads(train(labeled, tmp_path / "a", *only).stdout)
    second = json.loads(train(labeled, tmp_path / "b", *only, "--num-workers", 2).stdout)
    assert list(first["models"]) == ["lstm_solo"]
    for name in ("train_loss", "val_loss", "val_auroc"):
        assert first["models"]["lstm_solo"]["history"][name] == second["models"]["lstm_solo"]["history"][name]
    assert first["split"] == second["split"]
    third = json.loads(train(labeled, tmp_path / "c", *only, "--seed", 1).stdout)
    assert third["split"] != first["split"]


def test_a_store_without_attention_trains_what_needs_none(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(30), score=lambda k: k % 2, attention="none")
    done = train(tmp_path / "s.zarr", tmp_path / "r", "--epochs", 1, "--no-probe")
    assert "has no attention: gnn_det_lstm, gvae_lstm need graphs" in done.stdout
    assert list(json.loads((tmp_path / "r/results.json").read_text())["models"]) == ["lstm_solo"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [["--top-k", 0.5], ["--attention-threshold", 0.4, "--standardize"], ["--message-passing", "pyg"]]
)
def test_graph_options(labeled, tmp_path, options):
    out = train(
        labeled, tmp_path / "r", "--no-run-lstm", "--no-run-gvae", "--epochs", 1, "--no-probe", "--json", *options
    )
    assert json.loads(out.stdout)["models"]["gnn_det_lstm"]["history"]["train_loss"][0] < 5


@pytest.mark.long
def test_a_run_killed_between_epochs_resumes_bit_for_bit(labeled, tmp_path):
    model, flags = "gvae_lstm", ["--no-run-lstm", "--no-run-gnn-det", "--epochs", 5, "--no-probe"]
    train(labeled, tmp_path / "whole", *flags)
    command = [sys.executable, "tools/train.py", "--store", labeled, "--output-dir", tmp_path / "cut", *FAST, *flags]
    process = subprocess.Popen([str(c) for c in command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "epoch 2/5" in line:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    done = train(labeled, tmp_path / "cut", *flags, "--resume")
    assert "continues after epoch" in done.stdout
    whole, cut = final_weights(tmp_path / "whole", model), final_weights(tmp_path / "cut", model)
    assert all(torch.equal(whole[k], cut[k]) for k in whole)
    again = train(labeled, tmp_path / "cut", *flags, "--resume")
    assert "already finished" in again.stdout
    other = train(labeled, tmp_path / "cut", *flags, "--resume", "--lr", 0.5, check=2)
    assert "lr" in other.stderr and other.stderr.count("\n") == 1


@pytest.mark.long
def test_a_trace_that_does_not_fit_exits_with_75_and_resumes(labeled, tmp_path):
    """The child process runs out of memory from the second step of the second epoch on."""
    code = (
        "import sys, torch; from tracestore.cli import main\n"
        "from tracestore.oom import guard\n"
        "original = guard.OOMGuard._attempt\n"
        "def attempt(self, *a):\n"
        "    if self.num_steps >= 4:\n"
        "        return 'forward', guard.StepOutcome.DEVICE_OOM, 0.0\n"
        "    return original(self, *a)\n"
        "guard.OOMGuard._attempt = attempt\n"
        "sys.exit(main(['train', *sys.argv[1:]]))"
    )
    flags = ["--no-run-gnn-det", "--no-run-gvae", "--epochs", 3, "--no-probe", *FAST]
    train(labeled, tmp_path / "whole", *flags)
    done = run_cli("-c", code, "--store", labeled, "--output-dir", tmp_path / "cut", *flags, check=75)
    assert "--resume" in done.stderr and "last.pt" in done.stderr and done.stderr.count("\n") == 1
    train(labeled, tmp_path / "cut", *flags, "--resume")
    whole, cut = final_weights(tmp_path / "whole", "lstm_solo"), final_weights(tmp_path / "cut", "lstm_solo")
    assert all(torch.allclose(whole[k], cut[k], rtol=1e-4, atol=1e-5) for k in whole)
    events = json.loads((tmp_path / "cut/results.json").read_text())["models"]["lstm_solo"]["oom_events"]
    assert {"epoch", "step", "phase", "size_before", "size_after"} <= set(events[0]) and events[0]["epoch"] == 1


def test_errors_before_training(labeled, tmp_path, store_path):
    write_store(tmp_path / "bare.zarr", make_traces(12))
    write_store(tmp_path / "one.zarr", make_traces(12), score=0.9, attention="none")
    for store, args, words in (
        (tmp_path / "bare.zarr", [], "tracestore score"),
        (tmp_path / "one.zarr", ["--no-run-lstm"], "no graphs"),
        (tmp_path / "one.zarr", [], "0 hallucinated"),
        (tmp_path / "one.zarr", ["--no-run-gnn-det", "--no-run-gvae"], "0 hallucinated"),
        (tmp_path / "nowhere.zarr", [], "no such store"),
        (labeled, ["--no-run-gnn-det", "--no-run-gvae", "--no-run-lstm"], "switched off"),
        (labeled, ["--top-k", 3], "fraction"),
        (labeled, ["--memory-budget", "1MiB"], "below"),
        (labeled, ["--preprocessed-dir", "old/"], "tracestore.convert old/"),
        (labeled, ["--data-pattern", "*.pkl"], "train store.zarr"),
    ):
        done = train(store, tmp_path / "r", *args, check=2)
        assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.long
def test_a_nan_is_reported_with_its_question_id(tmp_path):
    traces = make_traces(40, tokens=3)
    traces[17]["hidden_states"][1][:] = np.nan
    write_store(tmp_path / "nan.zarr", traces, score=lambda k: k % 2)
    done = train(tmp_path / "nan.zarr", tmp_path / "r", "--epochs", 1, "--no-run-gnn-det", "--no-run-gvae", check=2)
    assert "q17" in done.stderr and "--drop-nonfinite" in done.stderr and done.stderr.count("\n") == 1
    flags = ["--epochs", 1, "--no-run-gnn-det", "--no-run-gvae", "--drop-nonfinite"]
    done = train(tmp_path / "nan.zarr", tmp_path / "r", *flags, "--overwrite", check=0)
    assert "--drop-nonfinite: 1 trace with NaN or infinite values left out: q17" in done.stdout
    assert "0 without a label or score" in done.stdout
    results = json.loads((tmp_path / "r/results.json").read_text())
    assert results["dropped_nonfinite"] == [{"question_id": "q17", "sample": 0}]
    assert sorted(q for ids in results["split"].values() for q in ids) == sorted({f"q{k}" for k in range(40)} - {"q17"})
    assert "already finished" in train(tmp_path / "nan.zarr", tmp_path / "r", *flags, "--resume", check=0).stdout


@pytest.mark.long
def test_traces_without_nan_are_kept_of_a_question_with_one(tmp_path):
    traces = [make_trace(k, tokens=2, seed=sample) | {"sample": sample} for k in range(40) for sample in range(2)]
    for k in range(0, 80, 8):
        traces[k]["hidden_states"][0][1, 0] = np.inf
    path = write_store(tmp_path / "s.zarr", traces, score=lambda n: n // 2 % 2)
    flags = ["--epochs", 1, "--no-run-gnn-det", "--no-run-gvae", "--drop-nonfinite", "--no-probe"]
    done = train(path, tmp_path / "r", *flags, check=0)
    assert "10 traces with NaN or infinite values left out: q0, q4, q8, q12, q16, 5 more" in done.stdout
    results = json.loads((tmp_path / "r/results.json").read_text())
    assert results["dropped_nonfinite"] == [{"question_id": f"q{k}", "sample": 0} for k in range(0, 40, 4)]
    assert sum(sum(counts.values()) for counts in results["counts"][0].values()) == 70
    assert "already finished" in train(path, tmp_path / "r", *flags, "--resume", check=0).stdout


@pytest.mark.long
def test_a_generous_memory_budget_changes_nothing(labeled, tmp_path):
    flags = ["--epochs", 1, "--no-run-lstm", "--no-run-gvae", "--no-probe"]
    free = json.loads(train(labeled, tmp_path / "a", *flags, "--json").stdout)
    kept = json.loads(train(labeled, tmp_path / "b", *flags, "--json", "--memory-budget", "4GiB").stdout)
    assert free["models"]["gnn_det_lstm"]["test"] == kept["models"]["gnn_det_lstm"]["test"]


@pytest.mark.long
def test_sigint_ends_the_run_within_seconds(labeled, tmp_path):
    command = [sys.executable, "tools/train.py", "--store", labeled, "--output-dir", tmp_path / "r", *FAST, "--epochs"]
    command += [500]
    process = subprocess.Popen(
        [str(c) for c in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    for line in process.stdout:
        if "epoch 2/" in line:
            break
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr and "epoch 500/" not in stdout


@pytest.mark.long
def test_recovery_from_a_batch_that_cannot_be_gathered(labeled, tmp_path):
    """Caches are emptied and the same batch is gathered again, so the weights do not change."""
    code = (
        "import sys; from tracestore.cli import main\n"
        "from tracestore.data.batches.batch_jobs import BatchGatherer\n"
        "original, calls = BatchGatherer.job, [0]\n"
        "def gather(*a, **k):\n"
        "    calls[0] += 1\n"
        "    if calls[0] == 2:\n"
        "        raise MemoryError\n"
        "    return original(*a, **k)\n"
        "BatchGatherer.job = gather\n"
        "sys.exit(main(['train', *sys.argv[1:]]))"
    )
    flags = ["--no-run-gnn-det", "--no-run-gvae", "--epochs", 2, "--no-probe", *FAST]
    train(labeled, tmp_path / "whole", *flags)
    done = run_cli("-c", code, "--store", labeled, "--output-dir", tmp_path / "short", *flags, check=0)
    assert "host memory ran out" in done.stdout
    whole, short = final_weights(tmp_path / "whole", "lstm_solo"), final_weights(tmp_path / "short", "lstm_solo")
    assert all(torch.equal(whole[k], short[k]) for k in whole)
