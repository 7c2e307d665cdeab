"""The process that commits tasks: the bytes that it moves, and two of them at a time."""

import collections
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import tracestore
from tests.helpers import ROOT, make_trace, read_all, write_pickle
from tests.machine import folder_in_memory
from tracestore.convert.options import ConvertOptions
from tracestore.errors import TracestoreError
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.pack import PackedTrace
from tracestore.tasks import commit_tasks, plan_tasks, write_task

ROUNDS = int(os.environ.get("TRACESTORE_COORDINATORS", "4"))
CALLS = "read,readv,pread64,preadv,preadv2,write,writev,pwrite64,pwritev,pwritev2,sendfile,splice,copy_file_range"
LINE = re.compile(r"([\d.]+) (\w+)\((.*)\) += (\d+)")


@pytest.fixture
def memory():
    """Yield a folder, on tmpfs where there is one."""
    with tempfile.TemporaryDirectory(dir=folder_in_memory(), prefix="tracestore-coordinators-") as folder:
        yield Path(folder)


def bytes_of_coordinator(logs, folder):
    """Return the bytes of the files below a folder that the first process has read and written behind its plan."""
    first = min(logs, key=lambda log: float(log.read_text().partition(" ")[0] or "inf"))
    threads, moved, planned_at = [first], collections.Counter(), None
    by_thread = {log.suffix: log for log in logs}
    lines = []
    for log in threads:
        for found in filter(None, map(LINE.match, log.read_text().splitlines())):
            at, name, arguments, result = found.groups()
            if "CLONE_THREAD" in arguments:
                threads.append(by_thread[f".{result}"])
            elif name.startswith("rename") and re.search(r"/receipts/\w+\.json\"", arguments):
                planned_at = float(at)
            elif name in CALLS.split(",") and f"<{folder}/" in arguments:
                lines.append((float(at), re.search(rf"<{folder}/([^>]*)>", arguments)[1], int(result)))
    for at, path, count in lines:
        if at > planned_at:
            moved[path] += count
    return moved


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(("shape", "num_traces"), [((33, 11, 4096), 176), ((30, 60, 800), 168)])
def test_the_coordinator_moves_metadata_only(memory, shape, num_traces):
    """Traces of 3 MB in two tasks of 256 MiB: it reads and writes nothing of sources and arrays, and little of metadata.

    The files of a task and a commit have 48 kB without a trace, and 1.3 kB a trace of 60 tokens. Receipts and rows.zip
    are mapped, and not counted.
    """
    rng = np.random.default_rng(0)
    (memory / "data").mkdir()
    for k in range(0, num_traces, 4):
        traces = [make_trace(k + i, layers=shape[0], tokens=shape[1], heads=9) for i in range(4)]
        for trace in traces:
            trace["hidden_states"] = list(rng.standard_normal(shape, "f4").astype("f2"))
        write_pickle(memory / "data" / f"{k:04d}.pkl", traces)
    words = ["strace", "-ff", "-y", "-ttt", "-s", "0", "-o", memory / "log"]
    words += ["-e", f"trace={CALLS},clone,clone3,execve,/^rename"]
    words += [sys.executable, "-m", "tracestore", "convert", memory / "data", memory / "s.zarr", "--workers", "2"]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    moved = bytes_of_coordinator(list(memory.glob("log.*")), memory)
    with tracestore.open(memory / "s.zarr") as store:
        assert len(store) == num_traces
        num_bytes = store.internals.manifest.num_bytes
    assert not [path for path in moved if path.startswith("data/") or "/c/" in path]
    print(f"{sum(moved.values()):,} of {num_bytes:,} bytes: {100 * sum(moved.values()) / num_bytes:.3f} %")
    assert 0 < sum(moved.values()) < 0.0005 * num_bytes, moved.most_common(10)


def at_the_same_time(*calls):
    """Call functions in processes that begin together; return the name of the error of each, "" for none."""
    ready, begin = os.pipe()
    children = []
    for call in calls:
        answer, reply = os.pipe()
        child = os.fork()
        if child == 0:
            error = "no error of tracestore"
            try:
                os.close(begin)
                os.read(ready, 1)
                call()
                error = ""
            except TracestoreError as raised:
                error = type(raised).__name__
            finally:
                os.write(reply, error.encode())
                os._exit(0)
        os.close(reply)
        children.append((child, answer))
    os.close(begin)
    os.close(ready)
    errors = []
    for child, answer in children:
        with os.fdopen(answer, "rb") as file:
            errors.append(file.read().decode())
        os.waitpid(child, 0)
    return errors


def committing(tasks, delay):
    def commit():
        time.sleep(delay)
        commit_tasks(tasks)

    return commit


def traces_of(numbers, seed):
    """Return traces, and those of odd numbers with content that depends on `seed`."""
    return [make_trace(k, tokens=3, seed=seed if k % 2 else 0) for k in numbers]


