"""Prefetching of later batches, and eviction from the chunk cache."""

import numpy as np

import tracestore
from tests.helpers import make_traces, write_store


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
