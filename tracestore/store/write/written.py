"""Segments that other processes have written, and their traces as arrays: a commit makes no object of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.kernels import crc32c
from tracestore.errors import InvalidInputError
from tracestore.store.format import manifest as mf
from tracestore.store.format import schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.io.files import ReadableFiles, reading_committed
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.pack import PackedTrace, fit_attributes
from tracestore.store.write.record import TraceRecord, read_record
from tracestore.store.write.segment_writer import name_of

_NO_COUNTS = np.zeros(0, "<i8")


class WrittenSegment:
    """A segment that another process has given its name; for the rest see SegmentWriter.

    Parameters
    ----------
    files : ReadableFiles
        Those of the store that has it: the one that is written or replaced, or another one.
    reader : SegmentReader
        Its arrays.

    Raises
    ------
    CorruptStoreError
        If its rows.zip is damaged.
    """

    def __init__(self, files: ReadableFiles, reader: SegmentReader) -> None:
        self.source, self.reader, self.rows, self.number, self.folder = files, reader, reader.rows, -1, Path()
        with reading_committed(self.rows.path):
            data = reader.small.mapped.read(0, self.rows.size)
            if crc32c(data) != self.rows.crc32c:
                raise ValueError("checksum mismatch")
        self.name = name_of(data)
        self.files = [(e.path.removeprefix(f"{reader.name}/"), e.size, e.crc32c) for e in self.entries]
        self.num_bytes = sum(size for _, size, _ in self.files)
        self.num_tokens = int(reader.values("num_tokens").sum(dtype=np.int64))
        self.arrays = {name for name in schema.LARGE_ARRAYS if reader.has(name)}
        self.field_names = self.arrays & {*schema.STORED_FIELDS}
        self.field_names |= {"edges"} if "edge_index" in self.arrays else set()

    @property
    def entries(self) -> list[FileEntry]:
        """All files, rows.zip last."""
        return [*self.reader.entries.values(), self.rows]

    def __len__(self) -> int:
        return self.reader.num_rows

    def packed(self, row: int) -> PackedTrace:
        """Return a row with its texts and checksums, without its arrays."""
        reader = self.reader
        trace = PackedTrace(read_record(reader, row), 0, 0, 0, "", extras=reader.string("extras", row))
        trace.graph_crc, trace.sequence_crc = (reader.scalar(f"{n}_crc32c", row) for n in mf.GROUP_NAMES)
        return trace

    def finish(self, sync: Any = None) -> None:
        """Do nothing: it is complete."""

    flush = close_fd = remove = finish  # remove: another commit may name it.

    def savepoint(self) -> None:
        """Return what rollback() needs: nothing."""

    def rollback(self, savepoint: Any) -> None:
        """Do nothing."""


@dataclass
class TraceBlock:
    """N traces of one source in consecutive rows of a segment.

    Attributes
    ----------
    segment : WrittenSegment
    first : int
        The row of the first trace.
    ids : list of str
        Question ids.
    rows : Mapping of np.ndarray
        Those arrays (N,) of schema.ROW_ARRAYS that a commit needs.
    num_ids : np.ndarray
        Numbers of token ids (N,).
    facts : sequence of PackedTrace
        What many traces share: dimensions, dtypes, layers, and the names of other fields.
    kinds : np.ndarray
        The position (N,) in `facts` of those of each trace.
    names : sequence of (str, int)
        Names of scores, and 1 for those that are stored when the accounts of the run close.
    values, has_value : np.ndarray
        The label and these scores (N, 1 + len(names)), and which of them each trace has.
    groups : list of str
    states_crc32c, source_bytes : np.ndarray
        CRC-32C of the hidden states, and bytes of the arrays in the source (N,).
    """

    segment: WrittenSegment
    first: int
    ids: list[str]
    rows: Mapping[str, np.ndarray]
    num_ids: np.ndarray
    facts: Sequence[PackedTrace]
    kinds: np.ndarray
    names: Sequence[tuple[str, int]]
    values: np.ndarray
    has_value: np.ndarray
    groups: list[str]
    states_crc32c: np.ndarray
    source_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[PackedTrace]:
        return map(self.trace, range(len(self)))

    def part(self, part: slice) -> "TraceBlock":
        """Return some of the traces."""
        names = ("ids", "num_ids", "kinds", "values", "has_value", "groups", "states_crc32c", "source_bytes")
        parts = {name: getattr(self, name)[part] for name in names}
        rows = {name: values[part] for name, values in self.rows.items()}
        return replace(self, first=self.first + part.start, rows=rows, **parts)

    def facts_of(self, k: int) -> PackedTrace:
        """Return the facts of a trace."""
        facts: PackedTrace = self.facts[self.kinds[k]]
        return facts

    @cached_property
    def keys(self) -> list[tuple[str, int]]:
        """The question id and sample of each trace."""
        return list(zip(self.ids, self.rows["sample"].tolist(), strict=True))

    @cached_property
    def states(self) -> list[tuple[int, str]]:
        """The checksum and number of tokens of the hidden states of each trace that has them, and its question id."""
        num_tokens = self.rows["num_tokens"]
        states = (self.states_crc32c.astype("<i8") << 32 | num_tokens)[num_tokens > 0]
        return list(zip(states.tolist(), compress(self.ids, (num_tokens > 0).tolist()), strict=True))

    def has_field(self, name: str) -> np.ndarray:
        """Return which traces have a field of schema.FIELD_BITS, bool (N,)."""
        found: np.ndarray = self.rows["fields"] & schema.FIELD_BITS[name] != 0
        return found

    def questions(self) -> Iterator[tuple[tuple[str, int], str]]:
        """Return the keys and the texts of the questions of the traces that have one."""
        with reading_committed(self.segment.rows.path):
            texts = self.segment.reader.small.strings("question", self.first, self.first + len(self))
        return compress(zip(self.keys, texts, strict=True), self.has_field("question").tolist())

    def labels(self) -> np.ndarray:
        """Return the labels (N,), NaN for none."""
        return np.where(self.has_value[:, 0], self.values[:, 0], np.nan)

    def scores(self) -> dict[str, np.ndarray]:
        """Return the scores (N,) that are stored at once, NaN where missing."""
        values = np.where(self.has_value, self.values, np.nan)
        return {name: values[:, k] for k, (name, is_deferred) in enumerate(self.names, 1) if not is_deferred}

    def score_names(self) -> list[str]:
        """Return the names of the scores of the traces that are stored at once."""
        has = self.has_value.sum(axis=0)
        return [name for k, (name, is_deferred) in enumerate(self.names, 1) if has[k] and not is_deferred]

    def locations(self, source: int) -> dict[str, np.ndarray]:
        """Return the columns of manifest.TRACE_COLUMNS, for the source of that number."""
        count, rows, segment = len(self), self.rows, self.segment.number
        row = np.arange(self.first, self.first + count)
        return {
            "graph_segment": np.where(rows["num_tokens"] > 0, segment, -1),
            "graph_row": row,
            "sequence_segment": np.where(rows["last_token_row"] >= 0, segment, -1),
            "sequence_row": row,
            "num_tokens": rows["num_tokens"],
            "layout": rows["attention_layout"],
            "nonfinite": rows["num_nonfinite"] > 0,
            "sample": rows["sample"],
            "source": np.full(count, source),
            "source_position": rows["source_position"],
        }

    def fit_attributes(self, attributes: schema.Attributes) -> schema.Attributes:
        """Return the attributes of a store after the traces are added to it; InvalidInputError if they do not fit."""
        if not ((self.rows["num_tokens"] > 0) | (self.rows["last_token_row"] >= 0)).all():
            raise InvalidInputError("a trace without states")
        _, first = np.unique(self.kinds * 256 + self.rows["attention_layout"], return_index=True)
        for k in sorted(first.tolist()):
            kind = replace(self.facts[self.kinds[k]], layout=int(self.rows["attention_layout"][k]))
            attributes = fit_attributes(attributes, kind)
        return attributes

    @cached_property
    def _lists(self) -> dict[str, list[Any]]:
        """The rows as lists, and the extras: what makes an object of each trace."""
        lists = {name: values.tolist() for name, values in self.rows.items()}
        lists |= {"values": self.values.tolist(), "has_value": self.has_value.tolist()}
        last = self.first + len(self)
        with reading_committed(self.segment.rows.path):
            return lists | {"extras": self.segment.reader.small.strings("extras", self.first, last)}

    def record(self, k: int) -> TraceRecord:
        """Return a trace without its arrays and texts."""
        rows = self._lists
        known, bits = self.facts_of(k).record, rows["fields"][k]
        label, *values = rows["values"][k]
        has_label, *has_value = rows["has_value"][k]
        scores: tuple[dict[str, float], dict[str, float]] = {}, {}
        for (name, is_deferred), value, has in zip(self.names, values, has_value, strict=True):
            if has:
                scores[is_deferred][name] = value
        return replace(
            known,
            question_id=self.ids[k],
            sample=rows["sample"][k],
            position=rows["source_position"][k],
            label=label if has_label else None,
            has_own_id=bool(bits & schema.FIELD_BITS["question_id"]),
            scores=scores[0],
            deferred_scores=scores[1],
            group=self.groups[k],
        )

    def trace(self, k: int) -> PackedTrace:
        """Return a trace without its arrays, but with its token ids."""
        rows, record = self._lists, self.record(k)
        if rows["fields"][k] & schema.FIELD_BITS["tokens"]:
            record.tokens = self.segment.reader.tokens(self.first + k)
        facts, num_tokens, layout = self.facts_of(k), rows["num_tokens"][k], rows["attention_layout"][k]
        return replace(
            facts,
            record=record,
            num_tokens=num_tokens,
            layout=layout,
            edge_counts=_NO_COUNTS if layout == schema.LAYOUT_EDGES else None,
            num_nonfinite=rows["num_nonfinite"][k],
            extras=rows["extras"][k],
            field_bits=rows["fields"][k],
            crcs={"hidden_states": int(self.states_crc32c[k])} if num_tokens else {},
            graph_crc=rows["graph_crc32c"][k],
            sequence_crc=rows["sequence_crc32c"][k],
            has_states=num_tokens > 0,
            has_last_token=rows["last_token_row"][k] >= 0,
            source_bytes=int(self.source_bytes[k]),
            segment=self.segment,
            row=self.first + k,
        )
