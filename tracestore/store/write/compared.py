"""Compare traces: those of one key, and those of one question id, which answer one question."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from tracestore.errors import InvalidInputError, escape_unprintable
from tracestore.store.format.schema import FIELD_BITS
from tracestore.store.read.index import StoreIndex
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.record import TraceRecord
from tracestore.store.write.written import TraceBlock
from tracestore.words import folded

_KEYS_AT_ONCE = 1 << 16


class ComparedQuestion(NamedTuple):
    """Hold a question: a digest of its text without case, blanks and forms of characters, and what messages show of it."""

    digest: bytes
    shown: str

    @classmethod
    @lru_cache(maxsize=2)
    def of(cls, text: str | None) -> "ComparedQuestion | None":
        """Return that of a text; None if it is missing or blank."""
        if not (data := folded(text or "").encode("utf-8", "surrogatepass")):
            return None
        return cls(blake2b(data, digest_size=16).digest(), escape_unprintable(text or "", 60))

    def differs(self, other: "ComparedQuestion") -> bool:
        """Return whether another question has another text."""
        return self.digest != other.digest


class ComparedTrace(NamedTuple):
    """Hold what another trace of the same key is compared with.

    Attributes
    ----------
    graph_crc, sequence_crc : int
        See PackedTrace.
    fields : dict
        What it holds besides its arrays: numbers, and digests of texts and lists, which may be large.
    question : ComparedQuestion or None
    """

    graph_crc: int
    sequence_crc: int
    fields: dict[str, Any]
    question: ComparedQuestion | None

    @classmethod
    def of(cls, trace: PackedTrace) -> "ComparedTrace":
        """Return that of a trace."""
        trace = _with_texts(trace)
        question = ComparedQuestion.of(trace.record.strings.get("question"))
        return cls(trace.graph_crc, trace.sequence_crc, fields_of(trace.record, trace.extras), question)


class Samples:
    """The samples of question ids. Sample 0 is not kept: a store with one answer to each question needs no memory."""

    def __init__(self) -> None:
        self._others: dict[str, list[int]] = {}
        self._num_read = 0

    def add(self, keys: Iterable[tuple[str, int]]) -> None:
        """Add keys of traces."""
        for question_id, sample in keys:
            if sample:
                self._others.setdefault(question_id, []).append(sample)

    def read(self, index: StoreIndex) -> None:
        """Add the traces of an index that were committed since the last call."""
        if self._num_read == len(index):
            return
        samples = index.read_column("sample")
        traces = self._num_read + np.flatnonzero(samples[self._num_read :])
        for part in np.split(traces, range(_KEYS_AT_ONCE, len(traces), _KEYS_AT_ONCE)):
            self.add(zip(index.question_ids(part), samples[part].tolist(), strict=True))
        self._num_read = len(index)

    def of(self, question_id: str) -> list[int]:
        """Return the samples of a question id that are not 0; the source of some may have been refused later."""
        return self._others.get(question_id, [])

    def lack(self, question_ids: Iterable[str]) -> bool:
        """Return whether of() is empty for each of some question ids."""
        return not self._others or self._others.keys().isdisjoint(question_ids)


class Questions:
    """Compare the questions of traces: each question id has one.

    Parameters
    ----------
    index : StoreIndex
        The committed traces.
    committed : Samples
        Theirs, of any generation.
    question_of : callable
        Return the question of a stored or pending trace; None if it has none, or there is no such trace.

    Attributes
    ----------
    added : Samples
        Those of the pending traces.
    """

    def __init__(
        self, index: StoreIndex, committed: Samples, question_of: Callable[[str, int], ComparedQuestion | None]
    ) -> None:
        self._index, self._committed, self._question_of, self.added = index, committed, question_of, Samples()

    def check(self, trace: PackedTrace, is_whole_source: bool) -> None:
        """Raise InvalidInputError if another sample of the id of a trace has another question."""
        if not (trace.has_texts and trace.field_bits & FIELD_BITS["question"]):
            return
        question_id, own_sample = trace.record.question_id, trace.record.sample
        for sample, expected in self._others(question_id, own_sample):
            own = ComparedQuestion.of(_with_texts(trace).record.strings.get("question"))
            if own is not None and own.differs(expected):
                end = ", which ends differently" * (own.shown == expected.shown)
                raise InvalidInputError(
                    f"found {own.shown!r}, expected that of sample {sample} of question id {question_id!r:.60}, "
                    f"{expected.shown!r}{end}",
                    field="question",
                    is_whole_source=is_whole_source,
                )
            return

    def fit(self, block: TraceBlock) -> bool:
        """Return whether check() refuses no trace of a block with new keys."""
        self._committed.read(self._index)
        if not block.rows["sample"].any() and self._committed.lack(block.ids) and self.added.lack(block.ids):
            return True
        expected: dict[str, ComparedQuestion] = {}
        for (question_id, sample), text in block.questions():
            if (own := ComparedQuestion.of(text)) is not None:
                if question_id not in expected:
                    expected[question_id] = next((other for _, other in self._others(question_id, sample)), own)
                if own.differs(expected[question_id]):
                    return False
        return True

    def _others(self, question_id: str, own: int) -> Iterator[tuple[int, ComparedQuestion]]:
        """Yield the other samples of a question id that have a question, and that."""
        self._committed.read(self._index)
        for sample in (0, *self._committed.of(question_id), *self.added.of(question_id)):
            if sample != own and (question := self._question_of(question_id, sample)) is not None:
                yield sample, question


def _with_texts(trace: PackedTrace) -> PackedTrace:
    """Return a trace with its texts, which those of a block lack."""
    return trace if trace.segment is None else trace.segment.packed(trace.row)


def fields_of(record: TraceRecord, extras: str) -> dict[str, Any]:
    """Return the fields of ComparedTrace."""
    found = {
        **record.strings,
        "tokens": None if record.tokens is None else record.tokens.tolist(),
        "tokens_decoded": None if record.tokens_decoded is None else list(record.tokens_decoded),
        "prompt_length": record.prompt_length,
        "extras": extras,
        # NaN does not equal itself, so arrays are compared by their bytes.
        **{n: v.tobytes() if isinstance(v, np.ndarray) else v for n, v in record.optional.items()},
    }
    return {name: _digest(v) for name, v in found.items() if v is not None and v != "" and v != []}


def _digest(value: Any) -> Any:
    """Return what stands for a text, a list or bytes, or another value itself."""
    data = json.dumps(value).encode() if isinstance(value, str | list) else value
    return blake2b(data, digest_size=16).digest() if isinstance(data, bytes) else data
