"""Fixtures of the tests of whole training runs."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.train.runs import write_labeled


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """Return the path of a store whose hidden states predict the label."""
    return write_labeled(tmp_path_factory.mktemp("labeled") / "store.zarr")


@pytest.fixture(scope="session")
def driver():
    """Return a function that calls functions of tests/train/crash_tests.py in its own process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.train.crash_tests"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(name, flags, folder, *more):
        process.stdin.write(json.dumps([name, [str(f) for f in flags], str(folder), *more]) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer

    yield ask
    process.stdin.close()
    process.wait(30)
