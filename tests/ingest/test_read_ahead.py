"""Rows written before their turn: the same store, whatever was expected of the sources."""

import contextlib
import errno
import gc
import math
import os
import random
import time

import numpy as np
import pytest
import torch

import tracestore
from tests.fault_injection.driver import run_convert
from tests.helpers import make_graphs, make_trace, read_all, tree_bytes, write_pickle
from tests.tiers import long
from tracestore.ingest import reading
from tracestore.ingest.forecast import SegmentPredictor
from tracestore.ingest.reading import AheadOptions, PackOptions, SourceStream, read_sources
from tracestore.ingest.sources import find_sources
from tracestore.store.io import spool_files
from tracestore.store.io.spool_files import SpoolArrays, SpooledRows, SpoolFile
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.shard_writer import ShardWriter
from tracestore.store.write.writer import StoreWriter


def write_sources(folder, rng, num_files):
    """Files of a few traces, some in two of them, some with other content, some refused."""
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
def test_the_store_is_the_same_bytes(tmp_path, monkeypatch, seed):
    """Whatever is thought to begin a segment, and wherever writing ahead fails."""
    rng = random.Random(seed)
    data = write_sources(tmp_path / "data", rng, rng.randint(1, 9))
    for name in ("close_bytes", "split_bytes"):
        monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, name, rng.choice([1, 500, 2_000, 10_000]))
    options = ["--skip-bad", "--on-conflict", rng.choice(["keep-first", "keep-last"])]
    options += ["--attention", rng.choice(["mean", "heads"])]
    codes = [run_convert([data, tmp_path / "one.zarr", "--workers", 1, *options])]
    share_ahead, share_failed = rng.choice([0.1, 0.5, 1]), rng.choice([0, 0, 0.1])
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: rng.random() < share_ahead)
    append = SpoolFile.append

    def fails_now_and_then(self, arrays):
        if rng.random() < share_failed:
            self._fd, closed = -1, self._fd  # EBADF
            try:
                append(self, arrays)
            finally:
                self._fd = closed
        return append(self, arrays)

    monkeypatch.setattr(SpoolFile, "append", fails_now_and_then)
    codes.append(run_convert([data, tmp_path / "ahead.zarr", "--workers", rng.choice([2, 3]), *options]))
    assert codes[0] == codes[1] and codes[0] in (0, 3)
    assert (tmp_path / "ahead.zarr").exists() == (tmp_path / "one.zarr").exists()
    if (tmp_path / "one.zarr").exists():
        assert tree_bytes(tmp_path / "ahead.zarr") == tree_bytes(tmp_path / "one.zarr")
        assert not (tmp_path / "ahead.zarr" / ".spool").exists()
        assert verify_store(tmp_path / "ahead.zarr").damaged == {}


def test_what_begins_a_segment_is_taken_over_and_not_copied(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    for k in range(6):
        write_pickle(data / f"{k}.pkl", [make_trace(10 * k + i, tokens=9) for i in range(4)])
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "close_bytes", 1)
    copied, taken = [], []
    pieces, take = SpooledRows.pieces, SpoolFile.take
    monkeypatch.setattr(SpooledRows, "pieces", lambda self: copied.append(self) or pieces(self))
    monkeypatch.setattr(SpoolFile, "take", lambda self, path: taken.append(path.as_posix()) or take(self, path))
    assert run_convert([data, tmp_path / "s.zarr", "--workers", 3]) == 0
    assert not copied
    # The first source at least: which of the others are far enough depends on the threads.
    assert sum("hidden_states" in path for path in taken) >= 1 and len(taken) % 3 == 0
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(read_all(store)) == 24


def many_traces(folder, num_files=3, per_file=8):
    for k in range(num_files):
        write_pickle(folder / f"{k}.pkl", [make_trace(10 * k + i, tokens=9, dim=512) for i in range(per_file)])
    return find_sources([folder], folder / "s.zarr"), [
        f"q{10 * k + i}" for k in range(num_files) for i in range(per_file)
    ]


