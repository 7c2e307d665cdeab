"""Giving a GPU's cached memory back when there is evidence that it helps."""

from collections.abc import Callable, Mapping

import torch

CHECK_EVERY_STEPS = 100
# Reserved blocks beyond what the tensors of a step ever needed, as a share of that.
_IDLE_SHARE = 0.5
_IDLE_BYTES = 256 << 20


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def empty_cache() -> None:
    if _cuda_in_use():
        torch.cuda.empty_cache()


class CudaCacheManager:
    """Empties the allocator's cache where allocator retries rise or what is reserved lies
    far above what was allocated at the peak: looked at every CHECK_EVERY_STEPS steps, and
    emptied after a checkpoint. On a CPU nothing is done: freed tensors go back at once."""

    def __init__(
        self,
        statistics: Callable[[], Mapping[str, int]] | None = None,
        empty: Callable[[], None] = empty_cache,
    ) -> None:
        self._statistics = statistics or (torch.cuda.memory_stats if _cuda_in_use() else None)
        self._empty = empty
        self._steps = self._retries = 0
        self.num_cleanings = 0

    def after_step(self) -> None:
        self._steps += 1
        if self._statistics is None or self._steps % CHECK_EVERY_STEPS:
            return
        now = self._statistics()
        retries = now.get("num_alloc_retries", 0)
        rising, self._retries = retries > self._retries, retries
        peak, reserved = now.get("allocated_bytes.all.peak", 0), now.get("reserved_bytes.all.current", 0)
        if rising or reserved - peak > max(_IDLE_BYTES, _IDLE_SHARE * peak):
            self._clean()

    def after_checkpoint(self) -> None:
        """What a checkpoint took on the way is not what the next step needs."""
        if self._statistics is not None:
            self._clean()

    def _clean(self) -> None:
        self.num_cleanings += 1
        self._empty()
