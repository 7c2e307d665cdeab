"""Tasks of stores on object stores, and of stores that are replaced."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import tracestore
from tests.helpers import (
    ROOT,
    command,
    convert,
    error_of,
    make_trace,
    make_traces,
    read_all,
    tree_bytes,
    write_pickle,
    write_store,
)
from tests.store.remote.conftest import proxy, remote, server
from tests.tasks.test_tasks import files_of, run_tasks
from tests.tiers import long
from tracestore.convert import cutting
from tracestore.convert.options import ConvertOptions
from tracestore.errors import InvalidInputError, UsageError
from tracestore.store.format import paths
from tracestore.store.io import local_folders
from tracestore.store.maintain.clean import clean_store
from tracestore.store.maintain.verify import verify_store
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.write.plan_files import open_plan_files
from tracestore.tasks import commit_tasks, plan_tasks, write_task
from tracestore.tasks.committing import files_of_plans
from tracestore.tasks.convert_files import convert_files

__all__ = ["proxy", "remote", "server"]
FAULTS = ["lost", "503", "cut"]


@pytest.fixture
def few(data):
    """Return the folder with three of the sources: a task sends an object store 30 requests."""
    for path in sorted(data.iterdir())[3:]:
        path.unlink()
    return data


@pytest.fixture(params=["folder", "objects"])
def place(request, tmp_path, remote):
    """Return the path or the URL of a store that does not exist."""
    return str(tmp_path / "s.zarr") if request.param == "folder" else remote


def is_remote(store):
    return "://" in str(store)


def seen(store):
    """Return the bytes of the files that readers of a store see, without the hint for web servers."""
    if not is_remote(store):
        return files_of(store)
    objects = ObjectStore(store)
    names = (n for n in objects.list_recursive("") if not n.startswith((paths.RECEIPTS, "manifest/newest")))
    return {name: objects.read(name) for name in names}


def named(store):
    """Return what `seen` does of the files that the newest generation names."""
    with tracestore.open(store) as found:
        internals = found.internals
        segments = [internals.segment(k) for k in range(internals.manifest.num_segments)]
        entries = [e for s in segments for e in (s.rows, *s.entries.values())] + internals.manifest.small_files()
        return {entry.path: internals.files.read(entry) for entry in entries}


def check_same(store, expected):
    """Assert that a store has the traces of another one, each once, and no damage."""
    with tracestore.open(store) as one, tracestore.open(expected) as other:
        assert repr(read_all(one)) == repr(read_all(other))
    assert verify_store(store).damaged == {}


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, *long(2, 4)])
def test_the_bytes_do_not_depend_on_the_place_and_the_number_of_workers(few, tmp_path, place, workers):
    run_tasks(few, tmp_path / "one.zarr")
    if workers > 1:
        convert(few, place, "--workers", workers)
    else:
        file = tmp_path / "plan.json"
        convert(few, place, "--plan", file)
        assert "0 of 3 tasks" in command("status", file, check=0).stdout
        for _ in range(2):
            command("work", file, check=0)
        assert "3 of 3 tasks" in command("status", file, check=0).stdout
        command("commit", file, check=0)
    assert seen(place) == files_of(tmp_path / "one.zarr")
    assert verify_store(place).damaged == {}


@pytest.mark.long
@pytest.mark.parametrize("is_new", [False, *long(True)])
@pytest.mark.parametrize("words", [["--workers", 2], *long(["--plan"], ["--dask", "local", "--workers", 2])])
def test_tasks_replace_a_store(few, tmp_path, place, words, is_new):
    if not is_new:
        write_store(place, make_traces(3, seed=9))
    run_tasks(few, tmp_path / "one.zarr")
    if words == ["--plan"]:
        file = tmp_path / "plan.json"
        convert(few, place, "--overwrite", "--plan", file)
        for name in ("work", "commit"):
            if not is_new:
                with tracestore.open(place) as store:
                    assert len(store) == 3
            command(name, file, check=0)
    else:
        convert(few, place, "--overwrite", *words)
    check_same(place, tmp_path / "one.zarr")
    assert set(named(place).values()) >= {d for p, d in named(tmp_path / "one.zarr").items() if "segments/" in p}
    if not is_remote(place):
        assert not [path for path in tree_bytes(tmp_path) if path.startswith(".tmp-")]
        assert verify_store(place).leftovers == []
    convert(few, place, "--overwrite", "--workers", 2)  # again
    check_same(place, tmp_path / "one.zarr")


@pytest.mark.parametrize(
    ("name", "words"), [("o", ["--overwrite"]), ("first", ["--overwrite"]), ("o", ["--on-conflict", "keep-last"])]
)
def test_a_plan_whose_left_out_sources_the_store_has_no_longer_is_refused(few, tmp_path, place, name, words):
    first, same = write_pickle(few / "first.pkl", [make_trace(99)]), ("--on-conflict", "keep-last")
    convert(first, place, *same)
    tasks = plan_tasks(few, place, ConvertOptions(on_conflict="keep-last"))
    for task in tasks:
        write_task(task)
    other = make_trace(99) | {"generated_answer_clean": "other"}
    convert(write_pickle(tmp_path / f"other/{name}.pkl", [other]), place, *words)
    before = seen(place)
    with pytest.raises((InvalidInputError, UsageError), match="plan again"):
        commit_tasks(tasks)
    assert seen(place).items() >= before.items()
    assert "13 traces in" in convert(few, place, *same).stdout
    with tracestore.open(place) as store:
        assert store["q99"].answer == "answer 99 ✓"


@pytest.mark.long
def test_a_refused_source_leaves_the_store_that_is_replaced(data, tmp_path):
    store = write_store(tmp_path / "s.zarr", make_traces(3, seed=9))
    (data / "batch_3.pkl.gz").write_bytes(b"damaged")
    before = files_of(store)
    assert "batch_3" in error_of("convert", data, store, "--overwrite", "--workers", 2, code=3)
    assert files_of(store).items() >= before.items()
    (data / "batch_3.pkl.gz").unlink()
    convert(data, store, "--overwrite", "--workers", 2)
    run_tasks(data, tmp_path / "one.zarr")
    check_same(store, tmp_path / "one.zarr")


@pytest.mark.long
def test_clean_keeps_what_a_plan_on_an_object_store_needs(few, remote):
    tasks = plan_tasks(few, remote)
    for task in tasks:
        write_task(task)
    for kept, count in ((files_of_plans(remote), 0), ((), 7)):
        assert len(clean_store(remote, older_than_s=-5, dry_run=True, kept=kept).removed) == count
    assert clean_store(remote, older_than_s=-5, kept=files_of_plans(remote)).removed == []
    assert commit_tasks(tasks).num_traces == 12


# Requests between those that are tried; `make torture` tries all.
STEP = 1 if os.environ.get("TRACESTORE_FAULTS") == "all" else 6


class Killed(BaseException):
    """The process is killed: nothing that it sends arrives any more."""


@pytest.fixture
def kill_at(monkeypatch):
    """Return a function that lets this process be killed before or after a request; without a number it is not."""
    retry, lock = ObjectStore.retry, threading.Lock()
    at = {"number": -1, "is_done": False, "count": 0}

    def counted(self, what, call, *more):
        with lock:
            number, at["count"] = at["count"], at["count"] + 1
        if 0 <= at["number"] < number or (number == at["number"] and not at["is_done"]):
            raise Killed
        found = retry(self, what, call, *more)
        if number == at["number"]:
            raise Killed
        return found

    monkeypatch.setattr(ObjectStore, "retry", counted)
    return lambda number=-1, is_done=False: at.update(number=number, is_done=is_done, count=0)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.long
def test_a_coordinator_on_an_object_store_is_killed_at_each_request(few, tmp_path, remote, kill_at, overwrite, is_done):
    run_tasks(few, tmp_path / "one.zarr")
    number = most = 0
    while number <= most:
        store = f"{remote}{number}"
        if overwrite:
            write_store(store, make_traces(2, seed=9))
        tasks = plan_tasks(few, store, ConvertOptions(overwrite=overwrite))
        for task in tasks:
            write_task(task)
        kill_at(number, is_done)
        try:
            commit_tasks(tasks)
        except Killed:
            most = number + STEP
        kill_at()
        convert(few, store, *["--overwrite"] * overwrite, "--workers", 2)
        check_same(store, tmp_path / "one.zarr")
        number += STEP
    assert most > 20


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.long
def test_a_fault_at_each_put_of_tasks(data, tmp_path, proxy, remote, fault):
    """Lose nothing and apply nothing twice: plan, segments, receipts and commit."""
    for path in sorted(data.iterdir())[2:]:
        path.unlink()
    run_tasks(data, tmp_path / "one.zarr")
    number = most = 0
    while number <= most:
        puts = []

        def at(count, method, path, puts=puts, number=number):
            if method != "PUT":
                return None
            puts.append(path)
            return fault if len(puts) == number + 1 else None

        proxy.fault = at
        store = f"{remote}{number}"
        tasks = plan_tasks(data, store)
        for task in tasks:
            write_task(task)
        assert commit_tasks(tasks).generation == 2
        proxy.fault = lambda *_: None
        assert seen(store) == files_of(tmp_path / "one.zarr")
        most, number = len(puts) - 1, number + STEP
    assert most > 20


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.long
def test_a_process_that_writes_a_folder_is_killed(few, tmp_path, overwrite):
    """The path holds the old store or the new one, and the same command completes the new one."""
    run_tasks(few, tmp_path / "one.zarr")
    write_store(tmp_path / "old.zarr", make_traces(2, seed=9))
    number, is_killed = 0, True
    while is_killed:
        store = tmp_path / f"{number}" / "s.zarr"
        store.parent.mkdir()
        if overwrite:
            shutil.copytree(tmp_path / "old.zarr", store)
        is_killed = kill_in_child(number, lambda store=store: run_tasks(few, store, overwrite=overwrite))
        if overwrite:
            with tracestore.open(store) as found:
                assert len(found) in (2, 12)
        convert(few, store, *["--overwrite"] * overwrite)
        check_same(store, tmp_path / "one.zarr")
        assert [path.name for path in store.parent.iterdir()] == ["s.zarr"]
        shutil.rmtree(store.parent)
        number += 5 if STEP == 1 else 29
    assert number > 100


def kill_in_child(number, run):
    """Run a function in a child that is killed at its n-th call that changes a folder; return whether it was."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    left = [number]

    def counted(call):
        def wrapped(*args, **options):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **options)

        return wrapped

    for name in ("rename", "link", "unlink", "mkdir", "rmdir", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    run()
    os._exit(0)


@pytest.mark.long
def test_two_coordinators_on_an_object_store_add_each_source_once(few, tmp_path, remote):
    file = tmp_path / "plan.json"
    convert(few, remote, "--plan", file)
    command("work", file, check=0)
    words = [sys.executable, "-m", "tracestore", "commit", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(words, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert 0 in [process.returncode for process in processes], errors
    with tracestore.open(remote) as store:
        assert len(store) == 12 and len(list(store.internals.index.sources())) == 3
    assert verify_store(remote).damaged == {}


def test_of_conditional_puts_at_the_same_time_one_wins(remote):
    objects = ObjectStore(remote)
    with ThreadPoolExecutor(32) as pool:
        won = list(pool.map(lambda k: objects.put_if_absent("manifest/0000000001", b"%d" % k), range(32)))
    assert won.count(True) == 1 and objects.read("manifest/0000000001") == b"%d" % won.index(True)


@pytest.mark.long
def test_the_commit_of_a_task_sends_few_requests(data, tmp_path, proxy, remote, monkeypatch):
    """Opening with an empty cache included; each further part of the index adds 2, for its index and its columns."""
    for k, file in enumerate(sorted(data.iterdir())[:4]):
        tasks = plan_tasks(file, remote)
        write_task(tasks[0])
        monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / f"cache{k}"))
        proxy.requests.clear()
        assert commit_tasks(tasks).num_traces == 4 * (k + 1)
        num_parts = k.bit_count()
        assert sum(proxy.requests.values()) <= 14 + 2 * num_parts, proxy.requests
        assert not [path for method, path in proxy.requests if method == "HEAD"]


@pytest.mark.long
def test_only_clean_lists_segments(data, proxy, remote, monkeypatch):
    listed, list_objects = [], ObjectStore.list_objects
    monkeypatch.setattr(ObjectStore, "list_objects", lambda self, path: listed.append(path) or list_objects(self, path))
    monkeypatch.setattr(cutting, "MIN_BYTES", 1 << 30)
    convert(data, remote)
    for words in ([], ["--overwrite"]):
        tasks = plan_tasks(data, remote, ConvertOptions(overwrite=bool(words)))
        for task in tasks:
            write_task(task)
        commit_tasks(tasks)
    of_one_segment = {path for path in listed if re.fullmatch("segments/[0-9a-f]{32}", path)}
    assert of_one_segment and set(listed) - of_one_segment == {"manifest", paths.RECEIPTS}
    clean_store(remote, older_than_s=0)
    assert "" in listed


@pytest.mark.long
@pytest.mark.parametrize("is_done", [False, True])
def test_a_plan_removes_the_receipts_that_no_plan_names(data, place, is_done):
    """Those of a commit that is done stay until then, for another coordinator."""
    first, second = (plan_tasks(file, place) for file in sorted(data.iterdir())[:2])
    for task in (*first, *second):
        write_task(task)
    if is_done:
        commit_tasks(first)
    files = open_plan_files(place)
    assert {paths.receipt(task.hash) for task in (*first, *second)} <= files.times().keys()
    third = plan_tasks(sorted(data.iterdir())[2], place)
    named = {paths.plan(task.plan) for task in (*second, *third)} | {paths.receipt(task.hash) for task in second}
    if not is_done:
        named |= {paths.plan(first[0].plan), paths.receipt(first[0].hash)}
    assert files.times().keys() == named
    assert commit_tasks(second).num_traces == 4 + 4 * is_done


@pytest.mark.parametrize("num_lost", [0, 1, 2, 3])
def test_a_writer_completes_what_a_killed_one_has_left_undone(remote, proxy, num_lost):
    """`manifest/newest` is put last: a writer that finds its tag asks for nothing else."""
    write_store(remote, make_traces(1))
    objects, copy = ObjectStore(remote), "index/0000000001.manifest"
    root, number = objects.read("zarr.json"), objects.read("manifest/newest")
    objects.delete(["manifest/newest", copy, "zarr.json"][:num_lost])
    proxy.requests.clear()
    with tracestore.create(remote, append=True):
        asked = [path for method, path in proxy.requests if method in ("GET", "HEAD") and "newest" in path]
    assert bool(asked) == (num_lost > 0)
    assert objects.read(copy) == objects.read("manifest/0000000001")
    assert (objects.read("zarr.json"), objects.read("manifest/newest")) == (root, number)
    with tracestore.create(remote, append=True) as writer:
        writer.append(make_trace(7))
    assert objects.read("manifest/newest") == b"0000000002\n"


@pytest.mark.long
def test_scratch_of_writers(data, tmp_path, remote, monkeypatch):
    """Writers use the folder that is named, and the next one removes what a killed one has left."""
    monkeypatch.setenv("TRACESTORE_SCRATCH", str(tmp_path / "scratch"))
    scratch = tmp_path / "scratch" / f"tracestore-{os.getuid()}"
    left = scratch / f"{paths.TEMPORARY_PREFIX}{'0' * 16}" / "00000001"
    left.mkdir(parents=True)
    convert(data, remote)
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "cache" / ".writing").exists()


