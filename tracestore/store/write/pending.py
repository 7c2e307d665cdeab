"""The changes that a writer has collected for its next commit."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tracestore.store.io import fsio
from tracestore.store.read.columns import TraceValues
from tracestore.store.write.segment_writer import SegmentWriter


@dataclass
class PendingRow:
    """A new row of the index; `values` has the keys of manifest.TRACE_COLUMNS, `given` goes to the columns."""

    question_id: str
    values: dict[str, int]
    given: TraceValues


@dataclass
class PendingSource:
    """A source that the next commit records; `provenance` is a position in the attribute of that name."""

    path: str
    size: int
    fingerprint: str
    provenance: int = -1
    num_traces: int = 0
    num_skipped: int = 0


@dataclass
class Pending:
    """All changes of the next commit.

    `keys` maps a key (question id, sample) to its position in `rows`. `patches` maps (trace, field group) to
    new locations of committed traces, by the names of manifest.PATCH_COLUMNS. `updates` maps committed
    traces to new values of their columns; missing ones (NaN, None) keep the old value.
    """

    rows: list[PendingRow] = field(default_factory=list)
    keys: dict[tuple[str, int], int] = field(default_factory=dict)
    patches: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    updates: dict[int, TraceValues] = field(default_factory=dict)
    sources: list[PendingSource] = field(default_factory=list)
    segments: list[SegmentWriter] = field(default_factory=list)

    def savepoint(self) -> Callable[[], None]:
        """Return a function that reverts what was appended to the segments since this call."""
        count = len(self.segments)
        savepoint = self.segments[-1].savepoint() if count else None

        def roll_back() -> None:
            self.remove_segments(count)
            if savepoint is not None:
                self.segments[-1].rollback(savepoint)

        return roll_back

    def remove_segments(self, first: int = 0) -> None:
        """Remove the segments from `first` on, with their files."""
        for segment in self.segments[first:]:
            segment.close_fd()
        for segment in self.segments[first:]:
            fsio.remove_tree(segment.folder)
        del self.segments[first:]
