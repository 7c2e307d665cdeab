"""Receipts: what a task has written, for the commit. They come from other machines and are checked as foreign input."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np

from tracestore.errors import (
    CorruptStoreError,
    InvalidInputError,
    UsageError,
    error_from_json,
    error_to_json,
    escape_unprintable,
)
from tracestore.ingest.builtin.parts import Part
from tracestore.ingest.sources import SourceFile, SourceIdentity
from tracestore.store.format import paths, schema
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.ragged import encode_strings
from tracestore.store.format.zip_group import ZipGroup, pack_group
from tracestore.store.io.files import ReadableFiles
from tracestore.store.read.index import SegmentEntry
from tracestore.store.read.segment import SegmentReader
from tracestore.store.write.pack import PackedTrace, fit_attributes
from tracestore.store.write.plan_files import PlanFiles
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.segment_writer import SegmentWriter
from tracestore.store.write.written import TraceBlock, WrittenSegment
from tracestore.tasks.task_plan import Task, TaskPlan, digest_of

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
# Of each trace, in the order of the rows of the segments: its label and values of scores (score after score), NaN if
# they are missing, which of them it has, its group, the CRC-32C of its hidden states, the bytes of its arrays in the
# source, and the position of its other facts in the attribute `facts`.
_ARRAYS = {
    "values": "<f8",
    "has_value": "|u1",
    "group": "|u1",
    "group_offsets": "<i8",
    "states_crc32c": "<u4",
    "source_bytes": "<i8",
    "facts": "<i4",
}
# Errors of reading values that no receipt has.
_DAMAGES = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, InvalidInputError)


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


@dataclass(frozen=True)
class Receipt:
    """Counts of what a task has written; the store holds the details.

    Attributes
    ----------
    task : str
        Hash of the task.
    num_sources, num_traces, num_bytes : int
        Sources that were read, their traces, and the bytes of the segments.
    """

    task: str
    num_sources: int
    num_traces: int
    num_bytes: int

    def to_json(self) -> str:
        """Return the receipt as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Receipt":
        """Return the receipt of a line of JSON; UsageError if it is none."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            raise UsageError("not a receipt of tracestore") from None


@dataclass
class WrittenSource:
    """The traces of a source, in segments of a task; a TraceStream.

    Attributes
    ----------
    source : SourceFile
    position : int
        Among all sources of the plan.
    size, fingerprint : int, str
    packed : sequence of PackedTrace
        Without their arrays, in the process that writes them.
    blocks : sequence of TraceBlock
        In the process that commits them.
    refused : list of InvalidInputError
        Traces that were refused.
    error : InvalidInputError or None
        Why the source is refused as a whole; it has no traces then.
    """

    source: SourceFile
    position: int
    size: int
    fingerprint: str
    packed: Sequence[PackedTrace] = ()
    blocks: Sequence[TraceBlock] = ()
    refused: list[InvalidInputError] = field(default_factory=list)
    error: InvalidInputError | None = None

    def identity(self) -> SourceIdentity:
        """Return the identity, which the task has compared with the files."""
        return _Compared(self.size, self.fingerprint, 0)

    def stop(self) -> None:
        """Do nothing: the traces are written."""

    def __iter__(self) -> Iterator[PackedTrace]:
        return chain.from_iterable(self.written_blocks())

    def written_blocks(self) -> Iterator[TraceBlock]:
        """Yield the blocks; raise the error of reading the source."""
        if self.error is not None:
            raise self.error.with_location()
        yield from self.blocks


class _Compared(SourceIdentity):
    def matches(self, source: SourceFile) -> bool:
        """Return True: the task has looked at the end of the source."""
        return True


def pack_receipt(
    task: Task, sources: Sequence[WrittenSource], segments: Sequence[SegmentWriter], accounts: Sequence[Any]
) -> bytes:
    """Return the bytes of a receipt."""
    traces = [trace for source in sources for trace in source.packed]
    names = sorted({(name, k) for trace in traces for k, found in enumerate(_scores_of(trace)) for name in found})
    facts: dict[str, int] = {}
    texts = (json.dumps([getattr(t, n) for n in OF_TRACE] + [getattr(t.record, n) for n in OF_RECORD]) for t in traces)
    rows = [[trace.record.label, *(_scores_of(trace)[k].get(name) for name, k in names)] for trace in traces]
    values = [math.nan if value is None else value for row in rows for value in row]
    arrays = {
        "values": values,
        "has_value": [value is not None for row in rows for value in row],
        "states_crc32c": [trace.crcs.get("hidden_states", 0) for trace in traces],
        "source_bytes": [trace.source_bytes for trace in traces],
        "facts": [facts.setdefault(text, len(facts)) for text in texts],
    }
    packed = {name: np.array(found, _ARRAYS[name]) for name, found in arrays.items()}
    packed["group"], packed["group_offsets"] = encode_strings([trace.record.group for trace in traces])
    document = {
        "task": task.hash,
        "segments": [[s.name, len(s), s.rows.size, s.rows.crc32c, s.shapes] for s in segments],
        "sources": [
            {
                "name": source.source.name,
                "position": source.position,
                "size": source.size,
                "fingerprint": source.fingerprint,
                "num_traces": len(source.packed),
                "refused": list(map(error_to_json, source.refused)),
                "error": None if source.error is None else error_to_json(source.error),
            }
            for source in sources
        ],
        "scores": names,
        "facts": [json.loads(text) for text in facts],
        "accounts": list(accounts),
    }
    return pack_group(packed, {"tracestore": document | {"digest": _digest(document, packed)}})


def _scores_of(trace: PackedTrace) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the scores of a trace, and those that are stored when the accounts of the run close."""
    return trace.record.scores, trace.record.deferred_scores


