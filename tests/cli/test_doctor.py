"""Test `tracestore doctor`: its checks and its advice."""

import json
import resource
import subprocess
import sys

from tests.helpers import ROOT, command, run_cli
from tracestore._core import kernels


def doctor(*args, check=0):
    return command("doctor", *args, check=check)


def test_prints_every_check(tmp_path):
    found = {f["name"]: f for f in json.loads(doctor("--json", "--folder", tmp_path).stdout)}
    wanted = {"python", "numpy", "zarr", "torch", "processors", "instructions", "memory", "open files", "free", "read"}
    assert wanted <= set(found)
    assert list(tmp_path.iterdir()) == []
    out = doctor("--folder", tmp_path).stdout
    assert all(f"  {name} " in out for name in wanted)
    assert found["kernels"]["value"] == f"{kernels.simd_name()} (level {kernels.simd_level()})"


def test_advises_on_a_low_limit(tmp_path):
    def few_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    command = [sys.executable, "-m", "tracestore", "doctor", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, preexec_fn=few_files, check=True)
    assert "advice: a store of thousands of segments maps many files: ulimit -n" in done.stdout


def test_missing_folder_is_a_usage_error(tmp_path):
    assert doctor("--folder", tmp_path / "nowhere", check=2).stderr.endswith("nowhere: no such folder\n")


def test_environment_limits_the_level_of_the_kernels(monkeypatch):
    """`make check-processors` sets TRACESTORE_SIMD_LEVEL. Invalid levels are ignored."""
    levels = []
    for value in ("1", "4", "9", "two"):
        monkeypatch.setenv("TRACESTORE_SIMD_LEVEL", value)
        done = run_cli("-c", "from tracestore._core.kernels import simd_level; print(simd_level())", check=0)
        levels.append(int(done.stdout))
    assert levels[0] == 1 and len(set(levels[1:])) == 1
