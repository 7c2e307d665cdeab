"""Loading within a memory budget, prefetching of later batches, and eviction from the chunk cache."""

import numpy as np
import pytest

import tracestore
from tests.helpers import make_traces, write_store
from tracestore.errors import MemoryBudgetError


def test_the_cache_keeps_the_chunks_needed_soonest(tmp_path):
    """With hints, fewer chunks are decoded than with least-recently-used eviction."""
    from tracestore.store.read.chunk_cache import ChunkCache

    def decoded(sequence, hinted):
        cache = ChunkCache(3 * 800)
        keys, releases = [[("a", k)] for k in sequence], []
        for begin in range(len(keys)):
            if hinted:
                for ahead in keys[begin + 7 : begin + 8] if begin else keys[:8]:
                    releases.append(cache.hint_upcoming(ahead))
            cache.get(keys[begin][0], lambda: np.zeros(100))
            if hinted:
                releases.pop(0)()
        assert cache.num_bytes <= 3 * 800
        return cache.num_decoded

    cyclic = [0, 1, 2, 3] * 10  # the worst case of least-recently-used
    assert decoded(cyclic, False) == 40 and decoded(cyclic, True) < 25
    write_store(tmp_path / "c.zarr", make_traces(60, tokens=30, dim=128, layers=6), codec="zstd")
    counts = {}
    for window in (0, 32):
        loader = tracestore.TraceLoader(tmp_path / "c.zarr", "graph", batch_size=4, cache_bytes=1 << 20, num_threads=1)
        if not window:
            loader.store.internals.chunk_cache.hint_upcoming = lambda keys: lambda: None
        seen = flat = [i for b in loader for i in b.trace_index.tolist()]
        assert sorted(flat) == list(range(60))
        counts[window] = loader.store.internals.chunk_cache.num_decoded
        assert not loader.store.internals.chunk_cache._upcoming and seen
    assert counts[32] <= counts[0]


def test_read_ahead_is_limited_in_batches(store_path, monkeypatch):
    """Small batches of a cold store are read ahead up to a number, not only up to their bytes."""
    from tracestore._core.gather import ThreadPool
    from tracestore.data import prefetch

    def cold(self, drop_behind):
        begin(self, drop_behind)
        self._threads = ThreadPool(1)

    begin, read_ahead, counts = prefetch._ReadAhead.__init__, prefetch.NativePrefetcher._read_ahead, []

    def counted(self, ahead):
        read_ahead(self, ahead)
        counts.append(len(self._ahead))
        assert ahead.read_ahead_bytes > 0

    monkeypatch.setattr(prefetch._ReadAhead, "__init__", cold)
    monkeypatch.setattr(prefetch.NativePrefetcher, "_read_ahead", counted)
    monkeypatch.setattr(prefetch, "_READ_AHEAD_BATCHES", 3)
    ids = [b.question_id for b in tracestore.TraceLoader(store_path, batch_size=1, shuffle="none")]
    assert [i for batch in ids for i in batch] == tracestore.open(store_path).question_ids[:]
    assert max(counts) == 3


def ids(batches):
    return [b.trace_index.tolist() for b in batches]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_every_trace_once_within_a_tight_budget(tmp_path, codec):
    """A batch without room in the budget comes later, exactly once."""
    write_store(tmp_path / "s.zarr", make_traces(64, tokens=lambda k: 20 + k % 5, layers=8, dim=512), codec=codec)
    options = {"view": "graph", "batch_size": 8, "num_threads": 2}
    loose = tracestore.TraceLoader(tmp_path / "s.zarr", **options)
    beside = (4 << 20) + (0 if codec == "none" else 4 << 20)  # overhead, chunks being decoded, the cache
    for room in (2.2, 3.1, 4.0):
        budget = beside + int(room * loose.memory.batch_bytes)
        loader = tracestore.TraceLoader(tmp_path / "s.zarr", **options, memory_budget=budget, cache_bytes=1 << 20)
        loose.set_epoch(0)
        loader.max_in_flight = 3  # more than there is room for
        assert ids(loader) == ids(loose)


def test_a_budget_holds_or_is_an_error(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(64, tokens=lambda k: 20 + k % 5, layers=8, dim=512))
    options = {"view": "graph", "batch_size": 8, "num_threads": 2}
    batch = tracestore.TraceLoader(tmp_path / "s.zarr", **options).memory.batch_bytes
    loader = tracestore.TraceLoader(tmp_path / "s.zarr", **options, memory_budget=(4 << 20) + int(3.6 * batch))
    assert loader.memory.batches_in_flight == 2
    for _ in loader:
        assert loader._pool.total_bytes <= loader.memory.buffer_bytes
    held = []
    with pytest.raises(MemoryBudgetError, match="release earlier batches"):
        for batch in loader:
            held.append(batch)
    assert 1 <= len(held) <= 3
    with pytest.raises(MemoryBudgetError, match="lower batch_size"):
        tracestore.TraceLoader(tmp_path / "s.zarr", **options, memory_budget=5 << 20)
