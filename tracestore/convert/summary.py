"""The result of a conversion."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from tracestore.convert.options import ON_CONFLICT, OnConflict
from tracestore.errors import InvalidInputError, escape_unprintable, some_of
from tracestore.store.format.labels import describe, disagreements, unlabeled_note
from tracestore.store.format.schema import FIELD_BITS, LAYOUT_EDGES, Attributes
from tracestore.store.read.columns import Columns
from tracestore.store.vocabulary import VERDICTS
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.written import TraceBlock
from tracestore.words import format_size, plural

# Refused traces of one source that are printed; all of them are in STORE.refused.jsonl.
MAX_REFUSED_LINES = 10
_MAX_NAMES = 8
_MAX_KEYS = 1000
# Lines of the report about traces, by the name of their count.
_NOTES = {
    "num_label_conflicts": "the label of {} differs from that of its score at 0.5: the label counts; `tracestore lint` "
    "lists them",
    "num_conflicts": "different content under a question id and sample of the store: {}, {}",
    "num_nonfinite": "NaN or infinite values in {}; train --drop-nonfinite leaves them out",
    "num_without_embeddings": "the embeddings of {} are not stored: they had L + 1 hidden states and attention of L "
    "layers",
    "num_without_last_state": "one token more than hidden states in {}: a model computes no state for the last token "
    "that it generates",
    "num_without_tokens": "no token ids in {}; a line for tokens names them",
    "num_made_up_ids": "no question_id in {}: file name and position were used; a line for question_id, with "
    "--overwrite, names it",
}
# Counts of a conversion that are those of the store.
_TOTALS = (
    "num_traces", "num_segments", "num_unscored", "num_unlabeled", "num_label_conflicts", "num_scores_without_trace",
    "generation", "bytes_out",
)  # fmt: skip


_ROUNDING = "; the relative error of values from 6.1e-05 on is at most 0.049 %"  # float16 has 11 digits


def _counts(keys: Mapping[str, int]) -> str:
    """Return the first keys with their numbers of traces."""
    return some_of([f"{escape_unprintable(key, 60)} ({count:,})" for key, count in keys.items()], _MAX_NAMES)


@dataclass(kw_only=True)
class AddedCounts:
    """Counts of a source that a conversion adds up under the same name."""

    num_duplicates: int = 0
    num_nonfinite: int = 0
    num_without_embeddings: int = 0
    num_without_tokens: int = 0
    num_without_last_state: int = 0
    num_made_up_ids: int = 0


@dataclass
class SourceCounts(AddedCounts):
    """Count what a conversion found in one source."""

    num_bytes: int = 0  # of arrays as in the source
    num_new: int = 0
    num_removing: int = 0  # that lack a value which is stored
    rounded_from: str | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    extras: Counter[str] = field(default_factory=Counter)
    refused: list[InvalidInputError] = field(default_factory=list)

    def count(self, packed: PackedTrace, *, is_new: bool) -> None:
        """Count a trace that is in the store now."""
        record = packed.record
        self.num_bytes += packed.source_bytes
        self.num_nonfinite += packed.num_nonfinite > 0
        if not is_new:
            self.num_duplicates += 1
            return
        self.num_new += 1
        self.rounded_from = self.rounded_from or packed.rounded_from
        self.num_without_embeddings += record.is_without_embeddings
        has_states = packed.num_tokens > 0
        has_texts = packed.field_bits & (FIELD_BITS["tokens"] | FIELD_BITS["tokens_decoded"])
        self.num_without_tokens += has_states and not has_texts and packed.edge_counts is None
        self.num_without_last_state += has_states and record.num_ids == packed.num_tokens + 1
        self.num_made_up_ids += not record.has_own_id and record.question_id.endswith(f":{record.position}")
        # Most traces have neither, and an update of a counter takes as long as all of the above.
        if record.dropped:
            self.dropped.update(set(record.dropped))
        if record.extra_names:
            self.extras.update(record.extra_names)

    def count_block(self, block: TraceBlock) -> None:
        """Do count() for each trace of a block, all of which are new."""
        rows, num_tokens = block.rows, block.rows["num_tokens"]
        self.num_bytes += int(block.source_bytes.sum())
        self.num_nonfinite += int((rows["num_nonfinite"] > 0).sum())
        self.num_new += len(block)
        has_tokens, has_edges = block.has_field("tokens"), rows["attention_layout"] == LAYOUT_EDGES
        has_texts = has_tokens | block.has_field("tokens_decoded")
        self.num_without_tokens += int(((num_tokens > 0) & ~has_texts & ~has_edges).sum())
        self.num_without_last_state += int(((num_tokens > 0) & has_tokens & (block.num_ids == num_tokens + 1)).sum())
        for k in np.flatnonzero(~block.has_field("question_id")).tolist():
            self.num_made_up_ids += block.ids[k].endswith(f":{rows['source_position'][k]}")
        for kind, count in Counter(block.kinds.tolist()).items():  # in the order of the traces
            facts = block.facts[kind]
            self.rounded_from = self.rounded_from or facts.rounded_from
            self.num_without_embeddings += count * facts.record.is_without_embeddings
            self.dropped.update(dict.fromkeys(facts.record.dropped or (), count))
            self.extras.update(dict.fromkeys(facts.record.extra_names, count))


@dataclass
class ConvertReport(AddedCounts):
    """Counts of a conversion; the JSON document of `tracestore convert --json`."""

    store: str
    num_sources: int = 0
    num_sources_skipped_existing: int = 0
    num_sources_skipped: int = 0
    num_sources_modified: int = 0
    num_traces_read: int = 0
    num_traces_new: int = 0
    num_conflicts: int = 0
    num_traces_refused: int = 0
    refused_file: str | None = None
    dropped: dict[str, int] = field(default_factory=dict)  # number of traces by key
    extras: dict[str, int] = field(default_factory=dict)  # number of traces by key that is no field
    num_sources_rounded: dict[str, int] = field(default_factory=dict)  # by dtype, to float16
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    scores_file: str | None = None
    attention: str | None = None  # of the store: mean, heads or none
    num_unscored: int = 0
    num_unlabeled: int = 0  # traces without a label or the default score
    labels: str | None = None
    num_label_conflicts: int = 0  # traces of the store whose label differs from that of their score
    unlabeled: str | None = None
    groups: str | None = None
    num_scores_without_trace: int = 0
    num_traces: int = 0
    num_segments: int = 0
    generation: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)

    def add(self, size: int, found: SourceCounts) -> None:
        """Add the counts of a source of that many bytes."""
        self.num_sources += 1
        self.bytes_in += size
        self.num_traces_read += found.num_new
        for item in fields(AddedCounts):
            setattr(self, item.name, getattr(self, item.name) + getattr(found, item.name))
        rounded = {found.rounded_from: 1} if found.rounded_from else {}
        self._add_details(found.dropped, found.extras, rounded)

    def add_labels(self, columns: Columns, attributes: Attributes) -> None:
        """Describe the labels that the columns of the store give with its default score."""
        name = attributes.default_score
        scores, labels = columns.score(name), columns.labels
        self.num_unlabeled = int((np.isnan(labels) & np.isnan(scores)).sum())
        self.unlabeled = unlabeled_note(columns.scores, labels, name)
        self.groups = next(columns.describe_groups(), None)
        if name is not None and not np.isnan(scores).all():
            direction = attributes.scores[name].direction
            self.labels = f"{name}: {describe(scores, labels, None, direction)}"
            self.num_label_conflicts = int(disagreements(scores, labels, None, direction).sum())

    def add_earlier(self, before: "ConvertReport") -> None:
        """Add the counts of an earlier conversion of the same store."""
        for item in fields(self):
            value = getattr(before, item.name)
            if item.name not in _TOTALS and isinstance(value, int | float | list):
                setattr(self, item.name, value + getattr(self, item.name))
        self._add_details(before.dropped, before.extras, before.num_sources_rounded)

    def _add_details(self, dropped: Mapping[str, int], extras: Mapping[str, int], rounded: Mapping[str, int]) -> None:
        totals = (self.dropped, dropped), (self.extras, extras), (self.num_sources_rounded, rounded)
        for total, added in totals:
            for key, count in added.items():
                if key in total or len(total) < _MAX_KEYS:
                    total[key] = total.get(key, 0) + count

    def lines(self, on_conflict: OnConflict) -> Iterator[str]:
        """Yield the report as lines of text."""
        yield (
            f"{plural(self.num_traces_new, 'trace')} added from {plural(self.num_sources, 'file')} in {self.seconds:.1f} s "
            f"({plural(self.num_sources_skipped_existing, 'file')} already in the store, "
            f"{plural(self.num_duplicates, 'duplicate')} and {plural(self.num_sources_skipped, 'file')} skipped)"
        )
        yield (
            f"{self.store}: {plural(self.num_traces, 'trace')} in {plural(self.num_segments, 'segment')}, "
            f"{format_size(self.bytes_in)} in, {format_size(self.bytes_out)} out with index and texts, "
            f"{self.num_unlabeled:,} without a label or score"
        )
        yield from filter(None, (self.labels, self.unlabeled, self.groups))
        for name, text in _NOTES.items():
            if count := getattr(self, name):
                yield text.format(plural(count, "trace"), ON_CONFLICT[on_conflict])
        if self.dropped:
            yield f"not stored, because no field holds such values: {_counts(self.dropped)}"
        if others := {name: count for name, count in self.extras.items() if name not in VERDICTS}:
            yield f"stored as extras, because no field holds them: {_counts(others)}"
        if replaced := {name: count for name, count in self.extras.items() if name in VERDICTS}:
            why = (
                "because a scores file was given"
                if self.scores_file
                else "not as scores, because no line names them, or they are none (--score-column takes one)"
            )
            yield f"stored as extras, {why}: {_counts(replaced)}"
        if self.num_traces_refused:
            yield f"{plural(self.num_traces_refused, 'trace')} refused, listed in {self.refused_file}"
        for dtype, count in self.num_sources_rounded.items():
            advice = "" if dtype == "float64" else "; --dtype keep keeps them"  # no store holds float64
            yield f"{dtype} values of {plural(count, 'file')} were rounded to float16{advice}{_ROUNDING}"
        if self.num_scores_without_trace:
            yield f"{plural(self.num_scores_without_trace, 'score')} without a trace"
