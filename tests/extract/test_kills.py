"""Kill `tracestore extract` at random times, and resume it."""

import contextlib
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
from tests.helpers import ROOT, command, read_all
from tracestore.errors import UsageError
from tracestore.store.io.files import LocalFiles

pytestmark = pytest.mark.long
# 50 in `make torture`.
KILLS = int(os.environ.get("TRACESTORE_EXTRACT_KILLS", "2"))


@pytest.fixture
def words(tiny_model, tmp_path):
    """Return a function that makes the words of an extraction of some questions."""

    def make(count, out, *flags):
        path = tmp_path / "questions.jsonl"
        rows = [{"question_id": f"q{k}", "question": f"What is {k}?", "answers": [f"{k}"]} for k in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ["extract", "--model", tiny_model, "--questions", path, "--out", out, "--max-new-tokens", "6", *flags]

    return make


def start(words, **options):
    program = [sys.executable, "tools/extract.py", *words[1:]]
    return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)


def kills(words, has_gone_on, longest_wait_s):
    """Kill the command several times, each after it has gone on; yield after each kill."""
    rng = random.Random(0)
    for _ in range(KILLS):
        with start(words) as process:
            # Importing libraries takes longest.
            while process.poll() is None and not has_gone_on():
                time.sleep(0.005)
            time.sleep(rng.uniform(0, longest_wait_s))
            process.kill()
            assert process.wait() in (0, -signal.SIGKILL), process.stderr.read()
        yield


def test_two_extractions_into_one_store_of_which_one_is_killed_and_repeated(words, tmp_path):
    """Every question is in the store once. A third process answers a shard at the same time."""
    store = tmp_path / "run.zarr"
    command_of_all = words(60, store, "--commit-interval", "0")

    def of_rank(rank):
        ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        return start(command_of_all, env=os.environ | ranks)

    def found():
        with contextlib.suppress(UsageError), tracestore.open(store) as opened:
            return {int(i[1:]) % 2 for i in opened.question_ids}
        return set()

    killed, other = of_rank(0), of_rank(1)
    while 0 not in found() and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert [process.wait() for process in (other, of_rank(0), of_rank(0))] == [0, 0, 0]
    with tracestore.open(store) as opened:
        assert sorted(opened.question_ids) == sorted(f"q{k}" for k in range(60))
        assert not np.isnan(opened.scores).any()
    command("verify", store, check=0)


def test_killed_and_resumed_run_makes_the_same_store(words, tmp_path):
    count, store = 20 + 20 * KILLS, tmp_path / "killed.zarr"
    command(*words(count, tmp_path / "whole.zarr"), check=0)
    generation = 0
    for _ in kills(
        words(count, store, "--commit-interval", "0"), lambda: LocalFiles(store).generations()[:1] > [generation], 0.3
    ):
        command("verify", store, check=0)
        generation = LocalFiles(store).generations()[0]
    command(*words(count, store), check=0)
    with tracestore.open(tmp_path / "whole.zarr") as whole, tracestore.open(store) as killed:
        assert len(whole) == count and read_all(whole) == read_all(killed)


def test_a_killed_run_leaves_whole_files_and_goes_on(words, tmp_path):
    """Each file in the folder is intact, and scores come last."""
    count, folder, whole = 6 + 4 * KILLS, tmp_path / "killed", tmp_path / "whole"
    resume = words(count, folder, "--traces-per-file", "2")
    command(*words(count, whole, "--traces-per-file", "2"), check=0)
    files = []
    for _ in kills(resume, lambda: len(list(folder.glob("*.pkl"))) > len(files), 0.1):
        files = list(folder.glob("*.pkl"))
        assert len(files) == count // 2 or not (folder / "scores.csv").exists()
        assert all(path.read_bytes() == (whole / path.name).read_bytes() for path in files)
    command(*resume, check=0)
    content = [{p.name: p.read_bytes() for p in path.iterdir() if p.is_file()} for path in (folder, whole)]
    assert content[0] == content[1]
