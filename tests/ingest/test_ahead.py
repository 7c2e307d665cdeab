"""Rows written before their turn: the same store, whatever was expected of the sources."""

import math
import random

import numpy as np
import pytest
import torch

import tracestore
from tests.faults.driver import run_convert
from tests.helpers import make_graphs, make_trace, read_all, tree_bytes, write_pickle
from tracestore.ingest.forecast import Forecast
from tracestore.ingest.reading import AheadOptions, PackOptions, read_sources
from tracestore.ingest.sources import find_sources
from tracestore.store.ahead import AheadArrays, AheadFile, WrittenRows
from tracestore.store.shard import ShardStream
from tracestore.store.verify import verify_store
from tracestore.store.writer import StoreWriter


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


@pytest.mark.parametrize("seed", range(40))
def test_the_store_is_the_same_bytes(tmp_path, monkeypatch, seed):
    """Whatever is thought to begin a segment, and wherever writing ahead fails."""
    rng = random.Random(seed)
    data = write_sources(tmp_path / "data", rng, rng.randint(1, 9))
    for name in ("close_bytes", "split_bytes"):
        monkeypatch.setitem(StoreWriter.__init__.__kwdefaults__, name, rng.choice([1, 500, 2_000, 10_000]))
    options = ["--skip-bad", "--on-duplicate", rng.choice(["keep-first", "keep-last"])]
    options += ["--attention", rng.choice(["mean", "heads"])]
    codes = [run_convert([data, tmp_path / "one.zarr", "--workers", 1, *options])]
    share_ahead, share_failed = rng.choice([0.1, 0.5, 1]), rng.choice([0, 0, 0.1])
    monkeypatch.setattr(Forecast, "begins_segment", lambda *_: rng.random() < share_ahead)
    append = AheadFile.append

    def fails_now_and_then(self, arrays):
        if rng.random() < share_failed:
            self._fd, closed = -1, self._fd  # EBADF
            try:
                append(self, arrays)
            finally:
                self._fd = closed
        return append(self, arrays)

    monkeypatch.setattr(AheadFile, "append", fails_now_and_then)
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
    pieces, take = WrittenRows.pieces, AheadFile.take
    monkeypatch.setattr(WrittenRows, "pieces", lambda self: copied.append(self) or pieces(self))
    monkeypatch.setattr(AheadFile, "take", lambda self, path: taken.append(path.as_posix()) or take(self, path))
    assert run_convert([data, tmp_path / "s.zarr", "--workers", 3]) == 0
    assert not copied
    # The first source at least: which of the others are far enough depends on the threads.
    assert sum("hidden_states" in path for path in taken) >= 1 and len(taken) % 3 == 0
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(read_all(store)) == 24


def test_what_is_written_ahead_takes_no_room(tmp_path):
    """A source of any length is read to its end before its turn, with no memory to wait in;
    files that nothing took over are gone when it has been had."""
    for k in range(3):
        write_pickle(tmp_path / f"{k}.pkl", [make_trace(10 * k + i, tokens=9) for i in range(8)])
    sources = find_sources([tmp_path], tmp_path / "s.zarr")
    options = PackOptions(attention="mean", keep_dtype=False, max_waiting=0)
    ahead = AheadOptions(tmp_path / "ahead", close_bytes=1, split_bytes=1 << 30, pending_bytes=lambda: 0)
    streams = read_sources(sources, options, workers=3, is_known=lambda *_: False, on_wait=lambda: None, ahead=ahead)
    ids = []
    for k, stream in enumerate(streams):
        assert not (tmp_path / "ahead" / f"{k - 1:08d}").exists()
        if k == 0:
            stream._is_begun = True
        for trace in stream:
            ids.append(trace.record.question_id)
            assert k == 0 or trace.held_bytes == 0 or not stream._is_ahead
            assert stream._room._held <= max(trace.num_bytes, trace.held_bytes)
    assert ids == [f"q{10 * k + i}" for k in range(3) for i in range(8)]
    assert not (tmp_path / "ahead").exists()


def test_forecast():
    pending = 0
    forecast = Forecast(100, lambda: pending)
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


@pytest.mark.parametrize("seed", range(60))
def test_a_stream_takes_written_rows_in_any_company(tmp_path, seed):
    """Rows from memory, from files, left out, taken back: the bytes are those of plain rows."""
    rng = random.Random(seed)
    codec = rng.choice(["none", "none", "zstd"])
    plain = ShardStream(tmp_path / "plain", np.dtype("<f2"), (3,), codec, 64)
    mixed = ShardStream(tmp_path / "mixed", np.dtype("<f2"), (3,), codec, 64)
    for source in range(rng.randint(1, 6)):
        marks = plain.mark(), mixed.mark()
        is_ahead, is_refused = rng.random() < 0.6, rng.random() < 0.2
        ahead = AheadArrays(tmp_path / str(source), rng.choice([30, 1 << 30]))
        share_kept = rng.choice([0.5, 1])
        for k, rows in enumerate(rows_of(rng, rng.randint(1, 6))):
            if is_ahead and rng.random() < 0.1:
                is_ahead = False  # no space is left: from here on in memory
            written = ahead.write({"a": [rows]}, rows.nbytes)["a"] if is_ahead else None
            if rng.random() < share_kept or k == 0:
                plain.append([rows])
                mixed.append([rows]) if written is None else mixed.append_written(
                    written, rng.choice([None, crc(rows)])
                )
        plain.flush(), mixed.flush()
        ahead.close()
        if is_refused:
            plain.rollback(marks[0]), mixed.rollback(marks[1])
    if plain.num_rows:
        assert plain.finish() == mixed.finish()
        assert (tmp_path / "plain").read_bytes() == (tmp_path / "mixed").read_bytes()
    assert mixed.num_rows == plain.num_rows


def crc(rows):
    from tracestore._core.kernels import crc32c

    return crc32c(rows.reshape(-1).view("u1"))


def test_a_file_that_lost_its_end_is_an_error(tmp_path):
    ahead = AheadArrays(tmp_path, 1 << 30)
    rows = ahead.write({"a": [np.arange(6, dtype="<f2").reshape(2, 3)]}, 12)["a"]
    ahead.close()
    assert b"".join(p.tobytes() for p in rows.pieces()) == np.arange(6, dtype="<f2").tobytes()
    rows.file.path.write_bytes(b"short")
    with pytest.raises(OSError, match="shorter"):
        list(rows.pieces())
    assert math.prod(rows.shape) == rows.size == 6
