"""Loading within a memory budget."""

import pytest

import tracestore
from tests.helpers import make_traces, write_store
from tracestore.errors import MemoryBudgetError


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
