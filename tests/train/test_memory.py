"""Budgets of host memory: read, refused below the floor, and survived above it."""

import json
import os
import uuid
from pathlib import Path

import numpy as np
import psutil
import pytest

import tracestore
from tests.helpers import make_trace, run_cli
from tracestore.cgroup import cgroup_limit
from tracestore.oom.limits import PeakMemoryMonitor, memory_limit, memory_use

FLAGS = ["--no-run-lstm", "--no-run-gvae", "--no-probe", "--epochs", 1, "--num-threads", 1, "--batch-size", 16]
CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """40 traces whose graphs take some megabytes each while training."""
    path = tmp_path_factory.mktemp("wide") / "store.zarr"
    with tracestore.create(path) as writer:
        for k in range(40):
            writer.append(make_trace(k, tokens=40, layers=12, dim=128, heads=1), score=k % 2)
    return path


def test_limits_of_both_versions(tmp_path):
    mount, proc = tmp_path / "cgroup", tmp_path / "proc"
    (mount / "memory/job/step").mkdir(parents=True)
    (mount / "memory/job/memory.limit_in_bytes").write_text("1000000\n")
    (mount / "memory/job/step/memory.limit_in_bytes").write_text("9223372036854771712\n")
    proc.write_text("4:cpu:/\n3:memory:/job/step\n")
    assert cgroup_limit(proc, mount) == 1_000_000
    (mount / "a/b").mkdir(parents=True)
    (mount / "a/memory.max").write_text("max\n")
    (mount / "a/b/memory.max").write_text("2000000\n")
    proc.write_text("0::/a/b\n")
    assert cgroup_limit(proc, mount) == 2_000_000
    proc.write_text("0::/a\n")
    assert cgroup_limit(proc, mount) is None
    assert cgroup_limit(tmp_path / "none", mount) is None


def test_the_nearer_limit_counts(monkeypatch):
    start, total = memory_use(), psutil.virtual_memory().total
    monkeypatch.setattr("tracestore.oom.limits.cgroup_limit", lambda: None)
    assert memory_limit(None, start) is None and memory_limit(5, start) == 5
    monkeypatch.setattr("tracestore.oom.limits.cgroup_limit", lambda: total // 2)
    left = memory_limit(None, start)
    assert (
        0 < left < total // 2 - start.anonymous and memory_limit(5, start) == 5 and memory_limit(total, start) == left
    )
    each = memory_limit(None, start, 4)
    assert 4 * (each + start.anonymous) <= total // 2 and memory_limit(1000, start, 4) == 250


def test_the_meter_sees_a_peak():
    with PeakMemoryMonitor() as meter:
        before = memory_use()
        block = np.ones(96 << 20, np.uint8)
        assert block[-1] == 1
        del block
    assert meter.peak.anonymous - before.anonymous > 80 << 20
    assert meter.peak.data - before.data > 80 << 20


def limited(bytes_, store, out, *args, before="", check=None):
    """A run in which the floor is not asked for, so that the limit is met in the middle."""
    code = (
        f"import sys; {before}from tracestore.cli import main\n"
        "from tracestore.experiment import run\n"
        "run.plan_micro_batches = lambda names, *a: dict.fromkeys(names)\n"
        "sys.exit(main(['train', *sys.argv[1:]]))"
    )
    words = ["--store", store, "--output-dir", out, "--memory-budget", bytes_, *FLAGS, *args]
    return run_cli("-c", code, *words, check=check, env={"OMP_NUM_THREADS": "1"})


@pytest.mark.long
def test_far_too_little_is_a_checkpoint_and_75(wide, tmp_path):
    done = limited("24MiB", wide, tmp_path / "r", check=75)
    assert done.stderr.count("\n") == 1 and "--resume" in done.stderr
    assert (tmp_path / "r/gnn_det_lstm/last.pt").exists()
    run_cli("tools/train.py", "--store", wide, "--output-dir", tmp_path / "r", *FLAGS, "--resume", check=0)


def test_a_budget_below_the_floor_is_refused(wide, tmp_path):
    done = run_cli(
        "tools/train.py", "--store", wide, "--output-dir", tmp_path / "r", *FLAGS, "--memory-budget", "60MiB", check=2
    )
    assert "below" in done.stderr and "gnn_det_lstm" in done.stderr and done.stderr.count("\n") == 1
    assert not list((tmp_path / "r").glob("*/*.pt"))


@pytest.fixture
def group():
    """A memory cgroup of this test's own, version 1."""
    path = CGROUPS / f"tracestore-test-{uuid.uuid4().hex}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
    yield path
    path.rmdir()


def test_in_a_cgroup_the_limit_is_kept_and_nothing_is_killed(wide, tmp_path, group):
    """The limit is found without a flag; the run finishes in it or says that it is too little."""
    (group / "memory.limit_in_bytes").write_text(str(900 << 20))
    join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(__import__('os').getpid())); "
    done = limited("8GiB", wide, tmp_path / "r", before=join)
    assert done.returncode in (0, 75), done.stderr
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    assert peak <= 900 << 20 and "oom_kill 0" in (group / "memory.oom_control").read_text()
    assert os.path.exists(tmp_path / "r/gnn_det_lstm/last.pt")


@pytest.mark.long
def test_ranks_share_the_limit_of_a_cgroup(wide, tmp_path, group):
    """Two of them, whose plans together stay within it: none is killed."""
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
