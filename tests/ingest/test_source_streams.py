"""Parallel reading of sources: order, memory limit, inflating ahead."""

import gzip
import random
import threading
import time

import pytest

from tests.helpers import make_traces, write_pickle
from tracestore.errors import InvalidInputError
from tracestore.ingest import source_streams
from tracestore.ingest.builtin.parts import find_sources
from tracestore.ingest.files import byte_source
from tracestore.ingest.packing import PackOptions, packed_traces
from tracestore.ingest.source_streams import SourceStream, read_sources

NUM_FILES, TRACES_A_FILE = 5, 4


@pytest.fixture
def sources(tmp_path):
    for k in range(NUM_FILES):
        write_pickle(tmp_path / f"{k}.pkl", make_traces(NUM_FILES * TRACES_A_FILE)[k * TRACES_A_FILE :][:TRACES_A_FILE])
    return find_sources([tmp_path], tmp_path / "s.zarr")


@pytest.mark.parametrize("max_waiting_traces", [0, 1.5, 5, 100])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_traces_arrive_in_order_within_the_memory_limit(sources, workers, max_waiting_traces):
    options = PackOptions(attention="mean", keep_dtype=False)
    largest = max(t.memory_bytes for s in sources for t in packed_traces(s, options, []))
    options = PackOptions(attention="mean", keep_dtype=False, max_waiting=int(max_waiting_traces * largest))
    ids, peak_bytes = [], 0
    for stream in read_sources(sources, options, workers=workers, is_known=lambda *_: False, on_wait=lambda: None):
        for trace in stream:
            ids.append(trace.record.question_id)
            peak_bytes = max(peak_bytes, stream._gate.used_bytes)
    assert ids == [f"q{k}" for k in range(NUM_FILES * TRACES_A_FILE)]
    # The source that is being consumed may always enqueue one trace.
    assert peak_bytes <= options.max_waiting + largest
    assert stream._gate.used_bytes == 0


def streams_of(sources, max_waiting):
    options = PackOptions(attention="mean", keep_dtype=False, max_waiting=max_waiting)
    return read_sources(sources, options, workers=4, is_known=lambda *_: False, on_wait=lambda: None)


def test_a_source_that_is_cancelled_while_it_is_read_releases_its_memory(sources):
    """The writer refuses a trace while the reader enqueues the next ones."""
    for k, stream in enumerate(streams_of(sources, 1 << 30)):
        if k % 2:
            next(iter(stream))  # leave the rest
        else:
            assert len(list(stream)) == TRACES_A_FILE
    assert stream._gate.used_bytes == 0


def test_a_blocked_reader_ends_without_being_cancelled(sources, monkeypatch):
    """A second Ctrl-C may interrupt the loop that cancels the readers."""
    streams = streams_of(sources, 0)
    stream = next(streams)
    time.sleep(0.1)  # The reader waits for memory.
    monkeypatch.setattr(SourceStream, "cancel", lambda self: None)
    streams.close()
    assert stream._is_ended


@pytest.mark.parametrize(("suffix", "budget", "at_once"), [(".pkl.gz", 0, 1), (".pkl.gz", 1 << 30, 4), (".pkl", 0, 4)])
def test_readers_of_compressed_files_count_in_the_memory_limit(tmp_path, monkeypatch, suffix, budget, at_once):
    for k in range(4):
        write_pickle(tmp_path / f"{k}{suffix}", make_traces(4)[k : k + 1])
    sources = find_sources([tmp_path], tmp_path / "s.zarr")
    is_reading, most, changed = 0, 0, threading.Condition()

    def read(*args):
        nonlocal is_reading, most
        with changed:
            is_reading += 1
            most = max(most, is_reading)
            changed.notify_all()
            changed.wait_for(lambda: most >= at_once, 60)  # for the others, which may be as many
        if at_once == 1:
            time.sleep(0.05)
        yield from packed_traces(*args)
        with changed:
            is_reading -= 1

    monkeypatch.setattr(source_streams, "packed_traces", read)
    found = [(stream, list(stream)) for stream in streams_of(sources, budget)]
    assert [trace.record.question_id for _, traces in found for trace in traces] == [f"q{k}" for k in range(4)]
    assert most == at_once and found[-1][0]._gate.reader_bytes == 0


@pytest.mark.long
def test_a_packed_trace_holds_no_buffer_of_its_source(sources):
    """The memory limit counts the stored bytes only."""
    path = sources[0].path.with_suffix(".pkl.gz")
    write_pickle(path, make_traces(3, tokens=300, dim=1024))
    [source] = find_sources([path], path.parent / "s.zarr")
    for trace in packed_traces(source, PackOptions(attention="mean", keep_dtype=False), []):
        for stored in trace.arrays["hidden_states"]:
            # Bytes of one layer alone, which depend on how the file was inflated, are as good as a copy.
            assert stored.base is None or len(stored.base) == stored.nbytes
        assert trace.record.hidden is trace.record.attention is trace.record.edges is None


@pytest.mark.parametrize("ahead_share", [0, 0.5, 1])
def test_inflating_ahead_does_not_change_the_bytes(tmp_path, monkeypatch, ahead_share):
    monkeypatch.setattr(byte_source, "_CHUNK_BYTES", 1 << 10)
    data = random.Random(0).randbytes(100_000)
    packed = gzip.compress(data[:60_000]) + gzip.compress(data[60_000:])

    def inflated(name, content):
        (tmp_path / name).write_bytes(content)
        chosen = random.Random(1)
        chunks = byte_source.InflatedChunks(tmp_path / name, lambda: chosen.random() < ahead_share)
        try:
            return b"".join(iter(chunks, b""))
        finally:
            chunks.close()

    assert inflated("whole", packed) == data
    with pytest.raises(InvalidInputError, match="truncated"):
        inflated("short", packed[:-100])
    with pytest.raises(InvalidInputError, match="damaged gzip"):
        inflated("damaged", packed[:-5] + bytes(5))
