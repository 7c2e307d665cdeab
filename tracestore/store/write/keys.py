"""Resolution of a trace's key: whether the store has it already, and what a second trace of it adds."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.store.format import manifest as mf
from tracestore.store.io.files import StoreFiles
from tracestore.store.read.columns import TraceValues
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.pending import Pending, PendingRow
from tracestore.store.write.record import TraceRecord, read_record

OnConflict = Literal["error", "keep-first", "keep-last"]


class KeyResolver:
    """The keys of one generation and of the changes pending on it; see StoreWriter for `on_conflict`.

    Attributes
    ----------
    num_conflicts : int
        Number of traces of the open source whose key existed with different content.
    """

    def __init__(
        self,
        files: StoreFiles,
        index: StoreIndex,
        pending: Pending,
        on_conflict: OnConflict,
        read_labels: Callable[[], np.ndarray],
    ) -> None:
        self._files, self._index, self._pending = files, index, pending
        self._on_conflict, self._read_labels = on_conflict, read_labels
        self.num_conflicts = 0
        self._undo: list[Callable[[], None]] = []
        self._segments: dict[int, SegmentReader] = {}  # committed segments that were compared with

    def begin_source(self, undo: list[Callable[[], None]]) -> None:
        """Begin a source. `undo` receives a function for each change; their reverse order reverts the source."""
        self._undo, self.num_conflicts = undo, 0

    def resolve_new(self, trace: PackedTrace) -> set[int]:
        """Return the field groups of the trace that its key does not have yet.

        Raises
        ------
        InvalidInputError
            If the key exists with different content and `on_conflict` is "error".
        """
        record = trace.record
        provided = {mf.GROUP_GRAPH: trace.graph_crc} if "hidden_states" in trace.arrays else {}
        if "last_token" in trace.arrays:
            provided[mf.GROUP_SEQUENCE] = trace.sequence_crc
        stored = self._stored_location(record)
        if stored is None:
            return set(provided)
        missing: set[int] = set()
        difference = None
        for group, crc in provided.items():
            name = mf.GROUP_NAMES[group]
            if stored[f"{name}_segment"] < 0:
                missing.add(group)
            elif self._stored_crc(stored, name) != crc:
                difference = "arrays"
        if difference is None:
            difference = first_difference(_text_fields(record, trace.extras), self._stored_text_fields(stored))
        if difference is None:
            return missing
        if self._on_conflict == "error":
            raise InvalidInputError(
                f"found a second trace of question id {record.question_id!r} (sample {record.sample}) with different "
                f"content ({difference}), expected one trace per key (see --on-conflict)"
            )
        self.num_conflicts += 1
        # A trace is replaced as a whole: graph and last tokens of different traces do not belong together.
        return set(provided) if self._on_conflict == "keep-last" else set()

    def _stored_location(self, record: TraceRecord) -> Mapping[str, int] | None:
        """Return the values of the index columns of the record's key, or None if the key is new."""
        key = (record.question_id, record.sample)
        pending = self._pending.keys.get(key)
        if pending is not None:
            return self._pending.rows[pending].values
        index = self._index.find(*key)
        if index < 0:
            return None
        values = vars(self._index.row(index)) | {}
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

    def _stored_text_fields(self, location: Mapping[str, int]) -> dict[str, Any]:
        name = "graph" if location["graph_segment"] >= 0 else "sequence"
        number, row = location[f"{name}_segment"], location[f"{name}_row"]
        trace = self._pending_trace(number, row)
        if trace is not None:
            return _text_fields(trace.record, trace.extras)
        segment = self._segment(number)
        return _text_fields(read_record(segment, row), segment.string("extras", row))

    def _pending_trace(self, segment: int, row: int) -> PackedTrace | None:
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
            Values for the columns if the key is new; the label is used in any case.
        """
        pending, key = self._pending, (record.question_id, record.sample)
        if key in pending.keys:
            row = pending.rows[pending.keys[key]]
            before = (dict(row.values), row.given)
            self._undo.append(lambda: row.__dict__.update(values=before[0], given=before[1]))
            for added in groups:
                row.values |= {name: location[name] for name in _location_columns(added)}
            row.values["nonfinite"] |= location["nonfinite"]
            row.given = row.given._replace(label=self._resolve_label(row.given.label, given.label))
            return
        index = self._index.find(*key)
        if index < 0:
            pending.keys[key] = len(pending.rows)
            pending.rows.append(PendingRow(record.question_id, location, given))

            def forget() -> None:
                pending.rows.pop()
                del pending.keys[key]

            self._undo.append(forget)
            return
        for added in sorted(groups):
            name = mf.GROUP_NAMES[added]
            patch = {f"patch_{column}": location[f"{name}_{column}"] for column in ("segment", "row")}
            for columns in mf.LOCATION_COLUMNS.values():
                patch |= {f"patch_{column}": location[column] for column in columns}
            patch |= {"patch_trace": index, "patch_group": added, "patch_nonfinite": location["nonfinite"]}
            self._add_patch((index, added), patch)
        self.add_label(record)

    def _add_patch(self, key: tuple[int, int], patch: dict[str, int]) -> None:
        pending, before = self._pending, self._pending.patches.get(key)

        def restore() -> None:
            del pending.patches[key]
            if before is not None:
                pending.patches[key] = before

        pending.patches[key] = patch
        self._undo.append(restore)

    def check_label(self, record: TraceRecord) -> None:
        """Raise InvalidInputError if the label of a record conflicts with the stored one."""
        if record.label is None:
            return
        row, index = self._pending.keys.get((record.question_id, record.sample)), -1
        if row is None:
            index = self._index.find(record.question_id, record.sample)
        if row is not None:
            self._resolve_label(self._pending.rows[row].given.label, record.label)
        elif index >= 0:
            earlier = self._pending.updates.get(index)
            self._resolve_label(float(self._read_labels()[index]) if earlier is None else earlier.label, record.label)

    def add_label(self, record: TraceRecord) -> None:
        """Add the label of a second source to an existing key; refuse a label that differs from the stored one."""
        pending, label = self._pending, record.label
        if label is None:
            return
        key = (record.question_id, record.sample)
        if key in pending.keys:
            row = pending.rows[pending.keys[key]]
            before = row.given
            self._undo.append(lambda: setattr(row, "given", before))
            row.given = before._replace(label=self._resolve_label(before.label, label))
            return
        index = self._index.find(*key)
        earlier = pending.updates.get(index)
        stored = float(self._read_labels()[index]) if earlier is None else earlier.label
        label = self._resolve_label(stored, label)
        if math.isnan(label) or label == stored:
            return

        def restore() -> None:
            if earlier is None:
                del pending.updates[index]
            else:
                pending.updates[index] = earlier

        pending.updates[index] = (earlier or TraceValues())._replace(label=label)
        self._undo.append(restore)

    def _resolve_label(self, stored: float, label: float) -> float:
        if not math.isnan(stored) and not math.isnan(label) and stored != label:
            if self._on_conflict != "error":
                return label if self._on_conflict == "keep-last" else stored
            raise InvalidInputError(
                f"found label {label:g}, expected {stored:g} as stored for this key", field="labels"
            )
        return stored if math.isnan(label) else label


def _location_columns(group: int) -> tuple[str, ...]:
    """Return the trace columns that locate a field group."""
    name = mf.GROUP_NAMES[group]
    return (f"{name}_segment", f"{name}_row", *mf.LOCATION_COLUMNS[name])


def _text_fields(record: TraceRecord, extras: str) -> dict[str, Any]:
    """Return what a trace holds besides its arrays, for comparing two traces of one key."""
    return {
        **record.strings,
        "tokens": None if record.tokens is None else record.tokens.tolist(),
        "tokens_decoded": None if record.tokens_decoded is None else list(record.tokens_decoded),
        "prompt_length": record.prompt_length,
        "extras": extras,
        # NaN does not equal itself, so arrays are compared by their bytes.
        **{n: v.tobytes() if isinstance(v, np.ndarray) else v for n, v in record.optional.items()},
    }


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return a field that differs between two traces, or None.

    A field that only one of them has is no difference: files of several formats complement each other.
    """
    for name in one.keys() & other.keys():
        if all(v is not None and v != "" and v != [] for v in (one[name], other[name])) and one[name] != other[name]:
            return name
    return None
