"""Moving the traces of one store to another: by copy, or as whole segments."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from tracestore.errors import CorruptStoreError
from tracestore.store.format import schema
from tracestore.store.maintain.selection import check_token_counts, large_array_bytes
from tracestore.store.read.batch_sources import GRAPH_ROW, GRAPH_SEGMENT, SEQUENCE_ROW, SEQUENCE_SEGMENT
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace
from tracestore.store.trace_fields import PackedEdges
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.record import read_record
from tracestore.store.write.writer import StoreWriter
from tracestore.store.write.written import WrittenSegment


class Transfer:
    """The traces of a store as the destination gets them: copied, or with their segment, which it takes over.

    It takes over a segment if the codecs are equal, and the segment holds nothing but `new` traces with all of their
    arrays. All traces of the segment must then be added.
    """

    def __init__(self, store: TraceStore, new: np.ndarray, writer: StoreWriter) -> None:
        self._store, self._new, self._writer = store, new, writer
        self._segments: dict[int, WrittenSegment] = {}  # taken over, without some of their traces
        is_same_codec = store.internals.attributes.options["codec"] == writer.attributes.options["codec"]
        # How many traces of each segment that is taken over are not added yet.
        self._num_rows = _whole_segments(store, new) if is_same_codec else {}

    @property
    def is_between_segments(self) -> bool:
        """True if all traces of the segments that were taken over are added."""
        return not self._segments

    def needed_bytes(self) -> int:
        """Return the bytes that the destination needs at least, without compression. Hard links need none."""
        new, path = self._new, self._store.path
        if isinstance(path, Path) and path.stat().st_dev == self._writer.target.path.stat().st_dev:
            numbers = self._store.internals.index.locations(new)[:, (GRAPH_SEGMENT, SEQUENCE_SEGMENT)]
            new = new[~np.isin(numbers, [-1, *self._num_rows]).all(axis=1)]
        return int(large_array_bytes(self._store, new).sum())

    def append(self, index: int) -> bool:
        """Add trace `index` to the open source of the destination; return False if it has the trace already.

        There are two rows if two sources added its graph and its last tokens.
        """
        trace, took = self._store[index], False
        places = trace._row
        graph, sequence = (places.graph_segment, places.graph_row), (places.sequence_segment, places.sequence_row)
        scores, group = trace.scores, self._store.group(index)
        label = None if math.isnan(trace.label) else trace.label
        for number, row in dict.fromkeys(place for place in (graph, sequence) if place[0] >= 0):
            segment = self._segment(number)
            if segment is not None:
                names = ("num_tokens", "attention_layout", "last_token_row")
                tokens, layout, last = (segment.reader.scalar(name, row) for name in names)
                packed = _packed_row(self._store, number, row, tokens, layout, last >= 0)
                packed.segment, packed.row = segment, row
                if (packed.record.question_id, packed.record.sample) != (trace.question_id, trace.sample):
                    name = self._store.internals.segment(number).rows_path
                    raise CorruptStoreError(f"{name}: row {row} has another key than in the index")
                self._num_rows[number] -= 1
                if not self._num_rows[number]:
                    del self._segments[number]
            else:
                tokens, layout = (
                    (trace.num_tokens, places.layout) if (number, row) == graph else (0, schema.LAYOUT_NONE)
                )
                packed = _packed_row(self._store, number, row, tokens, layout, (number, row) == sequence)
                packed.arrays = _arrays(trace, packed)
            packed.has_texts = (number, row) == graph or graph[0] < 0
            packed.record = replace(packed.record, question_id=trace.question_id, label=label)
            took |= self._writer.append_packed(packed, scores=scores, group=group)
        return took

    def _segment(self, number: int) -> WrittenSegment | None:
        """Return a segment that is taken over; None if its traces are copied."""
        if number in self._num_rows and number not in self._segments:
            segment = self._store.internals.segment(number)
            ids = segment.small.strings("question_id", 0, segment.num_rows)
            if self._writer.index.has_any(list(zip(ids, segment.values("sample").tolist(), strict=True))):
                del self._num_rows[number]  # Another writer has added some of the traces.
            else:
                self._segments[number] = WrittenSegment(self._store.internals.files, segment)
        return self._segments.get(number)


def _whole_segments(store: TraceStore, chosen: np.ndarray) -> dict[int, int]:
    """Return the segments that hold nothing but chosen traces with all of their arrays, and their numbers of rows."""
    places = store.internals.index.locations(chosen)
    graph, sequence = places[:, (GRAPH_SEGMENT, GRAPH_ROW)], places[:, (SEQUENCE_SEGMENT, SEQUENCE_ROW)]
    is_one_place, found = (graph == sequence).all(axis=1), dict[int, int]()
    check_token_counts(store, chosen)
    for number in np.unique(places[:, (GRAPH_SEGMENT, SEQUENCE_SEGMENT)]).tolist():
        if number < 0:
            continue
        segment = store.internals.segment(number)
        has_graph, has_last = segment.values("num_tokens") > 0, segment.values("last_token_row") >= 0
        is_whole = bool((has_graph | has_last).all())
        for place, has, has_other in ((graph, has_graph, has_last), (sequence, has_last, has_graph)):
            lies = place[:, 0] == number
            rows = place[lies, 1]
            is_whole = is_whole and np.array_equal(np.sort(rows), np.flatnonzero(has))
            is_whole = is_whole and np.array_equal(is_one_place[lies], has_other[rows])
        if is_whole:
            found[number] = segment.num_rows
    return found


def _packed_row(
    store: TraceStore, number: int, row: int, num_tokens: int, layout: int, has_last_token: bool
) -> PackedTrace:
    """Return a row of a segment packed, without its arrays; 0 tokens without the hidden states of all tokens."""
    segment, attributes = store.internals.segment(number), store.internals.attributes
    has_attention = layout != schema.LAYOUT_NONE
    return PackedTrace(
        record=read_record(segment, row),
        num_layers=store.num_layers,
        num_tokens=num_tokens,
        hidden_dim=store.hidden_dim,
        hidden_dtype=store.hidden_dtype,
        layout=layout,
        reversed_edges=bool(segment.scalar("edges_reversed", row)),
        num_nonfinite=segment.scalar("num_nonfinite", row),
        extras=segment.string("extras", row),
        field_bits=segment.scalar("fields", row),
        graph_crc=segment.scalar("graph_crc32c", row) if num_tokens else 0,
        sequence_crc=segment.scalar("sequence_crc32c", row) if has_last_token else 0,
        num_heads=attributes.num_heads if has_attention else None,
        attention_dtype=attributes.attention_dtype if has_attention else None,
        has_states=num_tokens > 0,
        has_last_token=has_last_token,
    )


def _arrays(trace: Trace, packed: PackedTrace) -> dict[str, list[np.ndarray]]:
    """Return the arrays of the groups of a packed row, with their bytes as stored."""
    arrays: dict[str, list[np.ndarray]] = {}
    if packed.has_states:
        arrays["hidden_states"] = [trace.hidden_states_bits]
    if packed.layout != schema.LAYOUT_NONE:
        attention = trace.attention_packed_bits
        if isinstance(attention, PackedEdges):
            packed.edge_counts = np.diff(attention.ptr)
            arrays |= {"edge_index": [attention.edge_index], "edge_weight": [attention.weight]}
        else:
            arrays["attention"] = [attention.reshape(-1)]
    if packed.has_last_token:
        arrays["last_token"] = [trace.last_token_bits]
    return arrays
