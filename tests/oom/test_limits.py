"""Memory of the process: its limits and its peak."""

import numpy as np
import psutil

from tracestore.oom.memory_limits import PeakMemoryMonitor, memory_limit
from tracestore.platform_support import cgroup_limit, memory_use


def test_cgroup_limits_of_version_1_and_2(tmp_path):
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


def test_the_smaller_of_budget_and_cgroup_limit_applies(monkeypatch):
    start, total = memory_use(), psutil.virtual_memory().total
    monkeypatch.setattr("tracestore.oom.memory_limits.cgroup_limit", lambda: None)
    assert memory_limit(None, start) is None and memory_limit(5, start) == 5
    monkeypatch.setattr("tracestore.oom.memory_limits.cgroup_limit", lambda: total // 2)
    left = memory_limit(None, start)
    assert (
        0 < left < total // 2 - start.anonymous and memory_limit(5, start) == 5 and memory_limit(total, start) == left
    )
    each = memory_limit(None, start, 4)
    assert 4 * (each + start.anonymous) <= total // 2 and memory_limit(1000, start, 4) == 250


def test_the_monitor_measures_a_peak():
    with PeakMemoryMonitor() as monitor:
        before = memory_use()
        block = np.ones(96 << 20, np.uint8)
        assert block[-1] == 1
        del block
    assert monitor.peak.anonymous - before.anonymous > 80 << 20
    assert monitor.peak.data - before.data > 80 << 20
