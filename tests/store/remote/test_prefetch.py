"""Prefetching of remote files in the order of an epoch."""

import tracestore


def test_no_file_is_pending_after_the_last_batch(remote_store):
    """The sizes of pending files are counted exactly, and all files are released after the last batch."""
    loader = tracestore.TraceLoader(remote_store, view="graph", batch_size=5, seed=3)
    ahead = loader._gatherer.prefetch(loader.batch_indices, 0, len(loader))
    with ahead:
        for batch in range(len(loader)):
            ahead.advance(batch)
            with ahead._lock:
                held = sum(ahead._entries[name].size for name in ahead._uses)
            assert ahead._bytes == held
        ahead.advance(len(loader))
        assert not ahead._uses and not ahead._entries and ahead._bytes == 0
