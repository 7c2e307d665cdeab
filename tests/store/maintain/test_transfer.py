"""The command merge takes over whole segments, and the result equals that of copying."""

import errno
import os
import shutil
from unittest import mock

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, make_trace, make_traces, read_all, tree_bytes, write_pickle, write_store
from tests.store.format.store_kinds import assert_same, expected
from tests.tiers import long
from tracestore.errors import CorruptStoreError, DiskFullError, InvalidInputError
from tracestore.store.io import fsio
from tracestore.store.maintain import transfer
from tracestore.store.maintain.merge import merge_stores
from tracestore.store.maintain.verify import verify_store


def inodes(store):
    """Return the inodes of the files of all segments."""
    return {path.stat().st_ino for path in (store / "segments").rglob("*") if path.is_file()}


def linked(store, *sources):
    """Return the numbers of files of segments that a store shares with others, and that it does not."""
    own, others = inodes(store), set().union(*map(inodes, sources))
    return len(own & others), len(own - others)


def merge_by_copying(sources, destination, **options):
    with mock.patch.object(transfer, "_whole_segments", lambda *_: {}):
        return merge_stores(sources, destination, **options)


def assert_equal(one, other):
    """Assert that two stores have the same traces in the same order, scores and accounts, and are intact."""
    for k, (mine, theirs) in enumerate(zip(expected(one), expected(other), strict=True)):
        assert_same(theirs, mine, f"trace {k}")
    left_out = {"path", "bytes", "num_segments", "generation"}
    with tracestore.open(one) as a, tracestore.open(other) as b:
        assert list(a.internals.index.sources()) == list(b.internals.index.sources())
        infos = [{k: v for k, v in store.info().items() if k not in left_out} for store in (a, b)]
        assert infos[0] == infos[1]
        assert np.array_equal(a.targets(0.5), b.targets(0.5), equal_nan=True)
    for path in (one, other):
        report = verify_store(path, num_threads=1)
        assert report.damaged == {} and report.leftovers == []


@pytest.fixture
def stores(tmp_path):
    """Two stores of different traces, in two segments each."""
    for k, name in enumerate(("one.zarr", "two.zarr")):
        write_store(tmp_path / name, make_traces(12)[6 * k : 6 * k + 6], score=lambda k: k / 10, commit_after=[2])
    return tmp_path / "one.zarr", tmp_path / "two.zarr"


def batches(path):
    loader = tracestore.TraceLoader(path, view="graph", batch_size=5, seed=3)
    return [(b.question_id, b.x.clone(), b.edge_index.clone(), b.edge_attr.clone()) for b in loader]


@pytest.mark.long
def test_whole_segments_are_linked_and_stay_when_the_sources_go(stores, tmp_path):
    merge_by_copying(stores, tmp_path / "copied.zarr")
    merge_stores(stores, tmp_path / "m.zarr")
    assert linked(tmp_path / "m.zarr", *stores) == (4 * 8, 0)
    with tracestore.open(tmp_path / "m.zarr") as store:
        assert store.info()["num_segments"] == 4
    for path in stores:
        shutil.rmtree(path)
    assert_equal(tmp_path / "m.zarr", tmp_path / "copied.zarr")
    for one, other in zip(batches(tmp_path / "m.zarr"), batches(tmp_path / "copied.zarr"), strict=True):
        assert one[0] == other[0] and all(a.equal(b) for a, b in zip(one[1:], other[1:], strict=True))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_segments_of_another_codec_are_copied(stores, tmp_path, codec):
    merge_stores(stores, tmp_path / "m.zarr", codec=codec)
    assert (linked(tmp_path / "m.zarr", *stores)[0] > 0) == (codec == "none")
    assert len(tracestore.open(tmp_path / "m.zarr")) == 12


