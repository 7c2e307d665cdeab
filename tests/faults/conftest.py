"""What the tests of faults share: the shim, the files to convert, the driver."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers import ROOT, make_trace, write_pickle, write_scores

ALL = os.environ.get("TRACESTORE_FAULTS") == "all"
# "2/5": the third of five parts of all cases, to run them in several processes or sittings.
_PART, _PARTS = map(int, os.environ.get("TRACESTORE_PART", "0/1").split("/"))


def part_of(cases):
    """The part of the cases that this process is to run."""
    return list(cases)[_PART::_PARTS]


def make_data(folder, num_files=4, per_file=2):
    """Files to convert, each a commit of its own in the driver."""
    folder.mkdir()
    traces = [make_trace(k, tokens=2 + k % 3) for k in range(num_files * per_file)]
    for k in range(num_files):
        write_pickle(folder / f"batch_{k}.pkl", traces[k * per_file : (k + 1) * per_file])
    write_scores(folder / "scores.csv", {t["question_id"]: k / 10 for k, t in enumerate(traces)})
    return folder


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A folder in memory where there is one: thousands of small stores are made and removed,
    and neither the shim nor the model asks a disk to sync anything."""
    shared = Path("/dev/shm")
    if not (shared.is_dir() and os.access(shared, os.W_OK)):
        yield tmp_path_factory.mktemp("memory")
        return
    with tempfile.TemporaryDirectory(dir=shared, prefix="tracestore-faults-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the shim with")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, source, "-o", library, "-ldl"], check=True)
    return library


class DriverProcess:
    """Cases in, answers out."""

    def __init__(self, shim, folder):
        folder.mkdir(exist_ok=True)
        data = make_data(folder / "data")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.driver", shim, data, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "LD_PRELOAD": str(shim)},
        )

    def ask(self, **case):
        print(json.dumps(case), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the driver died in {case}"
        return json.loads(line)

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def driver(shim, memory):
    process = DriverProcess(shim, memory / "driver")
    yield process
    process.close()