def streams_of(sources, folder, workers=3, max_waiting=100_000):
    options = PackOptions(attention="mean", keep_dtype=False, max_waiting=max_waiting)
    ahead = AheadOptions(folder / "ahead", close_bytes=1, split_bytes=1 << 30, pending_bytes=lambda: 0)
    return read_sources(sources, options, workers=workers, is_known=lambda *_: False, on_wait=lambda: None, ahead=ahead)


def wait_until(is_so):
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def test_what_is_written_ahead_takes_no_room(tmp_path):
    """Sources of any length are read to their ends before their turn, with memory for less than
    a trace; files that nothing took over are gone when the source has been had."""
    sources, expected = many_traces(tmp_path)
    ids = []
    for k, stream in enumerate(streams_of(sources, tmp_path)):
        assert not (tmp_path / "ahead" / f"{k - 1:08d}").exists()
        if k == 1:  # the first may have to wait for its turn, where those behind it were faster
            wait_until(lambda s=stream: s._is_ended)
            assert 0 < stream._gate.used_bytes < 100_000 < sum(t.num_bytes for t in stream._waiting)
        ids += [trace.record.question_id for trace in stream]
    assert ids == expected and stream._gate.used_bytes == 0
    assert not (tmp_path / "ahead").exists() and open_files(tmp_path) == []


def open_files(folder):
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in names if name.startswith(str(folder))]


@pytest.mark.parametrize("had", [0, 1, 2])
def test_nothing_stays_of_sources_that_nobody_takes(tmp_path, had):
    sources, _ = many_traces(tmp_path)
    streams = streams_of(sources, tmp_path)
    for stream, _ in zip(streams, range(had), strict=False):
        next(iter(stream))
    streams.close()
    assert not (tmp_path / "ahead").exists() and open_files(tmp_path) == []
    assert spool_files._free_files._value == 256


def test_a_trace_that_goes_between_two_looks(tmp_path, monkeypatch):
    """The reader takes the waiting traces to write them, just after one was seen to be there."""
    sources, expected = many_traces(tmp_path, num_files=1)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: is_seen)
    is_seen, original, ids = False, SourceStream._wait, []

    def seen(self, is_there):
        nonlocal is_seen
        original(self, is_there)
        if self._waiting and not is_seen and self._in_turn:
            is_seen = True
            time.sleep(0.3)  # the reader goes on, and writes what waits

    def slow(*args, **kwargs):
        time.sleep(0.1)
        return pack(*args, **kwargs)

    pack = reading.pack_record
    monkeypatch.setattr(reading, "pack_record", slow)
    monkeypatch.setattr(SourceStream, "_wait", seen)
    for stream in streams_of(sources, tmp_path, max_waiting=1 << 30):
        ids += [trace.record.question_id for trace in stream]
    assert ids == expected


def test_a_blocked_reader_begins_to_write_when_it_may(tmp_path, monkeypatch):
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


def test_a_trace_put_while_its_source_is_cancelled_leaves_no_room_taken(tmp_path):
    """The writer refuses a trace while the reader is on its way with the next ones."""
    sources, _ = many_traces(tmp_path, num_files=6)
    streams = streams_of(sources, tmp_path, workers=4, max_waiting=1 << 30)
    for k, stream in enumerate(streams):
        if k % 2:
            next(iter(stream))  # the rest is left
            continue
        assert len(list(stream)) == 8
    assert stream._gate.used_bytes == stream._gate.reserved_on_disk == stream._gate.num_reading == 0


def test_who_waits_for_room_ends_when_nobody_tells_it(tmp_path, monkeypatch):
    """As where Ctrl-C came a second time, in the middle of telling the readers."""
    sources, _ = many_traces(tmp_path)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: False)
    streams = streams_of(sources, tmp_path, max_waiting=0)
    stream = next(streams)
    wait_until(lambda: stream._gate.num_reading == 0)
    monkeypatch.setattr(SourceStream, "cancel", lambda self: None)
    streams.close()
    assert stream._gate.num_reading == 0 and not (tmp_path / "ahead").exists()


