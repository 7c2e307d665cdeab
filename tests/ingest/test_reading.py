"""Sources read side by side: their order, and what waits of them."""

import gzip

import numpy as np
import pytest

from tests.helpers import make_traces, write_pickle
from tracestore.ingest.reading import PackOptions, packed_traces, read_sources
from tracestore.ingest.sources import find_sources

NUM_FILES, TRACES_A_FILE = 5, 4


@pytest.fixture
def sources(tmp_path):
    for k in range(NUM_FILES):
        write_pickle(tmp_path / f"{k}.pkl", make_traces(NUM_FILES * TRACES_A_FILE)[k * TRACES_A_FILE :][:TRACES_A_FILE])
    return find_sources([tmp_path], tmp_path / "s.zarr")


@pytest.mark.parametrize("room_traces", [0, 1.5, 5, 100])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_all_come_in_order_and_no_more_wait_than_there_is_room_for(sources, workers, room_traces):
    options = PackOptions(attention="mean", keep_dtype=False)
    largest = max(t.num_bytes for s in sources for t in packed_traces(s, options))
    options = PackOptions(attention="mean", keep_dtype=False, max_waiting=int(room_traces * largest))
    ids, most = [], 0
    for stream in read_sources(sources, options, workers=workers, is_known=lambda *_: False, on_wait=lambda: None):
        for trace in stream:
            ids.append(trace.record.question_id)
            most = max(most, stream._room._held)
    assert ids == [f"q{k}" for k in range(NUM_FILES * TRACES_A_FILE)]
    # The source whose turn it is may always have one trace there.
    assert most <= options.max_waiting + largest
    assert stream._room._held == 0


def test_a_packed_trace_keeps_nothing_of_its_source(sources):
    """What waits is counted by what is stored of it: the buffers of the source must be gone."""
    path = sources[0].path.with_suffix(".pkl.gz")
    path.write_bytes(gzip.compress(sources[0].path.read_bytes()))
    [source] = find_sources([path], path.parent / "s.zarr")
    for trace in packed_traces(source, PackOptions(attention="mean", keep_dtype=False)):
        stored = trace.arrays["hidden_states"]
        assert all(np.shares_memory(a, b) for a, b in zip(trace.record.hidden, stored, strict=True))
        assert trace.record.attention is None and trace.record.edges is None
