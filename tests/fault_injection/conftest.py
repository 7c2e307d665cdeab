"""Fixtures of the fault injection tests: the shim, the input files and the driver process."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers import ROOT, make_trace, write_pickle, write_scores
from tests.machine import folder_in_memory

ALL = os.environ.get("TRACESTORE_FAULTS") == "all"
# "2/5" selects the third of five shards, so that several processes can divide the cases.
_SHARD, _SHARDS = map(int, os.environ.get("TRACESTORE_SHARD", "0/1").split("/"))


def select_shard(cases):
    """Return the cases that this process runs."""
    return list(cases)[_SHARD::_SHARDS]


def make_data(folder, num_files=4, per_file=2):
    """Write the input files and return their folder. The driver commits after each file."""
    folder.mkdir()
    traces = [make_trace(k, tokens=2 + k % 3) for k in range(num_files * per_file)]
    for k in range(num_files):
        write_pickle(folder / f"batch_{k}.pkl", traces[k * per_file : (k + 1) * per_file])
    write_scores(folder / "scores.csv", {t["question_id"]: k / 10 for k, t in enumerate(traces)})
    return folder


@pytest.fixture(scope="module")
def memory_folder():
    """Yield a folder, on tmpfs where there is one.

    The tests create and remove thousands of small stores, and neither the shim nor the disk model
    needs a real fsync.
    """
    with tempfile.TemporaryDirectory(dir=folder_in_memory(), prefix="tracestore-fault-injection-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """Compile the shim and return its path."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the shim with")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, source, "-o", library, "-ldl"], check=True)
    return library


class DriverProcess:
    """A driver process: sends it cases and returns its results."""

    def __init__(self, shim, folder):
        folder.mkdir(exist_ok=True)
        data = make_data(folder / "data")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault_injection.driver", shim, data, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "LD_PRELOAD": str(shim)},
        )

    def run(self, **case):
        """Run one case in the driver and return its result."""
        print(json.dumps(case), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the driver died in {case}"
        return json.loads(line)

    def close(self):
        """End the driver process."""
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def driver(shim, memory_folder):
    """Yield a driver process."""
    process = DriverProcess(shim, memory_folder / "driver")
    yield process
    process.close()