@pytest.mark.parametrize("chosen", [[0, 1, 2], [0, 1, 3, 4, 5], [3, 4], [0, 5]])
def test_segments_are_copied_if_some_of_their_traces_are_not_wanted(stores, tmp_path, chosen):
    options = {"chosen": [np.array(chosen)]}
    merge_stores(stores[:1], tmp_path / "m.zarr", **options)
    merge_by_copying(stores[:1], tmp_path / "copied.zarr", **options)
    whole = sum(set(segment) <= set(chosen) for segment in ({0, 1, 2}, {3, 4, 5}))
    assert linked(tmp_path / "m.zarr", *stores)[0] == 8 * whole
    assert_equal(tmp_path / "m.zarr", tmp_path / "copied.zarr")


@pytest.mark.long
def test_segments_with_a_trace_that_exists_are_copied(stores, tmp_path):
    """The destination or an earlier source has it."""
    traces, third = make_traces(12), tmp_path / "three.zarr"
    write_store(third, [traces[7], make_trace(12)])
    for merge, name in ((merge_stores, "m.zarr"), (merge_by_copying, "copied.zarr")):
        write_store(tmp_path / name, traces[1:2])
        report = merge([*stores, third], tmp_path / name)
        assert (report.num_traces_new, report.num_duplicates) == (12, 2)
    assert linked(tmp_path / "m.zarr", *stores)[0] == 3 * 8 and linked(tmp_path / "m.zarr", third)[0] == 0
    assert_equal(tmp_path / "m.zarr", tmp_path / "copied.zarr")


def test_a_conflict_keeps_the_sources_before_it(stores, tmp_path):
    other = write_store(tmp_path / "other.zarr", [make_trace(20), make_trace(8, tokens=9, seed=5)])
    with pytest.raises(InvalidInputError, match="different content"):
        merge_stores([*stores, other], tmp_path / "m.zarr")
    assert tracestore.open(tmp_path / "m.zarr").question_ids == [*(f"q{k}" for k in range(12)), "q20"]
    assert linked(tmp_path / "m.zarr", *stores)[0] == 4 * 8 and verify_store(tmp_path / "m.zarr").damaged == {}


@pytest.mark.long
def test_another_writer_adds_the_same_traces(stores, tmp_path, monkeypatch):
    """Before the merge has taken their segment over, and before it commits."""
    traces, path, append = make_traces(12), tmp_path / "m.zarr", transfer.Transfer.append

    def appending(self, index):
        if self._store.question_ids[index] == "q8":
            with tracestore.create(path, append=True) as writer:
                writer.append(traces[9])
                writer.append(traces[0])
        return append(self, index)

    monkeypatch.setattr(transfer.Transfer, "append", appending)
    write_store(path, [make_trace(30)])
    merge_stores(stores, path)
    with tracestore.open(path) as store:
        assert sorted(store.question_ids) == sorted([*(f"q{k}" for k in range(12)), "q30"])
        found = {t["question_id"]: t["hidden"] for t in read_all(store)}
    assert all(found[t["question_id"]] == np.stack(t["hidden_states"]).tobytes() for t in traces)
    report = verify_store(path)
    assert report.damaged == {} and report.leftovers == []