def _digest(document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    parts = [json.dumps(document, sort_keys=True).encode(), *(arrays[name].tobytes() for name in sorted(_ARRAYS))]
    return digest_of(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


@dataclass
class FoundReceipt:
    """A receipt that was read and checked."""

    path: str
    sources: list[WrittenSource]
    accounts: list[Any]
    segments: list[WrittenSegment]

    def summary(self, task: Task) -> Receipt:
        """Return its counts."""
        num_bytes = sum(segment.num_bytes for segment in self.segments)
        num_traces = sum(len(block) for source in self.sources for block in source.blocks)
        return Receipt(task.hash, len(self.sources), num_traces, num_bytes)

    def add_accounts(self, parts: Sequence[Part]) -> None:
        """Add what the task has found to the accounts of the layouts; CorruptStoreError if these are others."""
        with _damaged(self.path):
            for part, found in zip(parts, self.accounts, strict=True):
                if part.execution is not None:
                    part.execution.account.add_json(found)
                elif found is not None:
                    raise ValueError("accounts of other layouts")


@contextmanager
def _damaged(path: str) -> Iterator[None]:
    """Report what is wrong with the values of a receipt as a damaged file."""
    try:
        yield
    except _DAMAGES as error:
        reason = escape_unprintable(f"{type(error).__name__}: {error}", 200)
        raise CorruptStoreError(f"{path}: {reason}; write its task again") from None


@contextmanager
def _opened(files: PlanFiles, task: Task) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray], list[str]]]:
    """Return the document, the arrays and the groups of a receipt; what is wrong in the block is a damaged receipt."""
    path = paths.receipt(task.hash)
    mapped = files.map(path)
    with _damaged(f"{files.location}/{path}"):
        group = ZipGroup(mapped, _ARRAYS)
        document = group.attributes()["tracestore"]
        arrays = {name: group.read(name) for name in _ARRAYS}
        if document.pop("digest") != _digest(document, arrays) or document["task"] != task.hash:
            raise ValueError("damaged")
        yield document, arrays, group.strings("group", 0, len(arrays["facts"]))


def read_receipt(plan: TaskPlan, task: Task, sources: Sequence[SourceFile]) -> FoundReceipt:
    """Return the receipt of a task of a plan with these sources.

    Raises
    ------
    FileNotFoundError
        If there is none.
    CorruptStoreError
        If it is damaged, or the segments are not those that it says.
    """
    with _opened(plan.files, task) as (document, arrays, groups):
        found = document["sources"]
        if [[s["position"], s["name"], s["size"], s["fingerprint"]] for s in found] != plan.facts["tasks"][task.number]:
            raise ValueError("sources of another plan")
        traces = TracesOfReceipt(plan, document, arrays, groups)
        segments = [traces.add_segment(plan.files.files, *segment) for segment in document["segments"]]
        plan.files.check(entry for segment in segments for entry in segment.entries)
        written = [_written(source, sources[source["position"]], traces) for source in found]
        traces.check_end()
        return FoundReceipt(f"{plan.store}/{paths.receipt(task.hash)}", written, list(document["accounts"]), segments)


def usable_receipt(plan: TaskPlan, task: Task, sources: Sequence[SourceFile]) -> FoundReceipt | None:
    """Return the receipt of a task; None if the task must be written because it is missing, damaged or has an error."""
    with suppress(FileNotFoundError, CorruptStoreError):
        found = read_receipt(plan, task, sources)
        if all(source.error is None for source in found.sources):
            return found
    return None


def listed(files: PlanFiles, task: Task) -> tuple[list[str], set[tuple[str, int, str]]] | None:
    """Return what the receipt of a task lists: the paths of segments, and name, size and fingerprint of sources.

    None if it is missing or damaged.
    """
    with suppress(FileNotFoundError, CorruptStoreError), _opened(files, task) as (document, *_):
        sources = {(found["name"], found["size"], found["fingerprint"]) for found in document["sources"]}
        return [paths.segment(name) for name, *_ in document["segments"]], sources
    return None


def _written(found: Mapping[str, Any], source: SourceFile, traces: TracesOfReceipt) -> WrittenSource:
    blocks = traces.take(found["num_traces"])
    error = None if found["error"] is None else error_from_json(found["error"])
    refused = list(map(error_from_json, found["refused"]))
    if bool(blocks) if error is not None else not (blocks or source.may_be_empty):
        raise ValueError(f"{found['num_traces']} traces and the error {error}")
    return WrittenSource(
        source, found["position"], found["size"], found["fingerprint"], blocks=blocks, refused=refused, error=error
    )
