"""The traces that a receipt describes, without their arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.io.files import ReadableFiles
from tracestore.store.read.index import SegmentEntry
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.written import TraceBlock, WrittenSegment
from tracestore.tasks.task_plan import TaskPlan

DIMENSIONS = ("num_layers", "hidden_dim", "hidden_dtype", "num_heads", "attention_dtype")
# Arrays of a segment that a commit needs.
_ROWS = (
    *("sample", "source_position", "num_tokens", "attention_layout", "num_nonfinite", "fields"),
    *("graph_crc32c", "sequence_crc32c", "last_token_row"),
)
_MAX_TRACES = 1 << 31


class TracesOfReceipt:
    """The traces of a receipt, whose segments are added one after the other, before their sources take them."""

    def __init__(
        self, plan: TaskPlan, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray], groups: list[str]
    ) -> None:
        self._names = [(str(name), int(k)) for name, k in document["scores"]]
        self._kinds, num_traces = arrays["facts"], len(arrays["facts"])
        self._options, self._facts = plan.facts["store_options"], [_facts(*facts) for facts in document["facts"]]
        self._attributes = [_attributes_of(facts, self._options) for facts in self._facts]
        shape = num_traces, 1 + len(self._names)
        self._of_traces: dict[str, Any] = {
            "kinds": self._kinds,
            "values": arrays["values"].reshape(shape),
            "has_value": arrays["has_value"].reshape(shape).astype(bool),
            "groups": groups,
            "states_crc32c": arrays["states_crc32c"],
            "source_bytes": arrays["source_bytes"],
        }
        is_within = all(len(values) == num_traces for values in self._of_traces.values()) and num_traces <= _MAX_TRACES
        if not is_within or (num_traces and not 0 <= self._kinds.min() <= self._kinds.max() < len(self._facts)):
            raise ValueError("a number is out of bounds")
        if num_traces and (arrays["source_bytes"].min() < 0 or not {k for _, k in self._names} <= {0, 1}):
            raise ValueError("a number is out of bounds")
        self._blocks: list[TraceBlock] = []  # of all traces of a segment
        self._num_added = self._num_taken = 0

    def add_segment(
        self, files: ReadableFiles, name: str, num_traces: int, size: int, crc: int, shapes: Mapping[str, Any]
    ) -> WrittenSegment:
        """Add the traces of the next segment."""
        begin, end = self._num_added, self._num_added + num_traces
        if type(num_traces) is not int or not 0 < num_traces <= len(self._kinds) - begin:
            raise ValueError(f"{name!r:.80} with {num_traces!r:.40} traces")
        rows = FileEntry(paths.segment_rows(paths.segment(name)), size, crc)
        attributes = schema.Attributes(attention=self._options["attention"], options=self._options)
        for kind in np.unique(self._kinds[begin:end]).tolist():
            attributes = joined(attributes, self._attributes[kind])
        reader = SegmentReader(files, SegmentEntry(num_traces, rows), attributes)
        segment = WrittenSegment(files, reader)
        if segment.name != name:
            raise ValueError(f"{rows.path}: not the rows that its name says")
        for array in segment.arrays:
            reader.check_metadata(array, *shapes[array])
        block = TraceBlock(
            segment,
            0,
            reader.small.strings("question_id", 0, num_traces),
            {column: reader.values(column) for column in _ROWS},
            np.diff(reader.values("tokens_offsets")),
            self._facts,
            names=self._names,
            **{name: values[begin:end] for name, values in self._of_traces.items()},
        )
        self._blocks.append(block)
        self._num_added = end
        return segment

    def check_end(self) -> None:
        """Raise ValueError if a trace is in no segment or of no source."""
        if not self._num_taken == self._num_added == len(self._kinds):
            raise ValueError("traces of no source or segment")

    def take(self, count: int) -> list[TraceBlock]:
        """Return the next traces, a block for each segment."""
        if type(count) is not int or not 0 <= count <= self._num_added - self._num_taken:
            raise ValueError(f"{count!r:.40} traces of a source")
        begin = self._num_taken
        self._num_taken += count
        ends = np.cumsum([0, *map(len, self._blocks)]).tolist()
        found = []
        for block, (first, last) in zip(self._blocks, pairwise(ends), strict=True):
            part = slice(max(begin, first) - first, min(self._num_taken, last) - first)
            if part.start < part.stop:
                found.append(block.part(part))
        return found


def _facts(
    num_layers: int,
    hidden_dim: int,
    hidden_dtype: str,
    num_heads: int | None,
    attention_dtype: str | None,
    rounded_from: str | None,
    layer_ids: Sequence[int] | None,
    extra_names: Sequence[str],
    dropped: Sequence[str] | None,
    is_without_embeddings: bool,
) -> PackedTrace:
    """Return the facts that many traces share, in the order of _OF_TRACE and _OF_RECORD."""
    if rounded_from not in (None, "float32", "float64", "bfloat16"):
        raise ValueError(f"rounded from {rounded_from!r:.40}")
    record = TraceRecord(
        "",
        layer_ids=None if layer_ids is None else tuple(map(int, layer_ids)),
        extra_names=tuple(map(str, extra_names)),
        dropped=None if dropped is None else list(map(str, dropped)),
        is_without_embeddings=is_without_embeddings,
    )
    return PackedTrace(
        record,
        num_layers,
        0,
        hidden_dim,
        hidden_dtype,
        num_heads=num_heads,
        attention_dtype=attention_dtype,
        rounded_from=rounded_from,
    )


def _attributes_of(facts: PackedTrace, options: dict[str, str]) -> schema.Attributes:
    """Return the attributes of a store with traces of these facts."""
    known = {name: getattr(facts, name) for name in DIMENSIONS}
    given = schema.Attributes(attention=options["attention"], options=options, **known)
    return schema.Attributes.from_json(given.to_json())


def joined(one: schema.Attributes, other: schema.Attributes) -> schema.Attributes:
    """Return the attributes of both; ValueError if they differ."""
    values: dict[str, Any] = {}
    for name in DIMENSIONS:
        found = {getattr(attributes, name) for attributes in (one, other)} - {None}
        if len(found) > 1:
            raise ValueError(f"{name}: {sorted(map(str, found))}")
        values[name] = next(iter(found), None)
    return replace(one, **values)