@pytest.mark.parametrize("suffix", [".pkl", ".pkl.gz"])
def test_a_source_cut_short_while_it_is_written_ahead(tmp_path, monkeypatch, capfd, suffix):
    data = tmp_path / "data"
    data.mkdir()
    for k in range(3):
        write_pickle(data / f"{k}{suffix}", [make_trace(10 * k + i, tokens=40, dim=512) for i in range(8)])
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "close_bytes", 1)
    write, cut = SpoolArrays.write, []

    def cuts(self, *args):
        if not cut and self._folder.name.endswith("1"):
            cut.append(os.truncate(data / f"1{suffix}", 100))
        return write(self, *args)

    monkeypatch.setattr(SpoolArrays, "write", cuts)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: True)
    assert run_convert([data, tmp_path / "s.zarr", "--workers", 2]) == 3
    assert cut and f"1{suffix}" in capfd.readouterr().err
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(store) == 8
    assert verify_store(tmp_path / "s.zarr").damaged == {}


def test_segments_on_another_file_system_are_copied_to(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    many_traces(data)
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "close_bytes", 1)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: True)
    assert run_convert([data, tmp_path / "one.zarr", "--workers", 1]) == 0

    def take(self, path):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(SpoolFile, "take", take)
    monkeypatch.setattr(spool_files, "_COPIED_AT_ONCE", 1000)
    assert run_convert([data, tmp_path / "two.zarr", "--workers", 2]) == 0
    assert tree_bytes(tmp_path / "two.zarr") == tree_bytes(tmp_path / "one.zarr")


