"""Kills at random moments: the bytes of a conversion that nothing has disturbed. `make torture` kills 100 times."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers import ROOT, command, convert, make_trace, tree_bytes, write_pickle
from tests.machine import is_running, wait_until
from tests.tasks.test_tasks import files_of
from tracestore.convert import cutting
from tracestore.store.maintain.verify import verify_store

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
KILLS = int(os.environ.get("TRACESTORE_WORKER_KILLS", "2"))
# The program with tasks of one source each, as the fixture small_tasks makes them in this process. Its end, too, is
# that of the program: an interpreter that ends by itself has no handler of SIGINT.
PROGRAM = "from tracestore.convert import cutting; cutting.MIN_BYTES = 1\nfrom tracestore.__main__ import run; run()"


def start(*words):
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Return the exit code of a command, which prints no traceback, and its messages."""
    errors = process.communicate(timeout=120)[1]
    assert "Traceback" not in errors, errors
    return process.returncode, errors


def children(pid):
    """Return the children of a process. Linux lists those of each thread apart."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a folder of sources, the files of their store, and how long its conversion by two processes takes."""
    folder = tmp_path_factory.mktemp("kills")
    data = folder / "data"
    data.mkdir()
    for k in range(16):
        traces = [make_trace(4 * k + i, tokens=48, layers=6, dim=128) for i in range(4)]
        write_pickle(data / f"batch_{k:02d}.pkl{'.gz' * (k % 2)}", traces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "MIN_BYTES", 1)
        convert(data, folder / "one.zarr")
    began = time.monotonic()
    assert finish(start("convert", data, folder / "two.zarr", "--workers", 2)) == (0, "")
    seconds = time.monotonic() - began
    files = tree_bytes(folder / "one.zarr")
    assert tree_bytes(folder / "two.zarr") == files
    return data, files, seconds


def check(store, files):
    assert files_of(store) == files
    report = verify_store(store, num_threads=1)
    assert (report.damaged, report.leftovers) == ({}, [])


@pytest.mark.parametrize("workers", [2, 4])
def test_killed_workers_of_convert(undisturbed, tmp_path, workers):
    """Each kill hits one worker; three of one task are refused, and the same command continues."""
    data, files, seconds = undisturbed
    rng, num_kills, codes = random.Random(workers), 0, []
    while num_kills < KILLS or 0 not in codes:
        store = tmp_path / f"{len(codes)}.zarr"
        words = ("convert", data, store, "--workers", workers)
        process = start(*words)
        for pause in (rng.uniform(0, seconds), *(rng.expovariate(3 / seconds) for _ in range(rng.randrange(3)))):
            time.sleep(pause)
            with contextlib.suppress(ProcessLookupError):  # one that has just ended
                if found := children(process.pid):
                    os.kill(rng.choice(found), signal.SIGKILL)
                    num_kills += 1
            if process.poll() is not None:
                seconds *= 0.8  # the machine may be less busy than when it was measured
        code, errors = finish(process)
        codes.append(code)
        assert code == 0 or (code == 3 and "was killed 3 times" in errors), errors
        if code:
            assert finish(start(*words))[0] == 0
        check(store, files)


def test_killed_processes_of_work(undisturbed, tmp_path):
    """Two shards; a process that is killed is started again by hand."""
    data, files, seconds = undisturbed
    rng, num_kills = random.Random(0), 0
    for number in itertools.count():
        store, file = tmp_path / f"{number}.zarr", tmp_path / "plan.json"
        assert finish(start("convert", data, store, "--plan", file))[0] == 0
        shards = [(file, "--shard", f"{k}/2") for k in range(2)]
        processes = [start("work", *shard) for shard in shards]
        for _ in range(rng.randint(1, 3)):
            time.sleep(rng.uniform(0, seconds / 2))
            hit = rng.randrange(2)
            if processes[hit].poll() is None:
                processes[hit].kill()
                num_kills += finish(processes[hit])[0] == -signal.SIGKILL
                processes[hit] = start("work", *shards[hit])
        assert [finish(process)[0] for process in processes] == [0, 0]
        command("commit", file, check=0)
        check(store, files)
        if num_kills >= KILLS:
            break


@pytest.mark.parametrize("kind", ["coordinator", "interrupt"])
def test_killed_or_interrupted_coordinators(undisturbed, tmp_path, kind):
    """The same command continues, also after several kills."""
    data, files, seconds = undisturbed
    rng, num_kills, number = random.Random(kind), 0, 0
    while num_kills < KILLS:
        store = tmp_path / f"{number}.zarr"
        process = start("convert", data, store, "--workers", 2)
        wait_until(store.exists)  # A signal to an interpreter that starts prints a traceback.
        time.sleep(rng.uniform(0, seconds))
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL if kind == "coordinator" else signal.SIGINT)
        code, errors = finish(process)
        num_kills += code != 0
        seconds *= 1 if code else 0.8  # the machine may be less busy than when it was measured
        assert code in (0, -signal.SIGKILL if kind == "coordinator" else 130)
        if code == 130:
            assert errors.count("\n") == 1 and "run the same command to continue" in errors
        if (store / "manifest").is_dir():
            assert verify_store(store, num_threads=1).damaged == {}
        if kind == "interrupt" or not code or num_kills == KILLS:
            wait_until(lambda: not any(map(is_running, workers)))
            assert finish(start("convert", data, store, "--workers", 2))[0] == 0
            check(store, files)
            number += 1
