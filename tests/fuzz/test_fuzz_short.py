"""Thousands of mutated inputs; `make check` fuzzes for three minutes, `make fuzz` runs millions."""

import subprocess
import sys

import pytest

from tests.fuzz.target import TARGETS
from tests.helpers import ROOT

COUNTS = {"pickle": 1_500, "zip": 1_000, "gzip": 1_000, "layout": 2_000, "store": 150}


@pytest.mark.long
@pytest.mark.parametrize("mode", TARGETS)
def test_mutated_inputs_are_read_or_refused(tmp_path, mode):
    if mode == "store":
        pytest.importorskip("torch")
    case = tmp_path / "case"
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.loop", mode, str(COUNTS[mode]), "1", str(case)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=250,
    )
    found = case.read_bytes()[:2000] if done.returncode else b""
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-3000:]}\n{found!r}"
    assert int(done.stdout.split()[-2]) > 50, done.stdout
