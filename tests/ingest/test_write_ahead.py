"""Sources that are written to spool files before their turn: the store has the same bytes."""

import errno
import gc
import os
import random
import time

import numpy as np
import pytest
import torch

import tracestore
from tests.fault_injection.driver import run_convert
from tests.helpers import make_graphs, make_trace, open_files, read_all, tree_bytes, write_pickle
from tests.machine import wait_until
from tests.tiers import long
from tracestore.ingest import packing
from tracestore.ingest.builtin.parts import find_sources
from tracestore.ingest.forecast import SegmentPredictor
from tracestore.ingest.packing import PackOptions
from tracestore.ingest.reading import AheadOptions, SourceStream, read_sources
from tracestore.store.io import spool_files
from tracestore.store.io.spool_files import SpoolArrays, SpooledRows, SpoolFile
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.writer import StoreWriter


@pytest.fixture
def data(tmp_path):
    """An empty folder for sources."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def write_sources(folder, rng, num_files):
    """Write files of a few traces with duplicates, conflicts, graphs and invalid traces."""
    folder.mkdir()
    for k in range(num_files):
        keys = [rng.randrange(12) for _ in range(rng.randint(1, 6))]
        traces = [make_trace(key, tokens=1 + key % 7, seed=rng.random() < 0.2) for key in dict.fromkeys(keys)]
        if rng.random() < 0.15:
            traces.append({"hidden_states": 1})
        elif rng.random() < 0.2:
            graphs, ids = [make_graphs(t) for t in traces], [t["question_id"] for t in traces]
            torch.save({"graphs": graphs, "question_ids": [f"g{i}" for i in ids]}, folder / f"{k:02d}.pt")
            continue
        write_pickle(folder / f"{k:02d}.pkl{rng.choice(['', '.gz'])}", traces)
    return folder


@pytest.mark.parametrize("seed", [*range(8), *long(*range(8, 40))])
def test_bytes_do_not_depend_on_predictions_or_failed_writes(tmp_path, monkeypatch, seed):
    """Compare random predictions and random write errors with a single worker."""
    rng = random.Random(seed)
    data = write_sources(tmp_path / "data", rng, rng.randint(1, 9))
    for name in ("commit_bytes", "split_bytes"):
        monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, name, rng.choice([1, 500, 2_000, 10_000]))
    options = ["--skip-bad", "--on-conflict", rng.choice(["keep-first", "keep-last"])]
    options += ["--attention", rng.choice(["mean", "heads"])]
    codes = [run_convert([data, tmp_path / "one.zarr", "--workers", 1, *options])]
    ahead_share, failed_share = rng.choice([0.1, 0.5, 1]), rng.choice([0, 0, 0.1])
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: rng.random() < ahead_share)
    append = SpoolFile.append

    def fail_randomly(self, arrays):
        if rng.random() < failed_share:
            self._fd, closed = -1, self._fd  # EBADF
            try:
                append(self, arrays)
            finally:
                self._fd = closed
        return append(self, arrays)

    monkeypatch.setattr(SpoolFile, "append", fail_randomly)
    codes.append(run_convert([data, tmp_path / "ahead.zarr", "--workers", rng.choice([2, 3]), *options]))
    assert codes[0] == codes[1] and codes[0] in (0, 3)
    assert (tmp_path / "ahead.zarr").exists() == (tmp_path / "one.zarr").exists()
    if (tmp_path / "one.zarr").exists():
        assert tree_bytes(tmp_path / "ahead.zarr") == tree_bytes(tmp_path / "one.zarr")
        assert not (tmp_path / "ahead.zarr" / ".spool").exists()
        assert verify_store(tmp_path / "ahead.zarr").damaged == {}


def test_the_rows_of_a_source_that_begins_a_segment_are_not_copied(tmp_path, data, monkeypatch):
    for k in range(6):
        write_pickle(data / f"{k}.pkl", [make_trace(10 * k + i, tokens=9) for i in range(4)])
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "commit_bytes", 1)
    copied, renamed = [], []
    chunks, move_to = SpooledRows.chunks, SpoolFile.move_to
    monkeypatch.setattr(SpooledRows, "chunks", lambda self: copied.append(self) or chunks(self))
    monkeypatch.setattr(SpoolFile, "move_to", lambda self, path: renamed.append(path.as_posix()) or move_to(self, path))
    assert run_convert([data, tmp_path / "s.zarr", "--workers", 3]) == 0
    assert not copied
    # At least the first source; the progress of the others depends on the threads.
    assert sum("hidden_states" in path for path in renamed) >= 1 and len(renamed) % 3 == 0
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(read_all(store)) == 24


def many_traces(folder, num_files=3, per_file=8):
    """Write files of traces; return the sources and the question ids."""
    for k in range(num_files):
        write_pickle(folder / f"{k}.pkl", [make_trace(10 * k + i, tokens=9, dim=512) for i in range(per_file)])
    return find_sources([folder], folder / "s.zarr"), [
        f"q{10 * k + i}" for k in range(num_files) for i in range(per_file)
    ]


def streams_of(sources, folder, workers=3, max_waiting=100_000):
    options = PackOptions(attention="mean", keep_dtype=False, max_waiting=max_waiting)
    ahead = AheadOptions(folder / "ahead", commit_bytes=1, split_bytes=1 << 30, pending_bytes=lambda: 0)
    return read_sources(sources, options, workers=workers, is_known=lambda *_: False, on_wait=lambda: None, ahead=ahead)


def test_spooled_traces_do_not_count_against_the_memory_limit(tmp_path):
    """Sources are read to the end before their turn with memory for less than a trace.

    Spool files that no segment took over are removed when the source is done.
    """
    sources, expected = many_traces(tmp_path)
    ids = []
    for k, stream in enumerate(streams_of(sources, tmp_path)):
        assert not (tmp_path / "ahead" / f"{k - 1:08d}").exists()
        if k == 1:  # the first may wait for its turn if the later ones were faster
            wait_until(lambda s=stream: s._is_ended)
            assert 0 < stream._gate.used_bytes < 100_000 < sum(t.num_bytes for t in stream._waiting)
        ids += [trace.record.question_id for trace in stream]
    assert ids == expected and stream._gate.used_bytes == 0
    assert not (tmp_path / "ahead").exists() and open_files(tmp_path) == []


@pytest.mark.parametrize("num_consumed", [0, 1, 2])
def test_closing_the_iterator_removes_all_spool_files(tmp_path, num_consumed):
    sources, _ = many_traces(tmp_path)
    streams = streams_of(sources, tmp_path)
    for stream, _ in zip(streams, range(num_consumed), strict=False):
        next(iter(stream))
    streams.close()
    assert not (tmp_path / "ahead").exists() and open_files(tmp_path) == []
    assert spool_files._free_files._value == 256


def test_waiting_traces_are_moved_to_files_just_after_the_consumer_saw_one(tmp_path, monkeypatch):
    sources, expected = many_traces(tmp_path, num_files=1)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: is_seen)
    is_seen, original, ids = False, SourceStream._wait, []

    def wait_and_pause(self, is_ready):
        nonlocal is_seen
        original(self, is_ready)
        if self._waiting and not is_seen and self._in_turn:
            is_seen = True
            time.sleep(0.3)  # meanwhile the reader writes the waiting traces

    def slow(*args, **kwargs):
        time.sleep(0.1)
        return pack(*args, **kwargs)

    pack = packing.pack_record
    monkeypatch.setattr(packing, "pack_record", slow)
    monkeypatch.setattr(SourceStream, "_wait", wait_and_pause)
    for stream in streams_of(sources, tmp_path, max_waiting=1 << 30):
        ids += [trace.record.question_id for trace in stream]
    assert ids == expected


def test_a_blocked_reader_starts_writing_when_it_may(tmp_path, monkeypatch):
    sources, expected = many_traces(tmp_path, num_files=2)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: may)
    may, ids = False, []
    for k, stream in enumerate(streams_of(sources, tmp_path, workers=2)):
        if k == 0:
            second = next(
                o
                for o in gc.get_objects()
                if isinstance(o, SourceStream) and o is not stream and o._gate is stream._gate
            )
            wait_until(lambda: second._gate.num_reading == 0)
            assert not second._is_writing and not second._is_ended
            may = True
            with second._changed:
                second._changed.notify_all()
            wait_until(lambda: second._is_ended)
            assert second._is_writing and len(second._waiting) == 8
        ids += [trace.record.question_id for trace in stream]
    assert ids == expected


def test_a_source_that_is_cancelled_while_it_is_read_releases_its_memory(tmp_path):
    """The writer refuses a trace while the reader enqueues the next ones."""
    sources, _ = many_traces(tmp_path, num_files=6)
    streams = streams_of(sources, tmp_path, workers=4, max_waiting=1 << 30)
    for k, stream in enumerate(streams):
        if k % 2:
            next(iter(stream))  # leave the rest
            continue
        assert len(list(stream)) == 8
    assert stream._gate.used_bytes == stream._gate.reserved_on_disk == stream._gate.num_reading == 0


def test_a_blocked_reader_ends_without_being_cancelled(tmp_path, monkeypatch):
    """A second Ctrl-C may interrupt the loop that cancels the readers."""
    sources, _ = many_traces(tmp_path)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: False)
    streams = streams_of(sources, tmp_path, max_waiting=0)
    stream = next(streams)
    wait_until(lambda: stream._gate.num_reading == 0)
    monkeypatch.setattr(SourceStream, "cancel", lambda self: None)
    streams.close()
    assert stream._gate.num_reading == 0 and not (tmp_path / "ahead").exists()


@pytest.mark.parametrize("suffix", [".pkl", ".pkl.gz"])
def test_a_source_that_is_truncated_while_it_is_written_ahead_is_refused(tmp_path, data, monkeypatch, capfd, suffix):
    for k in range(3):
        write_pickle(data / f"{k}{suffix}", [make_trace(10 * k + i, tokens=40, dim=512) for i in range(8)])
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "commit_bytes", 1)
    write, cut = SpoolArrays.write, []

    def truncate_and_write(self, *args):
        if not cut and self._folder.name.endswith("1"):
            cut.append(os.truncate(data / f"1{suffix}", 100))
        return write(self, *args)

    monkeypatch.setattr(SpoolArrays, "write", truncate_and_write)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: True)
    assert run_convert([data, tmp_path / "s.zarr", "--workers", 2]) == 3
    assert cut and f"1{suffix}" in capfd.readouterr().err
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(store) == 8
    assert verify_store(tmp_path / "s.zarr").damaged == {}


def test_rows_are_copied_if_the_spool_file_cannot_be_renamed(tmp_path, data, monkeypatch):
    many_traces(data)
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "commit_bytes", 1)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: True)
    assert run_convert([data, tmp_path / "one.zarr", "--workers", 1]) == 0

    def take(self, path):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(SpoolFile, "move_to", take)
    monkeypatch.setattr(spool_files, "_COPY_BYTES", 1000)
    assert run_convert([data, tmp_path / "two.zarr", "--workers", 2]) == 0
    assert tree_bytes(tmp_path / "two.zarr") == tree_bytes(tmp_path / "one.zarr")


def test_lost_writes_are_an_error_and_not_committed(tmp_path, data, monkeypatch, capfd):
    """close(2) may be the first to report the loss, and copied rows may differ from the written ones."""
    many_traces(data)
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "commit_bytes", 1)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: True)

    def lost(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(SpoolFile, "close_if_done", lost)
        assert run_convert([data, tmp_path / "a.zarr", "--workers", 2]) == 1
    assert capfd.readouterr().err.count("\n") == 1 and not (tmp_path / "a.zarr").exists()
    with monkeypatch.context() as patch:
        patch.setattr(SpoolFile, "move_to", lost)
        patch.setattr(SpooledRows, "chunks", lambda self: [np.zeros(self.nbytes, "u1")])
        assert run_convert([data, tmp_path / "b.zarr", "--workers", 2]) == 1
    assert "the bytes differ" in capfd.readouterr().err and not (tmp_path / "b.zarr").exists()
