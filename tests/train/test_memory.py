"""Budgets of host memory: refused below the floor, and kept above it."""

import json
import os
import uuid
from pathlib import Path

import pytest

from tests.helpers import make_traces, run_cli, write_store

FLAGS = ["--no-run-lstm", "--no-run-gvae", "--no-probe", "--epochs", 1, "--num-threads", 1, "--batch-size", 16]
CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Write a store of 40 traces whose graphs take some megabytes each in training."""
    path = tmp_path_factory.mktemp("wide") / "store.zarr"
    return write_store(path, make_traces(40, tokens=40, layers=12, dim=128, heads=1), score=lambda k: k % 2)


def limited(bytes_, store, out, *args, before="", check=None):
    """Train without the check of the floor, so that the run reaches the limit."""
    code = (
        f"import sys; {before}from tracestore.cli import main\n"
        "from tracestore.experiment import training_run\n"
        "training_run.plan_micro_batches = lambda names, *a: dict.fromkeys(names)\n"
        "sys.exit(main(['train', *sys.argv[1:]]))"
    )
    words = ["--store", store, "--output-dir", out, "--memory-budget", bytes_, *FLAGS, *args]
    return run_cli("-c", code, *words, check=check, env={"OMP_NUM_THREADS": "1"})


@pytest.mark.long
def test_a_budget_far_too_small_ends_with_75_and_a_checkpoint(wide, tmp_path):
    done = limited("24MiB", wide, tmp_path / "r", check=75)
    assert done.stderr.count("\n") == 1 and "--resume" in done.stderr
    assert (tmp_path / "r/gnn_det_lstm/last.pt").exists()
    run_cli("tools/train.py", "--store", wide, "--output-dir", tmp_path / "r", *FLAGS, "--resume", check=0)


@pytest.mark.long
def test_a_budget_below_the_floor_is_refused(wide, tmp_path):
    done = run_cli(
        "tools/train.py", "--store", wide, "--output-dir", tmp_path / "r", *FLAGS, "--memory-budget", "60MiB", check=2
    )
    assert "below" in done.stderr and "gnn_det_lstm" in done.stderr and done.stderr.count("\n") == 1
    assert not list((tmp_path / "r").glob("*/*.pt"))


@pytest.fixture
def group():
    """Make a memory cgroup of version 1."""
    path = CGROUPS / f"tracestore-test-{uuid.uuid4().hex}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
    yield path
    path.rmdir()


@pytest.mark.long
def test_training_stays_within_the_limit_of_a_cgroup(wide, tmp_path, group):
    """Without a flag the run finds the limit, and finishes or ends with code 75."""
    (group / "memory.limit_in_bytes").write_text(str(900 << 20))
    join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(__import__('os').getpid())); "
    done = limited("8GiB", wide, tmp_path / "r", before=join)
    assert done.returncode in (0, 75), done.stderr
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    assert peak <= 900 << 20 and "oom_kill 0" in (group / "memory.oom_control").read_text()
    assert os.path.exists(tmp_path / "r/gnn_det_lstm/last.pt")


@pytest.mark.long
def test_ranks_share_the_limit_of_a_cgroup(wide, tmp_path, group):
    """The plans of two ranks stay within the limit together, and none is killed."""
    limit = 1500 << 20
    (group / "memory.limit_in_bytes").write_text(str(limit))
    code = (
        f"import os, runpy, sys; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
        "runpy.run_module('torch.distributed.run', run_name='__main__', alter_sys=True)"
    )
    launcher = ["-c", code, "--standalone", "--nproc-per-node", 2, "tools/train.py"]
    done = run_cli(*launcher, "--store", wide, "--output-dir", tmp_path / "r", *FLAGS, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    assert peak <= limit and "oom_kill 0" in (group / "memory.oom_control").read_text()
    results = json.loads((tmp_path / "r/results.json").read_text())
    assert results["config"]["world_size"] == 2