@pytest.mark.long
def test_segments_are_synchronized_if_their_files_stay(data, tmp_path, remote, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2]))
    for store, names in ((remote, set()), (tmp_path / "s.zarr", {"rows.zip", "0"})):
        tasks = plan_tasks(data, store)
        for task in tasks:
            write_task(task)
        assert commit_tasks(tasks).num_traces == convert_files(data, f"{store}-2").num_traces == 24
        assert synced & {"rows.zip", "0"} == names


@pytest.mark.long
def test_scratch_in_memory_counts_as_memory(data, tmp_path, remote, monkeypatch):
    """The budget covers the segments that wait for their upload, of a process and of each worker."""
    monkeypatch.setattr(local_folders, "is_in_memory", lambda folder: "disk" not in str(folder))
    monkeypatch.setattr(local_folders, "_LEAST_BUDGET", (1 << 30) - (2 << 10))
    with pytest.raises(UsageError, match=r"\.writing.* is in memory, and .* of segments count as such"):
        convert_files(data, remote, memory_budget=1 << 30)
    assert convert_files(data, remote, memory_budget=1 << 30, dry_run=True).num_sources_refused == 0
    tasks = plan_tasks(data, remote)
    with pytest.raises(UsageError, match="set TRACESTORE_SCRATCH to a folder on a disk"):
        write_task(tasks[0], memory_budget=1 << 30)
    assert write_task(tasks[0], memory_budget=1 << 31).num_sources == 1
    convert(data, tmp_path / "s.zarr", "--memory-budget", "64MiB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACESTORE_SCRATCH", str(tmp_path / "disk"))
        assert convert_files(data, remote, memory_budget=1 << 30).num_traces == 24
