"""The traces that a receipt describes, without their arrays."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.io.files import ReadableFiles
from tracestore.store.read.index import SegmentEntry
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.pack import PackedTrace, fit_attributes
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.written import TraceBlock, WrittenSegment
from tracestore.tasks.task_plan import TaskPlan

DIMENSIONS = ("num_layers", "hidden_dim", "hidden_dtype", "num_heads", "attention_dtype")
# Facts that many traces share.
OF_TRACE = (*DIMENSIONS, "rounded_from")
OF_RECORD = ("layer_ids", "extra_names", "dropped", "is_without_embeddings")
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
        self._options = plan.facts["store_options"]
        self._facts = [_facts(facts, self._options) for facts in document["facts"]]
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
            attributes = fit_attributes(attributes, self._facts[kind])
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


def _facts(values: Sequence[Any], options: dict[str, str]) -> PackedTrace:
    """Return the facts that many traces share, in the order of OF_TRACE and OF_RECORD."""
    given = dict(zip((*OF_TRACE, *OF_RECORD), values, strict=True))
    if given["rounded_from"] not in (None, "float32", "float64", "bfloat16"):
        raise ValueError(f"rounded from {given['rounded_from']!r:.40}")
    known = {name: given[name] for name in DIMENSIONS}
    attributes = schema.Attributes(attention=options["attention"], options=options, **known)
    schema.Attributes.from_json(attributes.to_json())  # checks them
    record = TraceRecord(
        "",
        layer_ids=None if given["layer_ids"] is None else tuple(map(int, given["layer_ids"])),
        extra_names=tuple(map(str, given["extra_names"])),
        dropped=None if given["dropped"] is None else list(map(str, given["dropped"])),
        is_without_embeddings=given["is_without_embeddings"],
    )
    return PackedTrace(record, num_tokens=0, **{name: given[name] for name in OF_TRACE})
