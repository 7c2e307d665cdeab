"""The result of a conversion."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tracestore.console import format_size
from tracestore.convert.options import ON_CONFLICT, OnConflict


@dataclass
class ConvertReport:
    """Counts of a conversion; the JSON document of `tracestore convert --json`."""

    store: str
    num_sources: int = 0
    num_sources_skipped_existing: int = 0
    num_sources_skipped: int = 0
    num_sources_modified: int = 0
    num_traces_read: int = 0
    num_traces_new: int = 0
    num_duplicates: int = 0
    num_conflicts: int = 0
    num_nonfinite: int = 0
    num_without_embeddings: int = 0
    num_sources_rounded: dict[str, int] = field(default_factory=dict)  # by dtype, to float16
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    scores_file: str | None = None
    num_unscored: int = 0
    labels: str | None = None
    num_scores_without_trace: int = 0
    num_traces: int = 0
    num_segments: int = 0
    generation: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)

    def lines(self, on_conflict: OnConflict) -> Iterator[str]:
        """Yield the report as lines of text."""
        yield (
            f"{self.num_traces_new:,} traces added from {self.num_sources:,} files in {self.seconds:.1f} s "
            f"({self.num_sources_skipped_existing:,} files already in the store, {self.num_duplicates:,} duplicates and "
            f"{self.num_sources_skipped:,} files skipped)"
        )
        yield (
            f"{self.store}: {self.num_traces:,} traces in {self.num_segments:,} segments, "
            f"{format_size(self.bytes_in)} in, {format_size(self.bytes_out)} out, "
            f"{self.num_unscored:,} without a score"
        )
        if self.labels is not None:
            yield self.labels
        if self.num_conflicts:
            yield (
                f"{self.num_conflicts:,} traces differ from a trace with the same question id and sample: "
                f"{ON_CONFLICT[on_conflict]}"
            )
        if self.num_nonfinite:
            yield f"{self.num_nonfinite:,} traces hold NaN or infinite values; training reports an error for them"
        if self.num_without_embeddings:
            yield (
                f"the embeddings of {self.num_without_embeddings:,} traces are not stored: "
                "they had L + 1 hidden states and attention of L layers"
            )
        for dtype, count in self.num_sources_rounded.items():
            advice = "" if dtype == "float64" else "; --dtype keep keeps them"  # no store holds float64
            yield f"{dtype} values of {count:,} files were rounded to float16{advice}"
        if self.num_scores_without_trace:
            yield f"{self.num_scores_without_trace:,} scores belong to no trace"
