"""Predict which sources will begin a segment, before their turn to be written."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Safety factor on the packed size that the ratio of earlier sources predicts.
_CERTAINTY = 0.9


@dataclass
class SourceSize:
    """Bytes of one source: packed so far, or in total when it is complete."""

    file_bytes: int = 0
    packed_bytes: int = 0
    is_complete: bool = False


class SegmentPredictor:
    """Follows the sources of a conversion in their order.

    The writer commits after a source with which `commit_bytes` or more are pending
    (StoreWriter.end_source); the next source begins a segment. `pending_bytes()` returns the size of the
    pending segments between two sources. Callers in several threads must hold a lock.
    """

    def __init__(self, commit_bytes: int, pending_bytes: Callable[[], int]) -> None:
        self._commit_bytes, self._pending_bytes = commit_bytes, pending_bytes
        self._pending_before = 0  # pending bytes before the sources in _sizes
        self._sizes: deque[SourceSize] = deque()
        self._min_ratio: float | None = None  # smallest ratio of packed size to file size so far

    def add(self) -> SourceSize:
        """Return the size record of the next source, for the caller to keep up to date."""
        self._sizes.append(SourceSize())
        return self._sizes[-1]

    def end(self, size: SourceSize, *, is_refused: bool) -> None:
        """Record that the source has been read; a refused one adds nothing."""
        size.is_complete = True
        if is_refused:
            size.packed_bytes = 0
        elif size.packed_bytes and size.file_bytes:
            ratio = size.packed_bytes / size.file_bytes
            self._min_ratio = ratio if self._min_ratio is None else min(ratio, self._min_ratio)

    def begin(self, size: SourceSize) -> None:
        """Record that the source is the next to be written: everything before it is."""
        while self._sizes[0] is not size:
            self._sizes.popleft()
        self._pending_before = self._pending_bytes()

    def begins_segment(self, size: SourceSize) -> bool:
        """Return whether certainly nothing will be pending when this source is written."""
        pending: int | None = self._pending_before  # None if unknown
        for other in self._sizes:
            if other is size:
                return pending == 0
            if (pending or 0) + self._expected(other) >= self._commit_bytes:
                pending = 0
            elif pending is not None and other.is_complete:
                pending += other.packed_bytes
            else:
                pending = None
        return False

    def _expected(self, size: SourceSize) -> int:
        """Return a lower bound of the packed size."""
        if size.is_complete or self._min_ratio is None:
            return size.packed_bytes
        return max(size.packed_bytes, int(_CERTAINTY * self._min_ratio * size.file_bytes))
