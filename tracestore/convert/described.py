"""Sources that layouts describe, and their labels: stored when the accounts of the run close."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.ingest.builtin.parts import Part, sources_in_order
from tracestore.ingest.execute.execution import Execution
from tracestore.ingest.exports.export_manifest import find_export
from tracestore.ingest.layout.fields import score_of
from tracestore.ingest.left_values import GROUP, LABEL, GoneTraces, LeftValues, is_of_layout, kind_of, merged, origin_of
from tracestore.ingest.score_files import FoundFiles
from tracestore.ingest.sources import SourceFile
from tracestore.ingest.stored_values import ChangedValues, is_none, stored_values
from tracestore.store.format.labels import CORRECT, HALLUCINATION, ScoreField
from tracestore.store.read.columns import Columns, TraceValues
from tracestore.store.vocabulary import JUDGMENTS
from tracestore.store.write.keys import OnConflict
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.writer import StoreWriter
from tracestore.store.write.written import TraceBlock
from tracestore.words import plural

_COPY = re.compile(r"( \(\d+\)|[-_ .](checkpoint|copy ?\d*|bak|backup|old|orig))+$", re.IGNORECASE)


class DescribedRun:
    """A conversion by layouts: its sources, the labels to store, and the accounts.

    Parameters
    ----------
    parts : sequence of Part
        The layouts, each with its files.
    order : Mapping
        The positions of all files by their paths.
    score_files : FoundFiles
        The scores files of the run.
    finds_layouts : bool
        Whether the layouts were found: built in, kept in the store or proposed. Otherwise one is stated for all files.

    Attributes
    ----------
    parts, order, score_files
    sources : list of SourceFile
        In the order of their files.
    read : set of str
        The names of those that were read and stored.
    keeps_copies : bool
        Whether copies are meant.
    left : LeftValues
    deferred : dict
        The scores and labels that fill() stores, by keys; each trace that is read although the store has it is among them.
    own, judgments : set of str, list of str
        The labels and scores, and those that judge the answers, of layouts that are not built in.
    """

    def __init__(
        self, parts: Sequence[Part], order: Mapping[Path, int], score_files: FoundFiles, *, finds_layouts: bool = False
    ) -> None:
        self.parts, self.order, self.score_files, self.finds_layouts = parts, order, score_files, finds_layouts
        self.sources = sources_in_order(parts, order)
        for folder in {place for source in self.sources for path in source.files for place in path.parents[:2]}:
            find_export(folder)  # refuses an unfinished or damaged export
        self._directions = {n: d for part in parts for n, d in part.directions.items()}
        # A layout that is stated, proved or kept, and not built in, is kept in the store.
        own = [part for part in parts if part.kept_text is not None]
        self._has_own = bool(own)
        self.own = {name for part in own if part.layout is not None for name in part.layout.directions()}
        self.judgments = [name for name in (*JUDGMENTS, LABEL) if name in self.own]
        # In the order in which a score of a new store is the default.
        in_order = dict.fromkeys((*self.judgments, *self._directions))
        self._fields = {score_of(n): (k, n) for k, n in reversed([*enumerate(in_order)])}
        self._defined, self._known = set[str](), set[str]()  # in this run, and before
        self._chosen = {
            score_of(n) for part in parts if part.builtin for n in part.builtin.lines if n in self._directions
        }
        self._counts_new = finds_layouts and not own
        self._stated: frozenset[str] = frozenset()  # what each trace of the open source has, or else it has none
        self._without_group: set[tuple[str, int]] = set()
        self.left = LeftValues()
        self.has_group_column = False  # of the scores file
        self._executions = [part.execution for part in parts if part.execution is not None]
        # Scores of tables, which are stored when the accounts close.
        self._deferred_scores = {name for execution in self._executions for name in execution.scores_of_tables()}
        self.keeps_copies = any("duplicates" in execution.layout.settings for execution in self._executions)
        self._labels: dict[tuple[str, int], dict[str, float]] = {}  # of the traces so far
        self.deferred: dict[tuple[str, int], dict[str, float]] = {}
        self._groups: dict[tuple[str, int], str] = {}
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._num_traces = 0
        self._has_new = False
        self._layer_ids: list[tuple[int, ...] | None] = []  # those of the first source, when it is known
        self._ids_of_states: dict[int, str] = {}  # by the checksum and the number of tokens
        self.num_equal = 0
        self._changes: list[str] = []  # of stored traces
        self.read: set[str] = set()

    def shared_note(self, num_alone: int) -> str:
        """Return the note that sources which share tables are one task, with `num_alone` tasks without the tables."""
        tables = sorted({text for execution in self._executions for text in execution.tables})
        return (
            f"all files share rows of {', '.join(tables)}: one task instead of {num_alone}; to divide the conversion, replace "
            f"the lines of labels and scores by ignore = {json.dumps(tables)}, and add them later: tracestore score STORE "
            f"--scores {tables[0]}"
        )

    def probes(self) -> list[SourceFile]:
        """Return the sources for a look at their first traces, which leaves the accounts of the run alone."""
        return sources_in_order([part.probe() for part in self.parts], self.order)

    def states_attention(self) -> bool | None:
        """Return whether the layouts state attention; None if the traces may have it."""
        found = {part.states_attention for part in self.parts}
        return True if True in found else None if None in found else False

    def check_layers(self, record: TraceRecord) -> None:
        """Rule 1: every source has the same numbers of layers."""
        self._layer_ids = self._layer_ids or [record.layer_ids]
        (known,) = self._layer_ids
        if record.layer_ids != known:
            found, expected = ("none" if ids is None else list(ids) for ids in (record.layer_ids, known))
            raise InvalidInputError(
                f"found {found!s:.80}, expected {expected!s:.80} as in the first source", field="layer_ids"
            )

    def look_back(self, unread: Sequence[str]) -> None:
        """Let the accounts know the first trace of the sources that are not read, because the store has them."""
        for execution in self._executions:
            if (record := execution.look_back(unread)) is not None:
                self.check_layers(record)

    def begin_source(self, source: SourceFile, writer: StoreWriter) -> None:
        """Begin a source. A score that a built-in layout knows, and another command has defined, is not of its files."""
        if source.export is not None:
            self._stated = source.export.stated
            return
        stated = frozenset[str]() if source.described is None else source.described.stated
        near = {LABEL, GROUP, *self.own, *(self._fields.get(name, (0, ""))[1] for name in writer.attributes.scores)}
        self._stated = frozenset(name for name in near if name in stated and self._gives(name, writer))

    def needs_all(self) -> bool:
        """Return whether others than the sources that were read may have what a line or an entry names, or rows of a table."""
        executions = [execution for execution in self._executions if execution.account.num_read]
        for execution in executions:
            execution.finish()
        return any(e.account.needs_all or e.account.not_found() is not None or self._needs_equal(e) for e in executions)

    def _needs_equal(self, execution: Execution) -> bool:
        return execution.layout.settings.get("duplicates") == "keep" and not self.num_equal

    def fits(self, block: TraceBlock) -> bool:
        """Return whether add_states() refuses no trace of a block."""
        return not any(self._is_copy(*ids) for ids in self._equal(block)[1])

    def _equal(self, block: TraceBlock) -> tuple[dict[int, str], list[tuple[str, str]]]:
        """Return the id of the first trace with each states of a block, and the other ids with them."""
        first = dict(reversed(block.states))
        first |= {states: self._ids_of_states[states] for states in first.keys() & self._ids_of_states.keys()}
        return first, [(first[states], name) for states, name in block.states if first[states] != name]

    def add_block(self, block: TraceBlock, writer: StoreWriter) -> None:
        """Do add_states() and define_scores() for each trace of a block for which fits() is true."""
        first, equal = self._equal(block)
        self._ids_of_states |= first
        self.num_equal += len(equal)
        self.define_scores(block.score_names(), writer)

    def define_scores(self, names: Iterable[str], writer: StoreWriter) -> None:
        """Define named scores of traces that are stored at once."""
        for name in names:
            if name in self._fields:
                self._define(writer, self._fields[name][1])

    def added_block(self, block: TraceBlock) -> None:
        """Do added() for each trace of a block, all of which are new."""
        self._has_new = True
        self._groups |= {key: group for key, group in zip(block.keys, block.groups, strict=True) if group}
        has_label, *has_score = block.has_value.sum(axis=0).tolist()
        if any(has_score) or (has_label and not self.finds_layouts):
            for k in range(len(block)):
                self.added(block.record(k), is_new=True, is_known=False, is_replaced=False, loses=None)
            return
        self._num_traces += len(block)
        labels = Counter(block.values[block.has_value[:, 0], 0].tolist())
        for label, count in labels.items():
            self._counts[LABEL][kind_of(label)] += count

    def added(
        self, record: TraceRecord, *, is_new: bool, is_known: bool, is_replaced: bool, loses: bool | None
    ) -> None:
        """Keep the labels of a stored trace that a table gives, or that replace those of the same trace.

        Parameters
        ----------
        record : TraceRecord
        is_new : bool
            False for a copy.
        is_known : bool
            Whether the store, or a source of the next commit, has had its key before.
        is_replaced : bool
            Whether it is stored instead of another trace, with other content.
        loses : bool or None
            Whether no source that is not there may have given the stored values; None for a trace that is not committed.

        Raises
        ------
        InvalidInputError
            Rule 14: copies of a trace have different labels.
        """
        self._has_new |= is_new
        key = record.question_id, record.sample
        is_counted = is_new or not (self._counts_new or key in self._labels)  # a copy counts once
        self._num_traces += is_counted
        own = {} if record.label is None else {LABEL: record.label}
        deferred = {score_of(n): v for n, v in record.deferred_scores.items()}
        found = {**record.scores, **own, **deferred}
        for name, value in found.items():
            self._counts[name][kind_of(value)] += is_counted
        lacking = {score_of(name) for name in self._stated - {GROUP}} - found.keys()
        missing = dict.fromkeys(lacking, math.nan) if loses else {}
        if loses is False:
            self.left.add(key, lacking, may_have_group=GROUP in self._stated and not record.group)
        if is_replaced:
            self._labels[key] = {}
            self._groups.pop(key, None)
        if self.finds_layouts:  # the writer decides between labels inside of its traces (--on-conflict)
            found = {**record.scores, **deferred}
        if record.group and self._groups.setdefault(key, record.group) != record.group:
            raise InvalidInputError(
                f"found {record.group!r:.42} and {self._groups[key]!r:.42} for {escape_unprintable(record.question_id, 60)}, "
                f"sample {record.sample}: copies of a trace have one group",
                position=record.position,
                field="group",
            )
        if key in self._labels:
            found = merged(self._labels[key], found, record)
        if found:
            self._labels[key] = found
        if deferred or is_known:
            self.deferred[key] = missing | found
            if loses and GROUP in self._stated:
                self._without_group.add(key)

    def add_states(self, packed: PackedTrace) -> None:
        """Rule 10b: refuse the states of another id, of which one is marked as a copy of the other; count other copies."""
        if "hidden_states" not in packed.crcs:
            return
        question_id, states = packed.record.question_id, packed.crcs["hidden_states"] << 32 | packed.num_tokens
        other = self._ids_of_states.setdefault(states, question_id)
        if other == question_id:
            return
        self.num_equal += 1
        if self._is_copy(other, question_id):
            raise InvalidInputError(
                f"{escape_unprintable(question_id, 60)} has the states of {escape_unprintable(other, 60)}: a copy; "
                'remove it, or duplicates = "keep"',
                position=packed.record.position,
            )

    def _is_copy(self, one: str, other: str) -> bool:
        """Return whether two ids of equal states are refused: one name is marked as a copy of the other."""
        return not self.keeps_copies and without_copy_mark(one) == without_copy_mark(other)

    def define(self, writer: StoreWriter) -> None:
        """Define the scores of tables in the store; UsageError if it cannot keep the layouts."""
        for text in self._new_layouts(writer):
            writer.attributes.with_layout(text)
        self._known = writer.attributes.scores.keys() - self._defined
        for name in (*self.judgments, *self._directions):
            if name in self._deferred_scores or name in self.judgments:
                self._define(writer, name)

    def _new_layouts(self, writer: StoreWriter) -> list[str]:
        """Return the layouts that the store is to keep, the newest last: a stated one, and those that it does not keep yet."""
        # Parts by kept layouts have the newest first.
        texts = dict.fromkeys(part.kept_text for part in reversed(self.parts) if part.kept_text is not None)
        return [text for text in texts if not (self.finds_layouts and text in writer.attributes.layouts)]

    def _keep_layouts(self, writer: StoreWriter) -> None:
        for text in self._new_layouts(writer):
            writer.keep_layout(text)

    def _define(self, writer: StoreWriter, name: str) -> None:
        score, direction, known = score_of(name), self._directions[name], writer.attributes
        if name != LABEL and (score not in known.scores or known.scores[score].direction != direction):
            precedes = known.default_score in self._defined and self._fields[score] < self._fields[known.default_score]
            writer.define_score(score, ScoreField(direction, origin_of(name)), is_default=precedes)
            self._defined.add(score)

    def commit(self, writer: StoreWriter) -> None:
        """Commit the sources so far; they are open if labels of theirs are stored at the end."""
        if self._has_new:
            self._keep_layouts(writer)
        writer.commit(are_open=bool(self.deferred))

    def close(self, gone: GoneTraces, on_conflict: OnConflict) -> Iterator[str]:
        """Close the accounts, and yield the lines of `Execution.close`."""
        for part in self.parts:
            if (execution := part.execution) is None:
                continue
            if execution.account.is_read and self._needs_equal(execution):
                raise InvalidInputError("no trace has the states of another one; remove it", field="duplicates")
            yield from execution.close(partial(gone.take_row, on_conflict, part.digest))
        self.deferred |= gone.given
        self._groups |= gone.groups
        for name in self._chosen - self._defined - self._known if self._num_traces else ():
            raise InvalidInputError("found in no trace: spelled otherwise?", field=f"--score-column {name}")

    def release(self) -> None:
        """Close the files that were looked at, if another process reads them."""
        for execution in self._executions:
            execution.release()

    def fill(self, writer: StoreWriter, on_conflict: OnConflict) -> None:
        """Store the labels, scores and groups of the traces, instead of earlier ones."""
        self.define(writer)
        values, num_traces = ChangedValues(writer, on_conflict), writer.manifest.num_traces
        is_unread = np.arange(num_traces) < num_traces - writer.num_added
        for key in self.deferred:
            if (index := writer.index.find(*key)) >= 0:  # else dropped by skip_bad
                given = self._values(key)
                values.set(index, *given)
                is_unread[index] = False
                self.left.count(key, given, values.columns, index)
        # Another file of the same name may have been left open.
        unread = set(writer.index.read_column("source")[is_unread].tolist())
        closed = [number for number in writer.attributes.open_numbers() if number not in unread]
        # Without new traces not before: a layout that is refused must not replace an earlier one.
        self._keep_layouts(writer)
        values.commit([number for number in closed if writer.index.source(number).path in self.read])
        self._changes = [*values.lines(), *self.left.lines()]

    def _values(self, key: tuple[str, int]) -> TraceValues:
        """Return what fill() gives a committed trace."""
        found, no_group = self.deferred.get(key, {}), "" if key in self._without_group else None
        scores = {name: value for name, value in found.items() if name != LABEL}
        group = None if self.has_group_column else self._groups.get(key, no_group)
        return TraceValues(scores, found.get(LABEL), group)

    def given(self, writer: StoreWriter) -> set[str]:
        """Return the scores and "label" that the lines give."""
        return {score_of(name) for name in self._directions if self._gives(name, writer)}

    def _gives(self, name: str, writer: StoreWriter) -> bool:
        """Return whether the lines give a score, "label" or "group": not one that another command has defined since."""
        if name in (LABEL, GROUP):
            return self._are_of_lines(writer)
        stored = writer.attributes.scores.get(score_of(name))
        return name in self.own or (stored is not None and stored.source == origin_of(name))

    def with_group(self, writer: StoreWriter) -> Collection[tuple[str, int]] | None:
        """Return the keys of traces to which a line gives a group; None if lines give all groups that are stored."""
        states_group = any(GROUP in part.layout.addresses for part in self.parts if part.layout is not None)
        is_sure = states_group and self._are_of_lines(writer)
        return None if is_sure else self._groups

    def _are_of_lines(self, writer: StoreWriter) -> bool:
        """Return whether stored groups and labels are of lines: with scores of another command they may be its own."""
        return self._has_own or all(map(is_of_layout, writer.attributes.scores.values()))

    def changes(self, key: tuple[str, int], index: int, columns: Columns) -> tuple[bool, bool]:
        """Return whether fill() changes a stored score, label or group of a trace that was added, and whether it removes one."""
        scores, *others = self._values(key)
        pairs = zip(stored_values(columns, index, scores), [*scores.values(), *others], strict=True)
        changed = [new for old, new in pairs if new is not None and not is_none(old) and old != new]
        return bool(changed), any(map(is_none, changed))

    def lines(self) -> Iterator[str]:
        """Yield what was stored as labels."""
        for _, name in sorted(self._fields.values()):
            direction, counts = self._directions[name], self._counts[score_of(name)]
            if not self._num_traces or (not counts and name not in self._deferred_scores):
                continue
            meaning = {CORRECT: "correct", HALLUCINATION: HALLUCINATION}.get(direction, direction)
            known = counts["0"] + counts["1"] + counts["other"]
            text = f"{counts['1']:,} times 1, {counts['0']:,} times 0"
            text = plural(known, "value") if counts["other"] else text
            yield f"{name} (high: {meaning}): {text}, {self._num_traces - known:,} missing"
        if self.num_equal:
            yield f"{plural(self.num_equal, 'trace')} with the hidden states of another id"
        yield from self._changes


def without_copy_mark(name: str) -> str:
    """Return a name without what a file manager or an editor adds to the name of a copy."""
    return _COPY.sub("", name)
