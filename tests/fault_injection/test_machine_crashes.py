"""Crashes of the machine after every operation of a conversion, with unsynced data dropped or torn."""

import shutil

import pytest

import tracestore
from tests.fault_injection import disk_model
from tests.fault_injection.conftest import ALL, make_data, select_shard
from tests.fault_injection.driver import run_convert, small_commits
from tests.helpers import read_all, tree_bytes
from tracestore.errors import UsageError
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write import writer

pytestmark = pytest.mark.long


@pytest.fixture
def work(memory_folder, request, monkeypatch):
    """Return the input folder and an empty working folder."""
    small_commits(monkeypatch)
    folder = memory_folder / f"{request.node.name}"
    folder.mkdir()
    return make_data(folder / "data", num_files=3), folder


def record(arguments, folder):
    """Return the operations of a conversion below `folder`, with an entry after each completed commit."""
    with pytest.MonkeyPatch.context() as patch:
        recorder, original = disk_model.Recorder(folder, patch), writer.StoreWriter.commit

        def commit(own, **keywords):
            original(own, **keywords)
            recorder.log.append(("commit", own.manifest.num_traces))

        patch.setattr(writer.StoreWriter, "commit", commit)
        assert run_convert(arguments) == 0
    return recorder.log


def check_store(store, committed, truth):
    """Assert that the store holds all committed traces with their values."""
    try:
        opened = tracestore.open(store)
    except UsageError:
        assert committed == 0
        return
    with opened:
        found = read_all(opened)
    assert len(found) >= committed
    assert all(trace == truth[trace["question_id"]] for trace in found)
    assert verify_store(store, num_threads=1).damaged == {}


def check_crashes(data, folder, base, log, expected, truth, step, seeds, rerun_every):
    """Check the store after crashes at the sampled operations of a log. Return the number of states."""
    disk, cases = folder / "disk", 0
    rng = disk_model.random.Random(0)
    committed = [0]
    for op in log:
        committed.append(op[1] if op[0] == "commit" else committed[-1])
    for k, mode, seed, state in disk_model.crash_states(
        base, log, select_shard(disk_model.sample(log, step, rng)), seeds
    ):
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        disk_model.write_tree(state, disk)
        where = f"after operation {k} of {len(log)} ({log[k - 1][:2]}), mode {mode}, seed {seed}"
        try:
            if (disk / "s.zarr").exists():
                check_store(disk / "s.zarr", committed[k], truth)
            else:
                assert committed[k] == 0
            if cases % rerun_every == 0:
                assert run_convert([data, disk / "s.zarr"]) == 0
                assert tree_bytes(disk / "s.zarr") == expected
        except BaseException as error:
            raise AssertionError(f"{where}: {error}") from error
        cases += 1
    return cases


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("start", ["from nothing", "after a crash"])
def test_no_crash_loses_a_commit(work, start):
    data, folder = work
    store = folder / "first" / "s.zarr"
    store.parent.mkdir()
    log = record([data, store], store.parent)
    expected = tree_bytes(store)
    with tracestore.open(store) as opened:
        truth = {t["question_id"]: t for t in read_all(opened)}
    base = {}
    if start == "after a crash":
        # A kill in the middle of the third commit leaves this state; the next run first removes leftovers.
        half = next(k for k, op in enumerate(log) if op[0] == "link" and op[2].startswith("s.zarr/columns/0000000003-"))
        disk = disk_model.Disk()
        for op in log[: half + 1]:
            if op[0] != "commit":
                disk.do(*op)
        base = disk.after_crash("all", disk_model.random.Random(0))
        again = folder / "second"
        again.mkdir()
        disk_model.write_tree(base, again)
        log = record([data, again / "s.zarr"], again)
        log.insert(0, ("commit", 4))
    step, seeds = (1, 2) if ALL else (90, 1)
    cases = check_crashes(data, folder, base, log, expected, truth, step, seeds, 3 if ALL else 4)
    print(f"{start}: {cases} states of {len(log)} operations")
    assert cases


def test_the_commit_protocol_fails_without_its_syncs(work):
    """The disk model detects each missing fsync of the commit protocol."""
    data, folder = work
    store = folder / "first" / "s.zarr"
    store.parent.mkdir()
    log = record([data, store], store.parent)
    with tracestore.open(store) as opened:
        truth = {t["question_id"]: t for t in read_all(opened)}
    expected = tree_bytes(store)

    def without(match):
        return [op for op in log if not (op[0] == "fsync" and match(op[1]))]

    check_crashes(data, folder, {}, log, expected, truth, 200, 1, 1000)
    for match in (
        lambda path: path.endswith("/manifest"),
        lambda path: path == "s.zarr/segments",
        lambda path: path == "",
        lambda path: path.endswith("hidden_states/c/0/0"),
        lambda path: path.endswith("/small"),
    ):
        with pytest.raises(AssertionError):
            check_crashes(data, folder, {}, without(match), expected, truth, 10, 2, 10**9)
