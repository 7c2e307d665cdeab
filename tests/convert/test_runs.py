"""Sources that begin a run: the thread that reads one writes its segments."""

import errno
import os
import shutil

import pytest

import tracestore
from tests.helpers import convert, error_of, make_trace, read_all, tree_bytes, write_pickle
from tracestore.convert import cutting
from tracestore.store.format import paths
from tracestore.store.io import shard_writer
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.pending import SegmentsAhead
from tracestore.store.write.writer import StoreWriter


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for k in range(4):
        traces = [make_trace(10 * k + i, tokens=40, dim=512) for i in range(8)]
        write_pickle(folder / f"{k}.pkl{['', '.gz'][k % 2]}", traces)
    return folder


@pytest.fixture
def data(tmp_path, monkeypatch, written):
    """A folder of files of which each is a run."""
    monkeypatch.setattr(cutting, "MIN_BYTES", 1)
    return shutil.copytree(written, tmp_path / "data")


def check(store, num_traces):
    with tracestore.open(store) as opened:
        assert len(read_all(opened)) == num_traces
    report = verify_store(store, num_threads=1)
    assert report.damaged == {} and report.leftovers == []
    assert not any(name.startswith(paths.TEMPORARY_PREFIX) for name in os.listdir(store))


@pytest.mark.long
def test_segments_are_split_as_by_the_writer(data, tmp_path, monkeypatch):
    """With a codec the writer writes all segments."""
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "split_bytes", 400_000)
    written = []
    append = SegmentsAhead.append
    monkeypatch.setattr(SegmentsAhead, "append", lambda self, trace: written.append(trace) or append(self, trace))
    convert(data, tmp_path / "one.zarr")
    assert len(written) == 32
    monkeypatch.setattr("tracestore.convert.runner.Conversion._segments_of", lambda *_: None)
    convert(data, tmp_path / "other.zarr")
    assert len(written) == 32
    assert tree_bytes(tmp_path / "one.zarr") == tree_bytes(tmp_path / "other.zarr")
    check(tmp_path / "one.zarr", 32)
    assert tracestore.open(tmp_path / "one.zarr").internals.manifest.num_segments > 4


@pytest.mark.long
@pytest.mark.parametrize("bad", [None, 0, 1, 2, 3])
def test_the_first_source_of_a_run_is_written_ahead(data, tmp_path, monkeypatch, bad):
    """The others of the run follow it in its segment, also if it is refused."""
    monkeypatch.setattr(cutting, "MIN_BYTES", sum(file.stat().st_size for file in data.iterdir()) // 2)
    if bad is not None:
        traces = [make_trace(50 + i, tokens=40, dim=512) for i in range(7)]
        write_pickle(data / f"{bad}.pkl{['', '.gz'][bad % 2]}", [*traces, {"question_id": "bad"}])
    stores, written, append = [tmp_path / "one.zarr", tmp_path / "other.zarr"], [], SegmentsAhead.append
    monkeypatch.setattr(SegmentsAhead, "append", lambda self, trace: written.append(trace) or append(self, trace))
    for store in stores:
        convert(data, store, "--skip-bad")
        monkeypatch.setattr("tracestore.convert.runner.Conversion._segments_of", lambda *_: None)
    assert 8 <= len(written) < 31
    assert tree_bytes(stores[0]) == tree_bytes(stores[1])
    check(stores[0], 31 if bad is not None else 32)


@pytest.mark.long
@pytest.mark.parametrize("bad", [0, 3, 7])
@pytest.mark.parametrize("reason", ["field", "key"])
def test_a_refused_source_leaves_no_segment(data, tmp_path, bad, reason):
    """Its traces are refused by the reader or, because of their keys, by the writer."""
    traces = [make_trace(50 + i, tokens=40, dim=512) for i in range(8)]
    traces[bad] = {"question_id": "bad"} if reason == "field" else make_trace(1, tokens=40, dim=512, seed=9)
    write_pickle(data / "2.pkl", traces)
    assert "2.pkl, trace" in error_of("convert", data, tmp_path / "s.zarr", code=3)
    check(tmp_path / "s.zarr", 16)
    convert(data, tmp_path / "s.zarr", "--skip-bad")
    with tracestore.open(tmp_path / "s.zarr") as opened:
        assert len(opened) == 31


@pytest.mark.long
def test_a_source_whose_traces_the_store_has_leaves_no_segment(data, tmp_path):
    convert(data, tmp_path / "s.zarr")
    (data / "9.pkl").write_bytes((data / "0.pkl").read_bytes())
    assert "8 duplicates" in convert(data, tmp_path / "s.zarr").stdout
    check(tmp_path / "s.zarr", 32)


@pytest.mark.parametrize("name", ["1.pkl.gz", "2.pkl"])
def test_a_source_that_is_truncated_while_it_is_read_is_refused(data, tmp_path, monkeypatch, name):
    append, count = SegmentsAhead.append, []

    def truncate_and_append(self, trace):
        if trace.record.question_id == f"q{name[0]}4":
            count.append(os.truncate(data / name, 100))
        append(self, trace)

    monkeypatch.setattr(SegmentsAhead, "append", truncate_and_append)
    assert name in error_of("convert", data, tmp_path / "s.zarr", code=3)
    assert count
    check(tmp_path / "s.zarr", 8 * int(name[0]))


@pytest.mark.long
def test_a_failed_write_is_an_error_and_nothing_of_the_source_is_committed(data, tmp_path, monkeypatch):
    write, calls = shard_writer.pwritev_all, []

    def fail(fd, buffers, position):
        calls.append(position)
        if len(calls) == 12:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, buffers, position)

    monkeypatch.setattr(shard_writer, "pwritev_all", fail)
    assert os.strerror(errno.EIO) in error_of("convert", data, tmp_path / "s.zarr", code=1)
    monkeypatch.setattr(shard_writer, "pwritev_all", write)
    convert(data, tmp_path / "s.zarr")
    check(tmp_path / "s.zarr", 32)
