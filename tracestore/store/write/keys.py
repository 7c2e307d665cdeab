"""Resolution of a trace's key: whether the store has it already, and what a second trace of it adds."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal, TypeVar

from tracestore.errors import InvalidInputError
from tracestore.store.format import manifest as mf
from tracestore.store.format.schema import FIELD_BITS
from tracestore.store.io.files import StoreFiles
from tracestore.store.read.columns import Columns, TraceValues
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.compared import ComparedQuestion, ComparedTrace, Questions, Samples, fields_of
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.pending import Key, Pending
from tracestore.store.write.record import TraceRecord, read_record
from tracestore.store.write.written import TraceBlock

OnConflict = Literal["error", "keep-first", "keep-last"]
Place = TypeVar("Place")
Value = TypeVar("Value")


class KeyResolver:
    """The keys of one generation and of the changes pending on it.

    Attributes
    ----------
    on_conflict
        See StoreWriter.
    num_conflicts : int
        Number of traces of the open source whose key existed with different content.
    moved : Mapping
        The new paths of sources that have been moved, by their old ones.
    lacks_texts : bool
        Whether the last trace of resolve_new() has fewer fields besides its arrays than the stored one.
    """

    def __init__(
        self,
        files: StoreFiles,
        index: StoreIndex,
        paths: Sequence[str],
        pending: Pending,
        on_conflict: OnConflict,
        read_columns: Callable[[], Columns],
        past: dict[int, tuple[ComparedTrace, TraceValues]],
        samples: Samples,
    ) -> None:
        self._files, self._index, self._paths, self._pending = files, index, paths, pending
        self.on_conflict, self._read_columns, self._earlier = on_conflict, read_columns, past
        self._questions = Questions(index, samples, self._question)
        self.past: dict[int, tuple[ComparedTrace, TraceValues]] = {}
        self.moved: Mapping[str, str] = {}
        self.lacks_texts = False
        self._kept: TraceValues | None = None  # values that the resolved trace leaves a key
        self.num_conflicts = 0
        self._undo: list[Callable[[], None]] = []
        self._segments: dict[int, SegmentReader] = {}  # committed segments that were compared with

    @property
    def has_replaced(self) -> bool:
        """True if the last trace of resolve_new() replaces one with other content."""
        return self._kept is not None

    def begin_source(self, undo: list[Callable[[], None]]) -> None:
        """Begin a source. `undo` receives a function for each change; their reverse order reverts the source."""
        self._undo, self.num_conflicts = undo, 0

    def are_new(self, block: TraceBlock) -> bool:
        """Return whether the keys of a block differ, no trace has one of them, and samples answer one question."""
        keys = block.keys
        if len(set(keys)) < len(keys) or not self._pending.keys.keys().isdisjoint(keys) or self._index.has_any(keys):
            return False
        return self._questions.fit(block)

    def add_new(self, block: TraceBlock, source: int) -> None:
        """Add the traces of a block with new keys to the pending changes, as rows of a source."""
        pending = self._pending
        pending.keys.update(zip(block.keys, count(len(pending.rows))))
        self._questions.added.add(block.keys if block.rows["sample"].any() else ())
        pending.rows.extend(block, source)

    def resolve_new(self, trace: PackedTrace) -> set[int]:
        """Return the field groups of the trace that its key does not have yet; all of both if it replaces another one.

        Raises
        ------
        InvalidInputError
            If the key exists with different content and `on_conflict` is "error", or another sample has another question.
        """
        record, self._kept, self.lacks_texts = trace.record, None, False
        provided = groups_of(trace)
        stored = self._stored_location(record)
        if stored is None:
            self._questions.check(trace, self._is_numbered(record))
            return set(provided)
        missing: set[int] = set()
        difference = None
        for group, crc in provided.items():
            name = mf.GROUP_NAMES[group]
            if stored[f"{name}_segment"] < 0:
                missing.add(group)
            elif self._stored_crc(stored, name) != crc:
                difference = "arrays"
        if difference is None and trace.has_texts:
            given, kept = ComparedTrace.of(trace).fields, self._stored_fields(stored)
            # The texts of a trace are those of its graph location. Files may have traces in common, of which the first
            # one has more texts, but a file that is read again replaces its own. The index keeps the source of the key,
            # not that of a location that another source added: its texts may be lost without a difference.
            texts = mf.GROUP_GRAPH if stored["graph_segment"] >= 0 else mf.GROUP_SEQUENCE
            lost = kept if mf.GROUP_GRAPH in missing else given
            source = self._pending.sources[-1]
            path = self._path(stored["source"])
            is_own = bool(source.fingerprint) and self.moved.get(path, path) == source.path
            names = given | kept if texts in provided and is_own else lost
            difference = next((name for name in names if given.get(name) != kept.get(name)), None)
            self.lacks_texts = bool(kept.keys() - given.keys())
        if difference is None:
            if mf.GROUP_GRAPH in missing:  # whose texts are those of the trace from now on
                self._questions.check(trace, self._is_numbered(record))
            return missing
        if self.on_conflict == "error":
            raise InvalidInputError(
                f"found a second trace of question id {record.question_id!r} (sample {record.sample}) with different "
                f"content ({difference}), expected one trace per key",
                field="question_id",
                is_whole_source=self._is_numbered(record),
            )
        if self.on_conflict == "keep-last":
            self._questions.check(trace, self._is_numbered(record))
        self.num_conflicts += 1
        if self.on_conflict != "keep-last":
            return set()
        # A trace is replaced as a whole: graph, last tokens and values of different traces do not belong together.
        self._kept = self._kept_values(trace, stored)
        return {*provided, *(group for group, name in enumerate(mf.GROUP_NAMES) if stored[f"{name}_segment"] >= 0)}

    def _is_numbered(self, record: TraceRecord) -> bool:
        """Return whether an id is made of a position, which tells nothing if the file is another one of the same name."""
        return record.question_id.startswith(f"{self._pending.sources[-1].path}:")

    def _kept_values(self, trace: PackedTrace, stored: Mapping[str, int]) -> TraceValues:
        """Return the values of a key for a trace that replaces its own one: those of before, if it had this content then.

        Of two files with a trace, which are both read again, the second one replaces the first every time.
        """
        columns, index = self._read_columns(), self._index.find(trace.record.question_id, trace.record.sample)
        if index >= 0 and index not in self._earlier and index not in self.past:
            graph, sequence = (
                self._stored_crc(stored, name) if stored[f"{name}_segment"] >= 0 else 0 for name in mf.GROUP_NAMES
            )
            values = TraceValues(columns.scores_of(index), float(columns.labels[index]), columns.group(index))
            compared = ComparedTrace(graph, sequence, self._stored_fields(stored), self._stored_question(stored))
            self.past[index] = compared, values
        scores = dict.fromkeys(columns.scores, math.nan)
        past = self._earlier.get(index) or self.past.get(index)
        if past is None or past[0] != ComparedTrace.of(trace):
            return TraceValues(scores, math.nan, "")
        return past[1]._replace(scores=scores | dict(past[1].scores))

    def resolve_known(self, record: TraceRecord | Key) -> set[int]:
        """Return the empty set for a trace whose arrays were left out, because its key had them.

        InvalidInputError if the key has nothing any more, because another source was refused or removed.
        """
        if self._stored_location(record) is None:
            raise InvalidInputError(
                f"the other trace of question id {record.question_id!r} (sample {record.sample}) was not committed; "
                "repeat the command",
                field="question_id",
            )
        return set()

    def path_of(self, record: TraceRecord | Key) -> str | None:
        """Return the path of the source that has added the record's key, None if the key is new."""
        stored = self._stored_location(record)
        return None if stored is None else self._path(stored["source"])

    def _path(self, source: int) -> str:
        first = len(self._paths)
        return self._paths[source] if source < first else self._pending.sources[source - first].path

    def _stored_location(self, record: TraceRecord | Key) -> Mapping[str, int] | None:
        """Return the values of the index columns of the record's key, or None if the key is new."""
        key = (record.question_id, record.sample)
        pending = self._pending.keys.get(key)
        if pending is not None:
            return {
                name: int(column[pending]) for name, column in self._pending.rows.columns.items() if name != "label"
            }
        index = self._index.find(*key)
        if index < 0:
            return None
        values = self._index.row(index)._asdict()
        for group, name in enumerate(mf.GROUP_NAMES):
            patch = self._pending.patches.get((index, group))
            if patch is not None:
                values |= {f"{name}_{column}": patch[f"patch_{column}"] for column in ("segment", "row")}
        return values

    def _stored_crc(self, location: Mapping[str, int], group: str) -> int:
        """Return the checksum of the arrays of a field group of a stored trace."""
        number, row = location[f"{group}_segment"], location[f"{group}_row"]
        pending = self._pending_trace(number, row)
        if pending is not None:
            return pending.graph_crc if group == "graph" else pending.sequence_crc
        return self._segment(number).scalar(f"{group}_crc32c", row)

    def has_arrays_of(self, index: int, trace: PackedTrace) -> bool:
        """Return whether a committed trace has the arrays of another one, of the field groups that both have."""
        stored = self._index.row(index)._asdict()
        both = {mf.GROUP_NAMES[group]: crc for group, crc in groups_of(trace).items()}
        both = {name: crc for name, crc in both.items() if stored[f"{name}_segment"] >= 0}
        return bool(both) and all(crc == self._stored_crc(stored, name) for name, crc in both.items())

    def question_of(self, index: int) -> str | None:
        """Return the question of a committed trace, None if it has none."""
        return self._text_of(*self._index.row(index).primary_location)

    def _text_of(self, number: int, row: int) -> str | None:
        """Return the question of a row of a committed segment, None if it has none."""
        segment = self._segment(number)
        return segment.string("question", row) if segment.scalar("fields", row) & FIELD_BITS["question"] else None

    def _question(self, question_id: str, sample: int) -> ComparedQuestion | None:
        """Return the question of a stored trace; None if it has none, or there is no such trace."""
        location = self._stored_location(Key(question_id, sample, 0, None))
        return None if location is None else self._stored_question(location)

    def _stored_question(self, location: Mapping[str, int]) -> ComparedQuestion | None:
        number, row = _place_of_texts(location)
        trace = self._pending_trace(number, row)
        if isinstance(trace, ComparedTrace):
            return trace.question
        return ComparedQuestion.of(
            self._text_of(number, row) if trace is None else trace.record.strings.get("question")
        )

    def _stored_fields(self, location: Mapping[str, int]) -> dict[str, Any]:
        number, row = _place_of_texts(location)
        trace = self._pending_trace(number, row)
        if trace is not None:
            return (trace if isinstance(trace, ComparedTrace) else ComparedTrace.of(trace)).fields
        segment = self._segment(number)
        return fields_of(read_record(segment, row), segment.string("extras", row))

    def _pending_trace(self, segment: int, row: int) -> PackedTrace | ComparedTrace | None:
        return next((s.packed(row) for s in self._pending.segments if s.number == segment), None)

    def _segment(self, number: int) -> SegmentReader:
        if number not in self._segments:
            self._segments[number] = SegmentReader(
                self._files, self._index.segment(number), self._index.manifest.attributes
            )
        return self._segments[number]

    def add_location(self, record: TraceRecord, location: dict[str, int], groups: set[int], given: TraceValues) -> None:
        """Add the location of the field groups `groups` of a trace to the pending changes.

        Parameters
        ----------
        record : TraceRecord
            The trace.
        location : dict[str, int]
            Values by the names of manifest.TRACE_COLUMNS.
        groups : set[int]
            Result of resolve_new() for the trace.
        given : TraceValues
            Values for the columns if the key is new or its trace is replaced. The label, from resolve_label(), is used
            in any case.
        """
        pending, key = self._pending, (record.question_id, record.sample)
        index = self._index.find(*key)
        if key in pending.keys:
            row = pending.keys[key]
            names = [mf.GROUP_NAMES[added] for added in groups]
            own = [c for name in names for c in (f"{name}_segment", f"{name}_row", *mf.LOCATION_COLUMNS[name])]
            changed = {column: location[column] for column in own}
            self._change(row, changed | {"nonfinite": pending.rows.columns["nonfinite"][row] | location["nonfinite"]})
        elif index < 0:
            pending.keys[key] = len(pending.rows)
            self._questions.added.add([key])
            pending.rows.append(record.question_id, location, given)
            return
        else:
            for added in groups:
                name = mf.GROUP_NAMES[added]
                patch = {f"patch_{column}": location[f"{name}_{column}"] for column in ("segment", "row")}
                for columns in mf.LOCATION_COLUMNS.values():
                    patch |= {f"patch_{column}": location[column] for column in columns}
                patch |= {"patch_trace": index, "patch_group": added, "patch_nonfinite": location["nonfinite"]}
                self._set(pending.patches, (index, added), patch)
        if self._kept is None:
            self.set_label(record, math.nan if given.label is None else given.label)
        else:
            self._replace_values(key, self._kept, given)

    def _replace_values(self, key: tuple[str, int], kept: TraceValues, given: TraceValues) -> None:
        """Give a key the values of the trace that replaces its own one, and those that stay."""
        scores = {**kept.scores, **{name: score for name, score in given.scores.items() if not math.isnan(score)}}
        label = kept.label if given.label is None or math.isnan(given.label) else given.label
        values, rows = TraceValues(scores, label, given.group or kept.group), self._pending.rows
        if (row := self._pending.keys.get(key)) is not None:
            before = rows.values(row)
            rows.set_values(row, values)
            self._undo.append(lambda: rows.set_values(row, before))
            return
        index = self._index.find(*key)
        earlier = dict.fromkeys(self._pending.updates.get(index, TraceValues()).scores, math.nan)
        self._set(self._pending.updates, index, values._replace(scores=earlier | scores))

    def _set(self, changes: dict[Place, Value], key: Place, value: Value) -> None:
        """Set an item of the pending changes until the source is aborted."""
        before = changes.get(key)

        def restore() -> None:
            if before is None:
                del changes[key]
            else:
                changes[key] = before

        changes[key] = value
        self._undo.append(restore)

    def _change(self, row: int, values: Mapping[str, float]) -> None:
        """Change columns of a pending row until the source is aborted."""
        columns = self._pending.rows.columns
        before = {name: columns[name][row] for name in values}

        def change(given: Mapping[str, float]) -> None:
            for name, value in given.items():
                columns[name][row] = value

        change(values)
        self._undo.append(lambda: change(before))

    def _stored_label(self, record: TraceRecord | Key) -> float:
        """Return the label of the record's key, NaN if it has none."""
        pending, key = self._pending, (record.question_id, record.sample)
        if key in pending.keys:
            return float(pending.rows.columns["label"][pending.keys[key]])
        index = self._index.find(*key)
        if index < 0:
            return math.nan
        earlier = pending.updates.get(index, TraceValues()).label
        return float(self._read_columns().labels[index]) if earlier is None else earlier

    def resolve_label(self, record: TraceRecord | Key) -> float:
        """Return the label that the record's key gets from it, NaN for none; another one is a conflict.

        InvalidInputError if it differs from the stored one and `on_conflict` is "error".
        """
        if record.label is None:
            return math.nan
        stored = self._stored_label(record)
        if math.isnan(stored) or math.isnan(record.label) or stored == record.label:
            return record.label
        if self.on_conflict == "error":
            raise InvalidInputError(
                f"found label {record.label:g}, expected {stored:g} as stored for this key", field="labels"
            )
        self.num_conflicts += 1
        return record.label if self.on_conflict == "keep-last" else stored

    def set_label(self, record: TraceRecord | Key, label: float) -> None:
        """Set the label of an existing key to the result of resolve_label()."""
        if math.isnan(label) or label == self._stored_label(record):
            return
        pending, key = self._pending, (record.question_id, record.sample)
        if key in pending.keys:
            self._change(pending.keys[key], {"label": label})
            return
        index = self._index.find(*key)
        self._set(pending.updates, index, pending.updates.get(index, TraceValues())._replace(label=label))


def _place_of_texts(location: Mapping[str, int]) -> tuple[int, int]:
    """Return segment and row of the texts of a trace."""
    name = "graph" if location["graph_segment"] >= 0 else "sequence"
    return location[f"{name}_segment"], location[f"{name}_row"]


def groups_of(trace: PackedTrace) -> dict[int, int]:
    """Return the checksums of the field groups that a trace has."""
    found = {mf.GROUP_GRAPH: trace.graph_crc} if trace.has_states or "hidden_states" in trace.arrays else {}
    if trace.has_last_token or "last_token" in trace.arrays:
        found[mf.GROUP_SEQUENCE] = trace.sequence_crc
    return found
