"""Scores of a conversion: from a scores file, from an export, or from the fields of the layouts."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracestore.console import Output
from tracestore.convert.described import DescribedRun
from tracestore.convert.options import ConvertOptions
from tracestore.errors import InvalidInputError, UsageError, escape_unprintable
from tracestore.ingest.exports.export_manifest import ExportFacts
from tracestore.ingest.layout.fields import score_of
from tracestore.ingest.left_values import LABEL, earlier_note
from tracestore.ingest.score_files import COLUMN_OPTIONS, ScoreRow, ambiguous_direction, direction_of
from tracestore.ingest.scores import Scores, read_scores
from tracestore.ingest.sources import SourceFile
from tracestore.ingest.stored_values import ChangedValues, is_none, keys_of, stored_values, without_row_note
from tracestore.store.format import schema
from tracestore.store.format.labels import HALLUCINATION
from tracestore.store.vocabulary import JUDGMENTS
from tracestore.store.write.field_values import check_agreement
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.writer import StoreWriter
from tracestore.store.write.written import TraceBlock, WrittenSegment
from tracestore.words import plural


class Scoring:
    """Choose the scores of a conversion.

    A scores file replaces scores and labels inside traces of built-in layouts, which are then extras only. One that the
    user names replaces those of exports too.

    Parameters
    ----------
    described : DescribedRun
        The sources, and the scores files next to them.
    options : ConvertOptions
        Options of the conversion.
    output : Output
        Receives a note about the file.

    Attributes
    ----------
    file : Scores or None
        The scores file.
    sources : list of SourceFile
    scores_file : str or None
        Path of the scores file, or paths.
    num_without_trace : int
        Rows of the file that no committed trace has, after fill().

    Raises
    ------
    UsageError
        If the scores file is missing or ambiguous, or an option needs one.
    InvalidInputError
        If the content of the scores file is invalid.
    """

    def __init__(self, described: DescribedRun, options: ConvertOptions, output: Output) -> None:
        self._described, self._output, self._on_conflict = described, output, options.on_conflict
        self.file = _read_files(described, options, output)
        self.scores_file = ", ".join(map(str, described.score_files.scores)) or None
        self.sources = described.sources
        for facts in {s.export.facts.folder: s.export.facts for s in self.sources if s.export is not None}.values():
            output.info(f"export: {facts.folder}, format {facts.manifest.format}")
            if options.scores is None:
                facts.check_scores_file()
        if options.scores is not None:
            self.sources = [source.without_values() for source in self.sources]
        self._exports = [s.export.facts for s in self.sources if s.export is not None and s.export.has_values]
        self._export: ExportFacts | None = None  # of the source, if its values are used
        self._num_labels, self.num_without_trace = 0, 0
        self._changes: list[str] = []  # of stored traces
        self._was_labeled = False  # whether the store had labels before
        self._without_row: dict[tuple[str, int], None] = {}  # keys of traces that the file lacks
        self._matched: set[tuple[str, int]] = set()  # keys of rows that traces have
        self._unscored: Counter[str] = Counter()  # by the key of values that may be labels, in traces without a score
        # Labels inside of built-in layouts; those of a line of another one are its own.
        self._replaces_labels = described.finds_layouts and LABEL not in described.own
        described.has_group_column = self.file is not None and self.file.has_groups
        if self.file is None:
            _check_flags(options)
        else:
            _check_layouts(self.file, described)

    def begin(self, writer: StoreWriter) -> None:
        """Define the score of the file in the store."""
        self._was_labeled = bool(writer.manifest.num_scored or writer.manifest.num_labeled)
        if self._described.judgments:
            self._described.define(writer)  # the first score of a store is its default
        if self.file is not None:
            writer.define_score(self.file.name, self.file.score_field)
        self._described.define(writer)

    def begin_source(self, source: SourceFile) -> None:
        """Begin a source, which may be part of an export."""
        self._export = source.export.facts if source.export is not None and source.export.has_values else None

    def values(self, writer: StoreWriter, packed: PackedTrace) -> tuple[Mapping[str, float], str]:
        """Return the named scores and the group of a trace."""
        record = packed.record
        if self._export is not None:
            self._define_scores(writer, self._export)
            return record.scores, record.group
        self._described.add_states(packed)
        if self.file is None:
            return record.scores, record.group
        self.set_label(packed)
        row, group = self.file.row_of(record.question_id, record.sample), record.group
        if row is None:
            self._without_row[record.question_id, record.sample] = None
            row = ScoreRow()
        else:
            group = self._group(record, row)
            self._matched.add(self.file.key_of(record.question_id, record.sample))
            self.file.check_question(record.question_id, record.sample, _question(packed))
            if self.file.name in JUDGMENTS and not self._replaces_labels:
                own = {} if record.label is None else {"label": record.label}
                check_agreement({**own, **record.scores, **record.deferred_scores, self.file.name: row.score})
        if self._replaces_labels and writer.index.find(record.question_id, record.sample) >= 0:
            record.label = None  # fill() replaces the stored one
        if math.isnan(row.score):  # values that may be the label or the score, and which the file replaces
            extras = json.loads(packed.extras or "{}").items()
            numbers = [key for key, value in extras if isinstance(value, bool | int | float)]
            self._unscored.update(k for k in numbers if k in ("label", "labels") or direction_of(k) is not None)
        return {**record.scores, self.file.name: row.score}, group

    def define(self, writer: StoreWriter, record: TraceRecord) -> None:
        """Define the scores of a trace that is stored."""
        if self._export is None:
            self._described.define_scores(record.scores, writer)

    def _group(self, record: TraceRecord, row: ScoreRow) -> str:
        """Return the group of a trace with a row of the file, whose groups replace those inside of built-in layouts."""
        assert self.file is not None
        is_other = self.file.has_groups and record.group not in ("", row.group)
        if not is_other:
            return row.group or record.group
        if row.group and self._described.finds_layouts:
            return row.group
        if row.group or self._on_conflict == "error":
            way = "--group-column names another column, or leave out one of them"
            way = way if row.group else "--on-conflict keep-last removes the group, keep-first keeps it"
            raise InvalidInputError(
                f"found the group {record.group!r:.42}, and {row.group!r:.42} in {self.file.path.name}; {way}",
                position=record.position,
                field="group",
            )
        return record.group if self._on_conflict == "keep-first" else ""

    def fits(self, block: TraceBlock) -> bool:
        """Return whether add_block() can do values() for each trace of a block: not where a scores file has a row for each."""
        return self._export is not None or (self.file is None and self._described.fits(block))

    def add_block(self, writer: StoreWriter, block: TraceBlock) -> None:
        """Do values() for each trace of a block for which fits() is true."""
        if self._export is not None:
            self._define_scores(writer, self._export)
        else:
            self._described.add_block(block, writer)

    def set_label(self, packed: PackedTrace) -> None:
        """Give a trace the label of the scores file, which replaces that of a built-in layout."""
        record, file = packed.record, self.file
        if file is None or self._export is not None:
            return
        row = file.row_of(record.question_id, record.sample)
        label = None if row is None or math.isnan(row.label) else row.label
        if not self._replaces_labels and record.label is not None:
            if label not in (None, record.label):
                raise InvalidInputError(
                    f"found label {record.label:g} by the layout and {label:g} in {file.path.name}; --score-column "
                    f"{file.column} uses the score alone",
                    position=record.position,
                    field="label",
                )
            return
        record.label = label
        if label is not None:
            packed.field_bits |= schema.FIELD_BITS["label"]
            self._num_labels += 1

    def _define_scores(self, writer: StoreWriter, export: ExportFacts) -> None:
        """Define the named scores of an export in the store, its default score first."""
        for name in sorted(export.scores, key=lambda name: name != export.default_score):
            stored = writer.attributes.scores.get(name)
            if stored is None or stored.direction != export.scores[name].direction:
                writer.define_score(name, export.scores[name])

    def check_ids(self, writer: StoreWriter, *, can_refuse: bool) -> Iterator[str]:
        """Check rules 12b and 12c of the scores file: some of its ids are those of traces; yield what else is wrong.

        Raises
        ------
        InvalidInputError
            If none is, and the store had no labels before; not without `can_refuse`. If ids without a trace and traces without a
            row differ by spelling or by one.
        """
        if self.file is None:
            return
        # An earlier run may have committed traces, and refused the ids at its end.
        unscored = self._sources_have(writer)[0] & np.isnan(writer.read_columns().score(self.file.name))
        keys = keys_of(writer.index, np.flatnonzero(unscored))
        committed = dict.fromkeys(key for key in keys if self.file.row_of(*key) is None)
        if not (missing := committed | self._without_row):
            return
        matched = self._matched.union(self.file.key_of(*key) for key in keys_of(writer.index))
        message = self.file.check_ids(matched, missing, is_whole=can_refuse)
        if message is None:
            return
        if can_refuse and not self._was_labeled:
            raise InvalidInputError(message, source=self.file.path.name)
        yield f"{self.file.path.name}: {message}"

    def fill(self, writer: StoreWriter) -> None:
        """Set scores, labels and groups of committed traces as the file has them now."""
        self._described.fill(writer, self._on_conflict)
        if self.file is not None:
            self._fill(writer, self.file)
        is_own = np.logical_or(*self._sources_have(writer))
        is_own[[index for key in self._described.deferred if (index := writer.index.find(*key)) >= 0]] = True
        gives_all_groups = self._exports or (self.file is not None and self.file.has_groups)
        with_group = None if gives_all_groups else self._described.with_group(writer)
        self._changes += earlier_note(writer, is_own, self._given(writer), with_group)

    def _fill(self, writer: StoreWriter, file: Scores) -> None:
        values, num_kept, used = ChangedValues(writer, self._on_conflict), 0, set[tuple[str, int]]()
        is_own, is_exported = self._sources_have(writer)
        is_scored = ~np.isnan(values.columns.score(file.name))
        # Inside of built-in layouts, only the label of the file is one.
        is_label_lost = is_own & ~np.isnan(values.columns.labels) & self._replaces_labels
        no_label = None if file.label_column is None else math.nan
        for index, key in enumerate(keys_of(writer.index)):
            row, label = file.row_of(*key), math.nan if is_label_lost[index] else None
            if row is None:
                has_group = file.has_groups and values.columns.group(index) != ""
                num_kept += int(is_own[index] and (is_scored[index] or has_group))
                if label is not None:
                    values.set(index, {}, label, None)
                continue
            used.add(file.key_of(*key))
            if not (is_exported[index] and is_scored[index]):  # the scores of exports count
                label = (label or no_label) if math.isnan(row.label) else row.label
                values.set(index, {file.name: row.score}, label, row.group if file.has_groups else None)
        self.num_without_trace = len(file.rows) - len(used)
        values.check_questions(file)
        values.commit()
        name = escape_unprintable(file.path.name, 60)
        self._changes = [f"{name}: {line}" for line in values.lines()]
        self._changes += without_row_note(num_kept, name, file.name + " or the group" * file.has_groups)

    def has_stored(self, writer: StoreWriter) -> bool:
        """Return whether all values of a store may be those that a conversion without an earlier one gives."""
        columns, file, fields = writer.read_columns(), self.file, writer.attributes.scores
        if not fields.keys() <= self._given(writer):
            return False
        if file is None or fields.get(file.name, file.score_field) != file.score_field:
            return file is None
        num_compared = 2 + (self._described.finds_layouts or file.label_column is not None)
        own = np.flatnonzero(self._sources_have(writer)[0])
        for index, key in zip(own.tolist(), keys_of(writer.index, own), strict=True):
            score, label, group = stored_values(columns, index, [file.name])
            row: tuple[Any, ...] = file.row_of(*key) or ScoreRow()
            pairs = zip((score, group, label)[:num_compared], row, strict=False)
            if any(old != new and not (is_none(old) and is_none(new)) for old, new in pairs):
                return False
        return True

    def _given(self, writer: StoreWriter) -> set[str]:
        """Return the names of the scores that the conversion gives, and "label"."""
        names = self._described.given(writer).union(*([LABEL, *facts.scores] for facts in self._exports))
        return names if self.file is None else names | {self.file.name, *([LABEL] if self.file.label_column else [])}

    def _sources_have(self, writer: StoreWriter) -> tuple[np.ndarray, np.ndarray]:
        """Return for each committed trace whether a source of now has it, without and with values of an export."""
        exported = {s.name for s in self.sources if s.export is not None and s.export.has_values}
        names = {source.name for source in self.sources} - exported
        names |= {old for old, new in writer.moved.items() if new in names}
        paths = [source.path for source in writer.index.sources()] if writer.manifest.num_traces else []
        of_sources = writer.index.read_column("source")
        own, other = (np.array([path in found for path in paths], bool)[of_sources] for found in (names, exported))
        return own, other

    def lines(self) -> Iterator[str]:
        """Yield what was found inside the traces and in the scores file."""
        yield from self._described.lines()
        yield from self._changes
        if self.file is None:
            return
        name = escape_unprintable(self.file.path.name, 60)
        if self._num_labels:
            yield (
                f"label (1: {HALLUCINATION}): found in {name} for {plural(self._num_labels, 'trace')} and used before the "
                f"score; --score-column {self.file.column} uses the score alone"
            )
        for key, count in self._unscored.items():
            yield (
                f"{escape_unprintable(key, 60)}: found inside {plural(count, 'trace')} without a score in {name}, not "
                "used, because the scores file counts; add their scores to it"
            )


def _question(packed: PackedTrace) -> str | None:
    """Return the question of a trace; one that a task has written has its texts in a segment."""
    if isinstance(packed.segment, WrittenSegment):
        has_question = packed.field_bits & schema.FIELD_BITS["question"]
        return packed.segment.reader.string("question", packed.row) if has_question else None
    return packed.record.strings.get("question")


def _check_layouts(file: Scores, described: DescribedRun) -> None:
    """Raise UsageError for labels or scores that both the file and a layout that is not built in give."""
    field, column = next((name for name in described.own if score_of(name) == file.name), None), file.column
    if file.label_column is not None and described.judgments:
        field, column = described.judgments[0], file.label_column
    what = "judge the answers" if field in described.judgments else f"give {file.name}"
    if field is not None:
        raise UsageError(
            f"{file.path.name}: its column {escape_unprintable(column, 60)} and {field} of the layout both {what}; leave out one "
            "of them, or name another column with --score-column"
        )


def _check_flags(options: ConvertOptions) -> None:
    """Raise UsageError for flags that need a scores file, which the conversion has not."""
    if options.group_column is not None:
        raise UsageError("--group-column needs a scores file: give --scores")
    column = options.score_column
    if column is None and options.score_direction is not None:
        raise UsageError("--score-direction needs a scores file (--scores) or the key of a score (--score-column)")
    if column is not None and options.score_direction is None and direction_of(column) is None:
        raise ambiguous_direction(column)


def _read_files(described: DescribedRun, options: ConvertOptions, output: Output) -> Scores | None:
    """Return the scores of the files, and name the tables that are not read."""
    scores: Scores | None = None
    for path in described.score_files.scores:
        found = read_scores(path, **{name: getattr(options, name) for name in COLUMN_OPTIONS})
        output.info(f"scores: {path}, column {found.column}, {plural(len({key[0] for key in found.rows}), 'question')}")
        if scores is None:
            scores = found
        else:
            scores.join(found)
    if described.score_files.unread:
        names = ", ".join(escape_unprintable(path.name, 60) for path in described.score_files.unread)
        output.info(f"not read: {names}; --scores FILE takes the scores of a table")
    return scores
