"""Scores of a conversion: from a scores file, or from the traces themselves."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from tracestore.console import Output, plural
from tracestore.convert.options import ConvertOptions
from tracestore.convert.table_ids import TableIds
from tracestore.errors import InvalidInputError, UsageError, escape_unprintable
from tracestore.ingest.discovery.tables_beside import unread_tables
from tracestore.ingest.exports.manifest import ExportFacts
from tracestore.ingest.roles.columns import UNNAMED
from tracestore.ingest.roles.keys import INPUTS_PAGE, KeyOptions, direction_of, label_of_path, parse_map
from tracestore.ingest.score_files import ID_COLUMN, find_score_files
from tracestore.ingest.scores import Scores, read_scores, score_name
from tracestore.ingest.sources import SourceFile, with_classes
from tracestore.store.format import schema
from tracestore.store.format.labels import CORRECT, HALLUCINATION, ScoreField
from tracestore.store.read.columns import TraceValues
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.writer import StoreWriter

if TYPE_CHECKING:
    from tracestore.convert.described import DescribedRun


_LONG_IDS = ("the ids of ", " keep the folder that names their class, because several files have one name")


class Scoring:
    """Choose the scores of a conversion.

    A scores file replaces scores and labels inside traces, which are then extras only. One that the user names
    replaces those of exports too.

    Parameters
    ----------
    arguments : list of Path
        Folders that may hold the scores file.
    sources : list of SourceFile
        The trace files found in them.
    options : ConvertOptions
        Options of the conversion.
    output : Output
        Receives a note about the file.
    described : DescribedRun, optional
        The conversion by a layout, whose labels are stored at its end.

    Attributes
    ----------
    file : Scores or None
        The scores file.
    sources : list of SourceFile
        The trace files without the scores file.
    scores_file : str or None
        Path of the scores file, or paths.
    keys : KeyOptions
        Names of the fields of a trace, with the key of its score.

    Raises
    ------
    UsageError
        If the scores file is missing or ambiguous, or an option needs one.
    InvalidInputError
        If the content of the scores file is invalid.
    """

    def __init__(
        self,
        arguments: list[Path],
        sources: list[SourceFile],
        options: ConvertOptions,
        output: Output,
        described: "DescribedRun | None" = None,
    ) -> None:
        self._described = described
        is_read = described is None or described.is_builtin or options.scores is not None
        self.file, paths = _read_files(arguments, sources, options, output) if is_read else (None, [])
        self.scores_file = ", ".join(map(str, paths)) or None
        found = [source for source in sources if source.path not in paths]
        self.sources = with_classes(found) if described is None else found
        for facts in {s.export.facts.folder: s.export.facts for s in sources if s.export is not None}.values():
            output.info(f"export: {facts.folder}, format {facts.format}")
            if options.scores is None:
                facts.check_scores_file()
        if options.scores is not None:
            self.sources = [source.without_values() for source in self.sources]
        self._export: ExportFacts | None = None  # of the source, if its values are used
        self._source_path = ""  # of a source whose ids keep the folder of its class
        self._table = ""  # of the source
        if self.file is not None and self.file.in_order and len(self.sources) != 1:
            raise UsageError(
                f"{self.file.path} has no ids and fits one trace file, found {len(self.sources):,}; "
                f"write a table with {ID_COLUMN}"
            )
        self._num_positions = self._num_replaced = 0
        self._ids = TableIds(self.file)
        self._output, self._direction = output, options.score_direction
        self._name = ""  # of the file's scores in the store
        self._used: Counter[tuple[str, str]] = Counter()  # by the texts before and behind a number of traces
        self._unused: Counter[str] = Counter()  # by the key of values that may be labels
        self._unscored: Counter[str] = Counter()  # the same, in traces without a score in the file
        has_no_padding = options.padding == "none"
        renamed = () if options.map is None else parse_map(options.map)
        if self.file is not None:
            id_key = None if self.file.id_column == ID_COLUMN else self.file.id_column
            self.keys = KeyOptions(renamed, has_scores_file=True, id_key=id_key, has_no_padding=has_no_padding)
            return
        if options.group_column is not None:
            raise UsageError("--group-column needs a scores file: give --scores")
        column = options.score_column
        if column is None and options.score_direction is not None:
            raise UsageError("--score-direction needs a scores file (--scores) or the key of a score (--score-column)")
        if column is not None and options.score_direction is None and direction_of(column) is None:
            raise UsageError(
                f"a high {column} may mean a correct or a hallucinated answer; "
                "choose --score-direction correct or --score-direction hallucination"
            )
        if options.id_column is not None:
            if any(field == "question_id" for field, _ in renamed):
                raise UsageError("--id-column and --map question_id=KEY name the same field")
            renamed = (*renamed, ("question_id", options.id_column))
        self.keys = KeyOptions(renamed, score_key=column, has_no_padding=has_no_padding)

    def begin(self, writer: StoreWriter) -> None:
        """Define the score of the file in the store."""
        if self.file is not None:
            self._name = writer.attributes.default_score or self.file.name
            if self._name != self.file.name:
                self._output.info(
                    f"{self.file.path.name}: column {escape_unprintable(self.file.column, 60)} is stored as {self._name}, "
                    "the default score of the store; tracestore score --name stores it under another name"
                )
            writer.define_score(self._name, self.file.score_field)
        if self._described is not None:
            self._described.define(writer)

    def begin_source(self, source: SourceFile) -> None:
        """Begin a source, which may have a table, or be part of an export."""
        self._export = source.export.facts if source.export is not None and source.export.has_values else None
        self._ids.begin(source.table)
        is_kept = source.id_folder is None and label_of_path(source.folder) is not None
        self._source_path = f"{source.folder}/{source.stem}" if is_kept else ""
        self._table = (
            "" if source.table is None else f" or their rows in {escape_unprintable(source.table.path.name, 60)}"
        )

    def values(self, writer: StoreWriter, packed: PackedTrace) -> tuple[Mapping[str, float], str]:
        """Return the named scores and the group of a trace; its scores are defined in the store."""
        record = packed.record
        if self._export is not None:
            self._define_scores(writer, self._export)
            return record.scores, record.group
        self._ids.add(packed)
        if self._described is not None:
            scores = self._described.add(packed, writer)
            if self.file is None:
                return scores, record.group
        if self._source_path and record.question_id.startswith(self._source_path):
            self._used[_LONG_IDS] += 1
        if self.file is not None:
            self._set_label(packed, self.file)
        if self.file is not None and self.file.in_order:
            self._num_positions = max(self._num_positions, record.position + 1)
            return {self._name: self.file.score_at(record.position)}, ""
        if self.file is not None:
            score, group = self.file.lookup(record.question_id, record.sample)
            if math.isnan(score):
                extras = json.loads(packed.extras or "{}")
                self._unscored.update(
                    k for k, v in extras.items() if isinstance(v, bool | int | float) and _may_label(k)
                )
            return {self._name: score}, group
        found = {}
        for key, score in record.scores.items():
            name = score_name(key)
            direction = self._direction or direction_of(key) or CORRECT
            stored = writer.attributes.scores.get(name)
            if stored is None or stored.direction != direction:
                writer.define_score(name, ScoreField(direction, f"key {key} of the traces"[:1024]))
            found[name] = score
            text = f"score {escape_unprintable(key, 60)} (high: {direction}): found inside "
            self._used[text, f"{self._table} and used"] += 1
        if record.label is not None:
            place, behind = ("in the paths of", "") if record.is_label_of_path else ("inside", self._table)
            self._used[f"label (1: {HALLUCINATION}): found {place} ", f"{behind} and used"] += 1
        elif not found and UNNAMED in packed.extras:
            extras = json.loads(packed.extras)
            self._unused.update(k for k, v in extras.items() if k.startswith(UNNAMED) and v in (0, 1))
        return found, record.group

    def _set_label(self, packed: PackedTrace, file: Scores) -> None:
        """Give a trace the label of the scores file."""
        record = packed.record
        record.label = file.label_of(record.question_id, record.sample, record.position)
        if record.label is not None:
            packed.field_bits |= schema.FIELD_BITS["label"]
            before = f"label (1: {HALLUCINATION}): found in {escape_unprintable(file.path.name, 60)} for "
            self._used[before, f" and used before the score; --score-column {file.column} uses the score alone"] += 1

    def _define_scores(self, writer: StoreWriter, export: ExportFacts) -> None:
        """Define the named scores of an export in the store, its default score first."""
        for name in sorted(export.scores, key=lambda name: name != export.default_score):
            stored = writer.attributes.scores.get(name)
            if stored is None or stored.direction != export.scores[name].direction:
                writer.define_score(name, export.scores[name])

    def id_of_file(self, packed: PackedTrace, source: str) -> str | None:
        """Return the name of a file if it is an id of the scores file, and the first trace of the file has no id."""
        stem = PurePosixPath(source).name.partition(".")[0]
        is_named = self.file is not None and not packed.record.has_own_id and (stem, 0) in self.file.values
        return stem if is_named else None

    def check_count(self) -> None:
        """Raise InvalidInputError if a scores file without ids has more or fewer scores than the source traces."""
        if self.file is not None and self.file.in_order and len(self.file.in_order) != self._num_positions:
            raise InvalidInputError(self.file.count_text(self._num_positions), source=self.file.path.name)

    def check_ids(self, writer: StoreWriter, *, can_refuse: bool) -> None:
        """Print each table and scores file of which no id is that of a trace.

        Raises
        ------
        InvalidInputError
            If one of them has scores or labels, and the traces have no others; not without `can_refuse`.
        """
        has_others = bool(self._used or writer.manifest.num_scored or np.isfinite(writer.read_columns().labels).any())
        for file in self._ids.unmatched(writer):
            if can_refuse and file.has_scores and not has_others:
                raise InvalidInputError(file.reason(), source=file.path.name)
            self._output.info(f"{file.path.name}: {file.reason()}")

    def add_ids(self, packed: PackedTrace, source: str) -> None:
        """Add a trace of the source for `lines_of_ids`; it is not scored."""
        if (file_id := self.id_of_file(packed, source)) is not None:
            packed.set_question_id(file_id)
        self._ids.add(packed)

    def lines_of_ids(self) -> Iterator[str]:
        """Yield a line for each table and scores file of which no id is that of a trace that was added."""
        for file in self._ids.unmatched(None):
            yield f"{file.path.name}: {file.reason('the first traces of each file')}"

    def fill(self, writer: StoreWriter) -> None:
        """Set the scores of committed traces that have none, from the file."""
        if self._described is not None:
            self._described.fill(writer)
        if self.file is None or self.file.in_order:
            return
        columns = writer.read_columns()
        stored, labels = columns.score(self._name), columns.labels
        updates = {}
        for index, question_id, sample in self._traces_of_file(writer, self.file, stored):
            score, group = self.file.lookup(question_id, sample)
            label = self.file.label_of(question_id, sample, index)
            label = math.nan if label is None else label
            found, before = (score, label, group), (float(stored[index]), float(labels[index]), columns.group(index))
            is_same = [f == b or not f or f != f for f, b in zip(found, before, strict=True)]
            if not all(is_same):
                updates[index] = TraceValues({self._name: score}, label, group or None)
                self._num_replaced += any(
                    not same and b == b and b != "" for same, b in zip(is_same, before, strict=True)
                )
        writer.update_values(updates)
        writer.commit()

    def _traces_of_file(self, writer: StoreWriter, file: Scores, stored: np.ndarray) -> Iterator[tuple[int, str, int]]:
        """Yield index, question id and sample of traces that have no score, or have a row in the scores file.

        The scores of exports count, unless the user names the file.
        """
        without = np.flatnonzero(np.isnan(stored)).tolist()
        for index in without:
            yield index, writer.index.question_id(index), writer.index.row(index).sample
        exported = {s.name for s in self.sources if s.export is not None and s.export.has_values}
        seen = set(without)
        for question_id, first in file.values:
            for sample in itertools.count(first) if not file.has_samples else (first,):
                if (index := writer.index.find(question_id, sample)) < 0:
                    break
                is_exported = exported and writer.index.source(writer.index.row(index).source).path in exported
                if index not in seen and not is_exported:
                    yield index, question_id, sample

    def num_without_trace(self, writer: StoreWriter) -> int:
        """Return how many scores of the file belong to no trace."""
        return 0 if self.file is None else sum(writer.index.find(q, s) < 0 for q, s in self.file.values)

    def lines(self) -> Iterator[str]:
        """Yield what was found inside the traces, and in the names of their folders, and what may be labels."""
        if self._described is not None:
            yield from self._described.lines()
        if self._num_replaced and self.file is not None:
            name = escape_unprintable(self.file.path.name, 60)
            yield f"{name}: scores, labels or groups of {plural(self._num_replaced, 'stored trace')} have changed and were replaced"
        for (before, behind), count in self._used.items():
            yield f"{before}{plural(count, 'trace')}{behind}; see {INPUTS_PAGE}#scores"
        for key, count in self._unscored.items():
            assert self.file is not None
            yield (
                f"{escape_unprintable(key, 60)}: found inside {plural(count, 'trace')} without a score in "
                f"{self.file.path.name}, not used, because the scores file counts; add their scores to it"
            )
        for key, count in self._unused.items():
            yield (
                f"{key}: 0 or 1 in {plural(count, 'trace')}, not used; --map label={key} takes them as labels "
                f"(1: {HALLUCINATION})"
            )


def _may_label(key: str) -> bool:
    """Return whether a key of a trace is that of its label or score, which a scores file replaces."""
    return key in ("label", "labels") or direction_of(key) is not None


def _read_files(
    arguments: list[Path], sources: list[SourceFile], options: ConvertOptions, output: Output
) -> tuple[Scores | None, list[Path]]:
    """Return the scores, and the paths of their files."""
    paths = [Path(options.scores)] if options.scores else find_score_files(arguments, sources)
    scores: Scores | None = None
    for path in paths:
        found = read_scores(
            path, options.score_column, options.group_column, options.score_direction, options.id_column
        )
        count = len(found.values) or len(found.in_order)
        output.info(f"scores: {path}, column {found.column}, {plural(count, 'question')}")
        if scores is None:
            scores = found
        else:
            scores.join(found)
    if unread := _unread(arguments, sources, paths):
        names = ", ".join(escape_unprintable(path.name, 60) for path in unread)
        output.info(
            f"not read: {names}; rows belong to traces by id, by the name of a file, or in order if there are as many: "
            f"{INPUTS_PAGE}#files-that-belong-together"
        )
    return scores, paths


def _unread(arguments: list[Path], sources: list[SourceFile], scores: list[Path]) -> list[Path]:
    """Return the tables next to the sources from which nothing is taken."""
    tables = [source.table for source in sources if source.table is not None]
    used = {path for source in sources for path in (source.path, *source.parts)} | set(scores)
    used |= {path for table in tables for path in (table.path, *table.others)}
    folders = {path.parent for path in used} | {path for path in arguments if path.is_dir()}
    folders -= {source.export.facts.folder for source in sources if source.export is not None}
    return unread_tables(folders, used)
