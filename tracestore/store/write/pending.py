"""What a writer has gathered for its next commit."""

import math
from dataclasses import dataclass, field

from tracestore.store.write.segment_writer import SegmentWriter

NAN = math.nan


@dataclass
class PendingRow:
    """An index row on its way; values by the names of manifest.TRACE_COLUMNS."""

    question_id: str
    values: dict[str, int]
    score: float = NAN
    label: float = NAN
    group: str = ""


@dataclass
class PendingSource:
    path: str
    size: int
    fingerprint: str
    num_traces: int = 0
    num_skipped: int = 0


@dataclass
class Pending:
    """All that the next commit will add."""

    rows: list[PendingRow] = field(default_factory=list)
    keys: dict[tuple[str, int], int] = field(default_factory=dict)
    # Places for committed traces, by (trace, group); values by manifest.PATCH_COLUMNS.
    patches: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    updates: dict[int, tuple[float, float, str | None]] = field(default_factory=dict)
    sources: list[PendingSource] = field(default_factory=list)
    segments: list[SegmentWriter] = field(default_factory=list)