def test_sources_on_another_file_system_are_copied_and_compared(stores, tmp_path, monkeypatch):
    def refuse(source, path, **_):
        if "/segments/" in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return link(source, path)

    link = os.link
    monkeypatch.setattr(os, "link", refuse)
    merge_stores(stores, tmp_path / "m.zarr")
    assert linked(tmp_path / "m.zarr", *stores) == (0, 4 * 8)
    shared = [tree_bytes(path / "segments") for path in stores]
    assert tree_bytes(tmp_path / "m.zarr" / "segments") == shared[0] | shared[1]
    file = next((stores[1] / "segments").glob("*/hidden_states/c/0/0"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="hidden_states/c/0/0: checksum mismatch"):
        merge_stores(stores, tmp_path / "n.zarr")
    assert not (tmp_path / "n.zarr").exists() or not any((tmp_path / "n.zarr").glob(".tmp-*"))


def test_damage_of_a_source_is_found(stores, tmp_path):
    """Sizes and rows.zip are compared; a flipped bit in a linked array is found by verify as in the source."""
    rows = next((stores[0] / "segments").glob("*/rows.zip"))
    large = next((stores[1] / "segments").glob("*/attention/c/0"))
    for file, change in ((rows, 200), (large, None)):
        intact = file.read_bytes()
        file.chmod(0o644)
        damaged = bytearray(intact)
        damaged[change or 0] ^= 1
        file.write_bytes(damaged if change else intact[:-1])
        with pytest.raises(CorruptStoreError, match=file.name if change else "attention/c/0: "):
            merge_stores(stores, tmp_path / "m.zarr", overwrite=True)
        file.write_bytes(intact)
    file.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
    merge_stores(stores, tmp_path / "m.zarr", overwrite=True)
    assert any("attention/c/0" in path for path in verify_store(tmp_path / "m.zarr").damaged)


@pytest.mark.long
def test_a_segment_of_another_trace_than_the_index_says_is_refused(stores, tmp_path, monkeypatch):
    with tracestore.open(stores[0]) as store:
        index = type(store.internals.index)
    monkeypatch.setattr(index, "question_ids", lambda self, indices: [f"x{k}" for k in indices])
    with pytest.raises(CorruptStoreError, match="row 0 has another key than in the index"):
        merge_stores(stores[:1], tmp_path / "m.zarr")


@pytest.mark.long
def test_sources_that_share_segments_are_committed_together(tmp_path, monkeypatch):
    """Two files in a segment, and one file in two segments."""
    for k in range(4):
        write_pickle(tmp_path / "data" / f"{k}.pkl", make_traces(12)[3 * k : 3 * k + 3])
    convert(tmp_path / "data", tmp_path / "s.zarr")
    monkeypatch.setattr("tracestore.store.maintain.merge.COMMIT_BYTES", 1)
    merge_stores([tmp_path / "s.zarr"], tmp_path / "m.zarr")
    with tracestore.open(tmp_path / "m.zarr") as store:
        assert store.generation == 1
    assert linked(tmp_path / "m.zarr", tmp_path / "s.zarr") == (8, 0)
    merge_by_copying([tmp_path / "s.zarr"], tmp_path / "c.zarr")
    assert_equal(tmp_path / "m.zarr", tmp_path / "c.zarr")


CALLS = ("link", "rename", "mkdir", "fsync", "unlink")


def merge_with_a_fault(stores, path, at, error):
    """Merge in a child that is killed, or gets an error, at a call. Return the exit code: 9 killed, 4 no space."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def counted(call):
        def counting(*args, **options):
            nonlocal count
            count += 1
            if count == at:
                if error is None:
                    os._exit(9)
                raise OSError(error, os.strerror(error))
            return call(*args, **options)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    fsio.rename_exclusive = counted(fsio.rename_exclusive)
    try:
        with fsio.map_os_errors(path):  # As the command does.
            merge_stores(stores, path)
        os._exit(0)
    except DiskFullError:
        os._exit(4)
    finally:
        os._exit(1)


@pytest.mark.long
@pytest.mark.parametrize("error", [None, errno.ENOSPC])
@pytest.mark.parametrize("step", [23, *long(1)])
def test_a_kill_or_a_full_disk_at_each_call(tmp_path, error, step):
    """The store stays intact, and the same merge completes it."""
    stores = [tmp_path / "one.zarr", tmp_path / "two.zarr"]
    for k, store in enumerate(stores):
        convert(write_pickle(tmp_path / f"{k}.pkl", make_traces(6)[3 * k : 3 * k + 3]), store)
    merge_stores(stores, tmp_path / "m.zarr")
    assert linked(tmp_path / "m.zarr", *stores) == (2 * 8, 0)
    codes = []
    for at in range(1, 1000, step):
        path = tmp_path / f"{at}.zarr"
        codes.append(merge_with_a_fault(stores, path, at, error))
        if (path / "manifest").is_dir() and any((path / "manifest").iterdir()):
            assert verify_store(path, num_threads=1).damaged == {}
        merge_stores(stores, path)
        assert tree_bytes(path) == tree_bytes(tmp_path / "m.zarr"), at
        shutil.rmtree(path)
        if codes[-1] == 0:
            break
    assert codes.count(0) == 1 and len(codes) > 100 / step and set(codes[:-1]) <= {9 if error is None else 4}
