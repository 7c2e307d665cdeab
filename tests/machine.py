"""Waits for processes and threads, and comparisons of times, that hold on a busy machine."""

import contextlib
import math
import os
import shutil
import time
from pathlib import Path

import psutil


def assert_within(factor, work, reference, *, rounds=60, clock=time.process_time):
    """Assert that `work` takes less than `factor` times the time of `reference`, both functions without arguments.

    Other programs only add to a time, so the least of all rounds is compared: of two runs of the reference or more, and
    of `work` until the comparison holds, since another run of it could only be faster.
    """

    def seconds(function):
        begin = clock()
        function()
        return clock() - begin

    best = [math.inf, min(seconds(reference) for _ in range(2))]
    for _ in range(rounds):
        best[0] = min(best[0], seconds(work))
        if best[0] < factor * best[1]:
            return
        best[1] = min(best[1], seconds(reference))
    raise AssertionError(f"{best[0]:.6f} s, expected less than {factor} times {best[1]:.6f} s")


def wait_until(condition, seconds=60.0):
    """Wait until a function returns a true value, and return that value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"timed out after {seconds:g} s"
        time.sleep(0.005)
    return found


def is_running(pid):
    """Return whether a process exists that has not ended. One that has ended may wait for a parent that never asks."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def native_threads():
    """Return the ids of all threads of this process, those of C included."""
    return {thread.id for thread in psutil.Process().threads()}


def folder_in_memory():
    """Return a folder whose files memory holds, if there is one with a GiB of room, or else None.

    For tests that write and remove thousands of small stores.
    """
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= 1 << 30
    return shared if has_room else None


def peak_bytes():
    """Return the peak of the memory of this process."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


@contextlib.contextmanager
def bounded(*, seconds=60.0, memory_bytes=64 << 20):
    """Assert that a block ends, and that the peak of memory grows by no more than this.

    The time is far beyond what a busy machine takes: a block without an end takes longer.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, began = peak_bytes(), time.monotonic()
    yield
    assert time.monotonic() - began < seconds
    assert peak_bytes() - before < memory_bytes
