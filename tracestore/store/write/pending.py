"""The changes that a writer has collected for its next commit."""

import math
from dataclasses import dataclass, field

from tracestore.store.write.segment_writer import SegmentWriter

NAN = math.nan


@dataclass
class PendingRow:
    """A new row of the index; `values` has the keys of manifest.TRACE_COLUMNS."""

    question_id: str
    values: dict[str, int]
    score: float = NAN
    label: float = NAN
    group: str = ""


@dataclass
class PendingSource:
    """A source that the next commit records."""

    path: str
    size: int
    fingerprint: str
    num_traces: int = 0
    num_skipped: int = 0


@dataclass
class Pending:
    """All changes of the next commit.

    `keys` maps a key (question id, sample) to its position in `rows`. `patches` maps (trace, field group) to
    new locations of committed traces, by the names of manifest.PATCH_COLUMNS. `updates` maps committed
    traces to a new score, label and group; NaN and None keep the old value.
    """

    rows: list[PendingRow] = field(default_factory=list)
    keys: dict[tuple[str, int], int] = field(default_factory=dict)
    patches: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    updates: dict[int, tuple[float, float, str | None]] = field(default_factory=dict)
    sources: list[PendingSource] = field(default_factory=list)
    segments: list[SegmentWriter] = field(default_factory=list)
