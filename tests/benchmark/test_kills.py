"""A benchmark that is killed at random moments leaves no results that look complete and are not; Ctrl-C is one line."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.detectors.published.conftest import write_published
from tests.helpers import ROOT
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
