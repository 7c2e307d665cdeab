"""Memory pools of batches."""

import numpy as np

from tracestore._core.blocks import MemoryPool


def test_a_pool_reuses_blocks_within_its_limit():
    pool = MemoryPool(8 << 20, 2)
    first, second = pool.acquire(3 << 20), pool.acquire(100)
    assert pool.used_bytes == (4 << 20) + (64 << 10) == pool.total_bytes
    assert pool.acquire(5 << 20) is None
    view = np.frombuffer(first, "u1")
    view[:] = 7
    del first
    assert pool.used_bytes == pool.total_bytes  # the array keeps the block in use
    del view
    assert pool.used_bytes == 64 << 10
    reused = pool.acquire(2 << 20)
    assert len(reused) == 2 << 20 and np.frombuffer(reused, "u1")[0] == 7
    del reused, second
    assert pool.used_bytes == 0 and pool.total_bytes > 0
    # Idle blocks that are too small are freed for a larger one.
    large = pool.acquire(8 << 20)
    assert large is not None and pool.total_bytes == 8 << 20
    del large
    pool.trim()
    assert pool.total_bytes == 0
    unbounded = MemoryPool(0, 1)
    many = [unbounded.acquire(1) for _ in range(5)]
    del many
    assert unbounded.total_bytes == 64 << 10