def test_what_was_lost_is_an_error_and_no_commit(tmp_path, monkeypatch, capfd):
    """close(2) may be the first to say so, and rows that are copied may not be what was written."""
    data = tmp_path / "data"
    data.mkdir()
    many_traces(data)
    monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, "close_bytes", 1)
    monkeypatch.setattr(SegmentPredictor, "begins_segment", lambda *_: True)

    def lost(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(SpoolFile, "close_if_done", lost)
        assert run_convert([data, tmp_path / "a.zarr", "--workers", 2]) == 1
    assert capfd.readouterr().err.count("\n") == 1 and not (tmp_path / "a.zarr").exists()
    with monkeypatch.context() as patch:
        patch.setattr(SpoolFile, "take", lost)
        patch.setattr(SpooledRows, "pieces", lambda self: [np.zeros(self.nbytes, "u1")])
        assert run_convert([data, tmp_path / "b.zarr", "--workers", 2]) == 1
    assert "other bytes" in capfd.readouterr().err and not (tmp_path / "b.zarr").exists()


def test_forecast():
    pending = 0
    forecast = SegmentPredictor(100, lambda: pending)
    one, two, three, four = (forecast.add() for _ in range(4))
    for extent, size in ((one, 1000), (two, 2000), (three, 300), (four, 1000)):
        extent.file_bytes = size
    assert forecast.begins_segment(one)
    assert not forecast.begins_segment(two)  # nothing is known of the first one
    one.packed_bytes = 99
    assert not forecast.begins_segment(two)
    one.packed_bytes = 100
    assert forecast.begins_segment(two) and not forecast.begins_segment(three)
    one.packed_bytes = 200
    forecast.end(one, is_refused=False)
    # A fifth of a file's size: 2,000 come to more than 100, 300 do not.
    assert forecast.begins_segment(two) and forecast.begins_segment(three) and not forecast.begins_segment(four)
    two.packed_bytes = 300
    forecast.end(two, is_refused=True)
    assert forecast.begins_segment(three)  # a refused one adds nothing, and the one before it was enough
    three.packed_bytes = 40
    forecast.end(three, is_refused=False)
    assert not forecast.begins_segment(four)
    pending = 70
    forecast.begin(four)
    assert not forecast.begins_segment(four)
    pending = 0
    forecast.begin(four)
    assert forecast.begins_segment(four)


def rows_of(rng, count):
    return [np.frombuffer(rng.randbytes(2 * 3 * rng.randint(0, 5)), "<f2").reshape(-1, 3) for _ in range(count)]


@pytest.mark.parametrize("seed", [*range(20), *long(*range(20, 60))])
def test_a_stream_takes_written_rows_in_any_company(tmp_path, monkeypatch, seed):
    """Rows from memory, from files, left out, taken back: the bytes are those of plain rows."""
    rng = random.Random(seed)
    monkeypatch.setattr(spool_files, "_COPIED_AT_ONCE", 7)
    plain = ShardWriter(tmp_path / "plain", np.dtype("<f2"), (3,), "none", 64)
    mixed = ShardWriter(tmp_path / "mixed", np.dtype("<f2"), (3,), "none", 64)
    for source in range(rng.randint(1, 6)):
        marks = plain.savepoint(), mixed.savepoint()
        is_ahead, is_refused = rng.random() < 0.6, rng.random() < 0.2
        files = SpoolArrays(tmp_path / str(source), rng.choice([30, 1 << 30]))
        share_kept = rng.choice([0.5, 1])
        for k, rows in enumerate(rows_of(rng, rng.randint(1, 6))):
            if is_ahead and rng.random() < 0.1:
                is_ahead = False  # no space is left: from here on in memory
            written = files.write({"a": [rows]}, rows.nbytes, rows.nbytes)["a"] if is_ahead else None
            if rng.random() < share_kept or k == 0:
                plain.append([rows])
                mixed.append([rows]) if written is None else mixed.append_spooled(written, crc(rows))
        plain.flush(), mixed.flush()
        files.end()
        if is_refused:
            plain.rollback(marks[0]), mixed.rollback(marks[1])
        files.remove()
    if plain.num_rows:
        assert plain.finish() == mixed.finish()
        assert (tmp_path / "plain").read_bytes() == (tmp_path / "mixed").read_bytes()
    assert mixed.num_rows == plain.num_rows


def crc(rows):
    from tracestore._core.kernels import crc32c

    return crc32c(rows.reshape(-1).view("u1"))


def test_a_close_that_fails_is_told_to_who_takes_the_file(tmp_path, monkeypatch):
    """The file is taken all the same: its rows are not copied onto themselves."""
    values = np.arange(6, dtype="<f2").reshape(2, 3)
    files = SpoolArrays(tmp_path / "ahead", 1 << 30)
    rows = files.write({"a": [values]}, values.nbytes, values.nbytes)["a"]
    files.end()
    close, free = os.close, spool_files._free_files._value

    def fails(fd):
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    stream = ShardWriter(tmp_path / "taken", values.dtype, (3,), "none", 64)
    with monkeypatch.context() as patch:
        patch.setattr(spool_files.os, "close", fails)
        with pytest.raises(OSError, match="Input/output"):
            stream.append_spooled(rows, crc(values))
    assert rows.file.is_taken and stream._taken is rows.file and stream.num_rows == 0
    stream.rollback((0, 0, 0, b"", 0))
    files.remove()
    assert spool_files._free_files._value == free + 1
    assert not (tmp_path / "taken").exists() and open_files(tmp_path) == []


def test_a_file_that_lost_its_end_is_an_error(tmp_path):
    files = SpoolArrays(tmp_path, 1 << 30)
    rows = files.write({"a": [np.arange(6, dtype="<f2").reshape(2, 3)]}, 12, 12)["a"]
    files.end()
    assert b"".join(p.tobytes() for p in rows.pieces()) == np.arange(6, dtype="<f2").tobytes()
    rows.file.path.write_bytes(b"short")
    with pytest.raises(OSError, match="shorter"):
        list(rows.pieces())
    assert math.prod(rows.shape) == rows.size == 6
