"""The cache of CUDA's allocator is emptied only where statistics show that it helps."""

import torch

from tracestore.oom.cuda_cache import CHECK_EVERY_STEPS, CudaCacheManager


def test_the_cache_is_emptied_after_retries_checkpoints_and_with_idle_memory(monkeypatch):
    stats, emptied, original = {"num_alloc_retries": 0}, [], torch.cuda.memory_stats
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    manager = CudaCacheManager()

    def steps():
        for _ in range(CHECK_EVERY_STEPS):
            manager.after_step()
        return len(emptied)

    assert steps() == 0
    stats["num_alloc_retries"] = 3
    assert steps() == 1 and steps() == 1
    stats.update({"allocated_bytes.all.peak": 1 << 30, "reserved_bytes.all.current": 5 << 28})
    assert steps() == 1
    stats["reserved_bytes.all.current"] = 2 << 30
    assert steps() == 2
    manager.after_checkpoint()
    assert len(emptied) == 3
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "memory_stats", original)
        manager.after_checkpoint()
        assert len(emptied) == 3