def written(folder, store, sources, **options):
    """Write sources, and the tasks that convert them into a store; return these."""
    folder.mkdir()
    for name, traces in sources.items():
        write_pickle(folder / name, traces)
    tasks = plan_tasks(folder, store, ConvertOptions(**options))
    for task in tasks:
        write_task(task)
    return tasks


def check_intact(path, leftovers=()):
    """Check every file; `leftovers` are the folders of what may be left: segments without a row that is stored."""
    report = verify_store(path, num_threads=1)
    assert report.damaged == {}
    assert {left.partition("/")[0] for left in report.leftovers} <= {*leftovers}, report.leftovers


@pytest.mark.long
def test_two_coordinators_of_one_plan(memory):
    """Each source is added once, whichever of them adds it."""
    rng = random.Random(1)
    for number in range(ROUNDS):
        store, data = memory / f"{number}.zarr", memory / f"data_{number}"
        sources = {f"{k}.pkl": traces_of(range(3 * k, 3 * k + 3), 0) for k in range(4)}
        tasks = written(data, store, sources)
        errors = at_the_same_time(committing(tasks, 0), committing(tasks, rng.choice([0, 0.01, 0.03, 0.06])))
        assert "" in errors and set(errors) <= {"", "UsageError"}, errors
        with tracestore.open(store) as opened:
            assert [trace.question_id for trace in opened] == [f"q{k}" for k in range(12)]
            assert [s.path for s in opened.internals.index.sources()] == list(sources)
        check_intact(store)
        assert plan_tasks(data, store) == []
        shutil.rmtree(store)


@pytest.mark.long
@pytest.mark.parametrize("on_conflict", ["error", "keep-first", "keep-last"])
def test_two_coordinators_of_different_plans_with_common_keys(memory, on_conflict):
    """Both commit, and --on-conflict decides about keys of both with different content, which are the odd ones."""
    rng = random.Random(on_conflict)
    for number in range(ROUNDS):
        store, plans, contents = memory / f"{number}.zarr", [], collections.defaultdict(set)
        for k, first in enumerate((0, 6)):
            numbers = range(first, first + 12)
            sources = {f"{k}_{j}.pkl": traces_of(numbers[3 * j : 3 * j + 3], k) for j in range(4)}
            if on_conflict == "error" and number % 2:  # no source with a key of different content
                sources = {
                    name: [t for t in traces if t["question_id"][-1] in "02468"] for name, traces in sources.items()
                }
            plans.append((written(memory / f"{number}_{k}", store, sources, on_conflict=on_conflict), sources))
            for name, traces in sources.items():
                for trace in traces:
                    contents[trace["question_id"]].add((name, trace["hidden_states"][0].tobytes()))
        delay = rng.choice([0, 0.01, 0.03, 0.06])
        errors = at_the_same_time(committing(plans[0][0], 0), committing(plans[1][0], delay))
        with tracestore.open(store) as opened:
            found, listed = read_all(opened), {s.path for s in opened.internals.index.sources()}
        ids = [trace["question_id"] for trace in found]
        assert len(set(ids)) == len(ids)
        for trace in found:
            states = {states for name, states in contents[trace["question_id"]] if name in listed}
            assert trace["hidden"][: 3 * 8 * 2] in states
        for error, (_, sources) in zip(errors, plans, strict=True):
            assert set(sources) <= listed or error in ("InvalidInputError", "LateConflictError"), (error, listed)
            assert error in ("", "InvalidInputError", "LateConflictError")
        is_refused = any(errors)
        assert is_refused == (on_conflict == "error" and number % 2 == 0)
        names = {trace: {name for name, _ in where} for trace, where in contents.items()}
        assert {q for q, where in names.items() if where & listed} == set(ids)
        check_intact(store, leftovers=["segments"])
        shutil.rmtree(store)


@pytest.mark.long
@pytest.mark.parametrize("num_states", [300, 2, 1])
def test_a_commit_makes_no_object_of_each_trace(tmp_path, monkeypatch, num_states):
    """The number of objects depends on that of the tasks, whether a source has 3 traces or 300, of as many states."""
    made, init = [], PackedTrace.__init__
    states = [make_trace(k, tokens=2)["hidden_states"] for k in range(num_states)]
    for count in (3, 300):
        sources = {
            f"{k}.pkl": [
                make_trace(1000 * k + i, tokens=2)
                | {"label": i % 2, "hidden_states": states[i] if k == 0 and i < num_states else states[0]}
                for i in range(count)
            ]
            for k in (0, 1)
        }
        tasks = written(tmp_path / str(count), tmp_path / f"{count}.zarr", sources)
        created = []
        with monkeypatch.context() as patch:
            patch.setattr(PackedTrace, "__init__", lambda self, *a, **k: created.append(self) or init(self, *a, **k))
            assert commit_tasks(tasks).num_traces == 2 * count
        made.append(len(created))
    assert made[0] == made[1] < 20
