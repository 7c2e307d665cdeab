"""A benchmark that ends early: it leaves no results that look complete and are not, and --resume keeps those that are."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import tracestore
from tests.detectors.published.conftest import COUNT, make_labeled, write_published
from tests.helpers import ROOT
from tracestore.benchmark import fold_runs
from tracestore.benchmark.finished import FinishedResults
from tracestore.benchmark.fold_runs import Activity, LabeledStore
from tracestore.benchmark.run import BenchmarkOptions, run_benchmark
from tracestore.errors import UsageError
from tracestore.inference.predict import load_detector

KILLS = int(os.environ.get("TRACESTORE_BENCHMARK_KILLS", "2"))
NAMES = "probe_last,saplma,lookback_lens"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_killed_benchmark_leaves_nothing_that_looks_complete(tmp_path):
    path, out, folds = write_published(tmp_path / "s.zarr"), tmp_path / "out", tmp_path / "folds"
    folds.mkdir()

    def run(folder, names, seconds=None):
        words = [sys.executable, "-m", "tracestore", "benchmark", path, "--detectors", names, "--workers", 2]
        words += ["--folds", 2, "--output-dir", folder, "--folds-dir", folds, "--overwrite", "--save-detectors"]
        with subprocess.Popen(
            list(map(str, words)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() in (0, -9), process.stderr.read()
        return process.returncode

    began = time.monotonic()
    expected = {}
    for names in (NAMES, "probe_last"):
        assert run(tmp_path / names, names) == 0
        expected[frozenset(names.split(","))] = (tmp_path / names / "scores.csv").read_bytes()
    duration = (time.monotonic() - began) / 2
    rng, whole = random.Random(0), 0
    for k in range(KILLS):
        # Runs with other detectors into the same folder: results of both are never side by side.
        run(out, (NAMES, "probe_last")[k % 2], rng.uniform(0.1, 1.1) * duration)
        whole += check(out, expected)
    assert run(out, NAMES) == 0 and check(out, expected)
    print(f"{KILLS} kills of a benchmark of {duration:.1f} s: complete results after {whole}")


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_an_interrupted_benchmark_ends_with_one_line(tmp_path):
    """Whatever its processes do: they start, measure or wait for a detector."""
    words = ["benchmark", write_published(tmp_path / "s.zarr"), "--detectors", NAMES, "--workers", 2, "--folds", 2]
    words = [sys.executable, "-m", "tracestore", *map(str, words)]
    rng = random.Random(0)
    for k in range(KILLS):
        with subprocess.Popen(
            [*words, "--output-dir", str(tmp_path / str(k))], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdout.readline()  # the command has begun
            time.sleep(rng.uniform(0, 10))
            os.killpg(process.pid, signal.SIGINT)
            code, said = process.wait(60), process.stderr.read()
        assert code == 0 or (code, said.count("\n")) == (130, 1), said


@pytest.mark.long
def test_processes_of_a_killed_benchmark_end(tmp_path):
    """They waited for jobs for ever, and held the pipe of the output open."""
    words = ["benchmark", write_published(tmp_path / "s.zarr"), "--detectors", NAMES, "--workers", 2, "--folds", 2]
    words += ["--output-dir", tmp_path / "out"]
    with subprocess.Popen(
        [sys.executable, "-m", "tracestore", *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout.readline()
        while len(os.listdir(f"/proc/{process.pid}/task")) < 4:  # its threads wait for processes
            time.sleep(0.1)
        time.sleep(3)
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
        began = time.monotonic()
        while process.stdout.read(1 << 16):  # until no process has the pipe
            assert time.monotonic() - began < 60


def check(out, expected):
    """Check the results in a folder; return whether there are any."""
    for path in out.glob("checkpoints/*.pt"):
        load_detector(path)
    if not (out / "benchmark.json").exists():
        return False
    results = json.loads((out / "benchmark.json").read_text())
    (entry,) = results["stores"].values()
    names = frozenset(results["config"]["detectors"])
    assert names <= set(entry["detectors"]) and entry["skipped"] == {}
    assert (out / "scores.csv").read_bytes() == expected[names]
    table, page = (out / "table.txt").read_text(), (out / "report.html").read_text()
    for name in NAMES.split(","):
        assert (name in table) == (name in entry["detectors"]) == (f">{name}<" in page)
    return True


@pytest.mark.long
def test_a_resumed_benchmark_keeps_what_was_finished(tmp_path, monkeypatch):
    path, lines, measured = write_published(tmp_path / "s.zarr"), [], []
    options = BenchmarkOptions(("probe_last", "lookback_lens"), folds=2, save_detectors=True)
    expected = run_benchmark([path], tmp_path / "whole", options, lambda _: None)
    own = fold_runs.measure_detector

    def interrupted(name, *arguments):
        measured.append(name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return own(name, *arguments)

    monkeypatch.setattr(fold_runs, "measure_detector", interrupted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark([path], out, options, lambda _: None)
    with pytest.raises(UsageError, match="continue it with --resume"):
        run_benchmark([path], out, options, lambda _: None)
    with open(out / ".finished.jsonl", "a") as file:
        file.write('\n{"of": "cut by a cra')
    # Without a checkpoint, a detector is measured again.
    (out / f"checkpoints/{measured[0]}.pt").unlink()
    found = run_benchmark([path], out, dataclasses.replace(options, resume=True), lines.append)
    assert f"finished before: {measured[1]}" in lines and measured[3] == measured[0]
    for name in ("scores.csv", "checkpoints/probe_last.pt", "checkpoints/lookback_lens.pt"):
        assert (out / name).exists()
    assert (out / "scores.csv").read_bytes() == (tmp_path / "whole/scores.csv").read_bytes()
    assert without_costs(found) == without_costs(expected) and not (out / ".finished.jsonl").exists()


@pytest.mark.parametrize("change", ["nothing", "seed", "labels", "states", "folds", "checkpoint"])
def test_results_of_other_data_or_options_are_not_kept(tmp_path, change):
    def results(count=COUNT, first=0, y=0, seed=42, fold=0, checkpoint=None):
        if not (path := tmp_path / f"{first}.zarr").exists():
            write_published(path, [make_labeled(first + k) for k in range(count)])
        store = tracestore.open(path)
        folds = {"question": np.arange(count) // 2 % 2 ^ fold}
        data = LabeledStore("s", store, np.arange(count), np.arange(count) % 2 ^ y, folds)
        lines = []
        finished = FinishedResults(tmp_path / ".finished.jsonl", resume=True)
        list(finished.measure([("length", data, [], seed, checkpoint)], 1, Activity(lines.append)))
        return lines

    assert "finished before: length" not in results()
    changed = {
        "nothing": {},
        "seed": {"seed": 43},
        "labels": {"y": 1},
        "states": {"first": 1},
        "folds": {"fold": 1},
        "checkpoint": {"checkpoint": tmp_path / "length.pt"},
    }
    assert ("finished before: length" in results(**changed[change])) == (change == "nothing")


def without_costs(value):
    """Return results without times and memory."""
    if isinstance(value, dict):
        costs = ("fit_s", "score_s", "cpu_s", "peak_bytes", "features_s")
        return {key: without_costs(v) for key, v in value.items() if key not in costs}
    return list(map(without_costs, value)) if isinstance(value, list) else value
