"""The commands of docs/remote.md work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.project.test_docs import blocks

pytestmark = pytest.mark.long


def test_commands_and_code_of_the_page(folder, tmp_path, remote):
    pytest.importorskip("torch")
    (folder / "ground_truth_scores.csv").rename(folder / "scores.csv")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    prefix = remote.removesuffix("/store.zarr")
    found = blocks("docs/remote.md")
    assert len(found) == 2
    for language, code, _ in found:
        code = code.replace("s3://bucket", prefix)
        command = ["bash", "-ec", code] if language == "sh" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
