"""A fault at every file system call of a conversion."""

import errno
import os

import pytest

from tests.fault_injection.conftest import ALL, select_shard

pytestmark = pytest.mark.long

RANDOM_KILLS = int(os.environ.get("TRACESTORE_KILLS", "50"))
FAULTS = {
    "kill": {"action": "kill"},
    "EIO": {"action": "fail", "error": errno.EIO},
    "ENOSPC": {"action": "fail", "error": errno.ENOSPC},
    "EINTR": {"action": "fail", "error": errno.EINTR},
    "short write": {"action": "short"},
    "full disk": {"action": "full"},
}


def test_the_shim_intercepts_the_calls(driver):
    calls = [line.split()[0] for line in driver.run(action="pass", log=True)["calls"]]
    assert {"write", "fsync", "rename", "renameat2", "link", "mkdir", "unlink", "fchmod"} <= set(calls)
    assert any(name.startswith("open") for name in calls)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_call(driver, fault):
    """After each fault the store opens, verifies and holds all committed traces.

    A second run ends with the bytes of an uninterrupted one.
    """
    calls = driver.run(action="pass", log=True)["calls"]
    numbers = range(1, len(calls) + 1)
    if fault == "short write":
        numbers = [n for n in numbers if calls[n - 1].startswith(("write", "pwrite"))]
    # The short version samples all calls evenly, and the rare kinds more densely.
    if not ALL:
        rare = {n for n in numbers if calls[n - 1].startswith(("link", "rename", "unlink", "rmdir", "ftruncate"))}
        rare |= {n for n in numbers if "/manifest" in calls[n - 1] or calls[n - 1].endswith(".zarr.json")}
        offset, step = list(FAULTS).index(fault), 97
        numbers = sorted({*list(numbers)[offset::step], *sorted(rare)[offset % 4 :: 4]})
    wrong = []
    numbers = select_shard(numbers)
    for n in numbers:
        found = driver.run(at=n, **FAULTS[fault])["wrong"]
        if found:
            wrong.append(f"{fault} at call {n} of {len(calls)} ({calls[n - 1]}): {found}")
    print(f"{fault}: {len(numbers)} of {len(calls)} calls")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(numbers)}", *wrong[:10]])


@pytest.mark.timeout(7200)
def test_kills_at_random_moments(driver):
    span_s = min(driver.run(action="pass", log=True)["span_s"] for _ in range(3))
    for seed in select_shard(range(RANDOM_KILLS)):
        found = driver.run(action="random", seed=seed, span_s=span_s)["wrong"]
        assert not found, f"seed {seed}: {found}"
