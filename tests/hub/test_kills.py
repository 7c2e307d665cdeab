"""A pull that is killed at random moments leaves no store that looks complete, and continues."""

import os
import random
import shutil
import subprocess
import sys
import time

import pytest

from tests.helpers import ROOT, command, make_traces, write_store

KILLS = int(os.environ.get("TRACESTORE_PULL_KILLS", "3"))
REPO = "user/traces"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_killed_pull_leaves_nothing_that_looks_complete(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "30")
    traces = make_traces(40, tokens=60, dim=64)
    source = write_store(tmp_path / "store.zarr", traces, commit_after=range(9, 40, 10))
    command("push", source, REPO, check=0)
    size = len(hub.files(REPO))

    def slow(method, path):
        time.sleep(0.02)

    hub.lie = slow
    new = tmp_path / "new.zarr"
    words = [sys.executable, "-m", "tracestore", "pull", REPO, str(new)]

    def pull(seconds=None):
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
            assert process.wait() in (0, -9), process.stderr.read()
        return process.returncode

    began = time.monotonic()
    assert pull() == 0
    duration = time.monotonic() - began
    rng, whole, partial = random.Random(0), 0, 0
    for _ in range(KILLS):
        if new.exists():
            assert "intact" in command("verify", new, check=0).stdout
            shutil.rmtree(new)
            whole += 1
        else:
            partial += 1
        pull(rng.uniform(0.2, 1.0) * duration)
        hidden = tmp_path / ".pull-new.zarr"
        if hidden.exists() and command("info", hidden).returncode == 0:
            assert "intact" in command("verify", hidden, check=0).stdout
    hub.lie = lambda method, path: None
    assert new.exists() or pull() == 0
    assert "intact" in command("verify", new, check=0).stdout and not list(tmp_path.glob(".pull-*"))
    print(f"{KILLS} kills of a pull of {size} files in {duration:.1f} s: complete before {whole}, partial {partial}")
