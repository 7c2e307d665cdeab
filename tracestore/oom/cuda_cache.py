"""Empty the cache of CUDA's allocator where statistics show that it helps."""

from collections.abc import Mapping

import torch

CHECK_EVERY_STEPS = 100
# Reserved memory above the allocated peak is idle; it is freed beyond these limits.
_MAX_IDLE_FRACTION = 0.5
_MAX_IDLE_BYTES = 256 << 20


class CudaCacheManager:
    """Empties the cache of CUDA's allocator after checkpoints and where it holds idle memory.

    Every `CHECK_EVERY_STEPS` steps it checks whether allocator retries rise or the reserved memory
    lies far above the allocated peak. On a CPU it does nothing: freed tensors are returned at once.
    """

    def __init__(self) -> None:
        self._steps = self._retries = self._kept = 0

    def after_step(self) -> None:
        """Count a step, and empty the cache if it is time and memory is idle."""
        self._steps += 1
        if self._steps % CHECK_EVERY_STEPS:
            return
        now = torch.cuda.memory_stats()
        retries = now.get("num_alloc_retries", 0)
        rising, self._retries = retries > self._retries, retries
        peak = now.get("allocated_bytes.all.peak", 0)
        self._kept = min(self._kept, max(0, _idle(now)))
        if rising or _idle(now) - self._kept > max(_MAX_IDLE_BYTES, _MAX_IDLE_FRACTION * peak):
            torch.cuda.empty_cache()
            # The memory of CUDA graphs stays reserved.
            self._kept = max(0, _idle(torch.cuda.memory_stats()))

    def after_checkpoint(self) -> None:
        """Empty the cache: a step does not need the blocks that a checkpoint used."""
        if torch.cuda.memory_stats():
            torch.cuda.empty_cache()


def _idle(statistics: Mapping[str, int]) -> int:
    return statistics.get("reserved_bytes.all.current", 0) - statistics.get("allocated_bytes.all.peak", 0)
