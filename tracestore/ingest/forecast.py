"""Which sources will begin a segment, as far as one can tell before their turn."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# A source is expected to come to this much of what its file's size says, by those before it.
_CERTAINTY = 0.9


@dataclass
class Extent:
    """How much one source adds: so far, or in all once it has been read."""

    file_bytes: int = 0
    packed_bytes: int = 0
    is_whole: bool = False


class SegmentPredictor:
    """Follows the sources of a conversion in their order. Segments are closed after a source
    with which they hold close_bytes or more (StoreWriter.end_source); pending_bytes() says
    between two sources how much there is. Who uses it from several threads holds a lock."""

    def __init__(self, close_bytes: int, pending_bytes: Callable[[], int]) -> None:
        self._close_bytes, self._pending_bytes = close_bytes, pending_bytes
        self._gathered = 0  # in the segment before the sources that are listed
        self._extents: deque[Extent] = deque()
        self._share: float | None = None  # of a file's size that was packed, the least so far

    def add(self) -> Extent:
        """Of the next source."""
        self._extents.append(Extent())
        return self._extents[-1]

    def end(self, extent: Extent, *, is_refused: bool) -> None:
        """The source has been read; a refused one adds nothing."""
        extent.is_whole = True
        if is_refused:
            extent.packed_bytes = 0
        elif extent.packed_bytes and extent.file_bytes:
            share = extent.packed_bytes / extent.file_bytes
            self._share = share if self._share is None else min(share, self._share)

    def begin(self, extent: Extent) -> None:
        """The turn of the source has come: what became of those before it is known."""
        while self._extents[0] is not extent:
            self._extents.popleft()
        self._gathered = self._pending_bytes()

    def begins_segment(self, extent: Extent) -> bool:
        """Whether the segment will be empty when the turn of this source comes."""
        gathered: int | None = self._gathered  # None where it is not known
        for other in self._extents:
            if other is extent:
                return gathered == 0
            if (gathered or 0) + self._expected(other) >= self._close_bytes:
                gathered = 0
            elif gathered is not None and other.is_whole:
                gathered += other.packed_bytes
            else:
                gathered = None
        return False

    def _expected(self, extent: Extent) -> int:
        """At least."""
        if extent.is_whole or self._share is None:
            return extent.packed_bytes
        return max(extent.packed_bytes, int(_CERTAINTY * self._share * extent.file_bytes))
