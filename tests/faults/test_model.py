"""Crashes of the machine: every prefix of a conversion's writes, the unsynced dropped or torn."""

import shutil

import pytest

import tracestore
from tests.faults import model
from tests.faults.conftest import ALL, make_data, part_of
from tests.faults.driver import run_convert, small_commits
from tests.helpers import read_all, tree_bytes
from tracestore.errors import UsageError
from tracestore.ingest.forecast import SegmentPredictor
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write import writer

pytestmark = pytest.mark.long


@pytest.fixture
def work(memory, request, monkeypatch):
    small_commits(monkeypatch)
    folder = memory / f"{request.node.name}"
    folder.mkdir()
    return make_data(folder / "data", num_files=3), folder


def record(arguments, folder, ahead=False):
    """-> operations below `folder` of a conversion, with a mark after each commit that returned.
    `ahead`: two workers, and all that they pack goes into files that the segments take over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentPredictor, "begins_segment", lambda *_: ahead)
        recorder, original = model.Recorder(folder, patch), writer.StoreWriter.commit

        def commit(own):
            original(own)
            recorder.log.append(("commit", own.manifest.num_traces))

        patch.setattr(writer.StoreWriter, "commit", commit)
        assert run_convert([*arguments, "--workers", 2 if ahead else 1]) == 0
    assert any(op[0] == "rename" and "/.spool/" in op[1] for op in recorder.log) == ahead
    return recorder.log


def look(store, committed, truth):
    """Whatever was committed is there and every byte is right."""
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


def crash_everywhere(data, folder, base, log, expected, truth, step, seeds, again):
    disk, cases = folder / "disk", 0
    rng = model.random.Random(0)
    committed = [0]
    for op in log:
        committed.append(op[1] if op[0] == "commit" else committed[-1])
    for k, mode, seed, state in model.crash_states(base, log, part_of(model.sample(log, step, rng)), seeds):
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        model.put(state, disk)
        where = f"after operation {k} of {len(log)} ({log[k - 1][:2]}), mode {mode}, seed {seed}"
        try:
            if (disk / "s.zarr").exists():
                look(disk / "s.zarr", committed[k], truth)
            else:
                assert committed[k] == 0
            if cases % again == 0:
                assert run_convert([data, disk / "s.zarr", "--workers", 1]) == 0
                assert tree_bytes(disk / "s.zarr") == expected
        except BaseException as error:
            raise AssertionError(f"{where}: {error}") from error
        cases += 1
    return cases


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("start", ["from nothing", "after a crash"])
def test_every_crash(work, start, ahead):
    data, folder = work
    store = folder / "first" / "s.zarr"
    store.parent.mkdir()
    log = record([data, store], store.parent, ahead)
    expected = tree_bytes(store)
    with tracestore.open(store) as opened:
        truth = {t["question_id"]: t for t in read_all(opened)}
    base = {}
    if start == "after a crash":
        # As a kill in the middle of the third commit leaves it: the next run tidies up first.
        half = next(k for k, op in enumerate(log) if op == ("rename", "s.zarr/columns/.tmp-0000000003", *op[2:]))
        disk = model.Disk()
        for op in log[: half + 1]:
            if op[0] != "commit":
                disk.do(*op)
        base = disk.after_crash("all", model.random.Random(0))
        again = folder / "second"
        again.mkdir()
        model.put(base, again)
        log = record([data, again / "s.zarr"], again, ahead)
        log.insert(0, ("commit", 4))
    step, seeds = (1, 2) if ALL else (90, 1)
    cases = crash_everywhere(data, folder, base, log, expected, truth, step, seeds, 3 if ALL else 4)
    print(f"{start}, ahead {ahead}: {cases} states of {len(log)} operations")
    assert cases


@pytest.mark.parametrize("ahead", [False, True])
def test_the_model_forgets_what_was_not_synced(work, ahead):
    """Without its syncs the protocol fails in the model: it is the syncs that are tested."""
    data, folder = work
    store = folder / "first" / "s.zarr"
    store.parent.mkdir()
    log = record([data, store], store.parent, ahead)
    with tracestore.open(store) as opened:
        truth = {t["question_id"]: t for t in read_all(opened)}
    expected = tree_bytes(store)

    def without(match):
        return [op for op in log if not (op[0] == "fsync" and match(op[1]))]

    crash_everywhere(data, folder, {}, log, expected, truth, 200, 1, 1000)
    for match in (
        lambda path: path.endswith("/manifest"),
        lambda path: path == "s.zarr/segments",
        lambda path: path == "",
        lambda path: path.endswith("hidden_states/c/0/0"),
        lambda path: path.endswith("/part"),
    ):
        with pytest.raises(AssertionError):
            crash_everywhere(data, folder, {}, without(match), expected, truth, 10, 2, 10**9)
