"""Defaults that the first traces of the sources decide: whether they have attention, and whether their index is an id."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.formats import ReadOptions, read_traces
from tracestore.ingest.roles.assign import assign
from tracestore.ingest.roles.candidates import attention_in
from tracestore.ingest.roles.keys import INDEX_KEYS, KeyOptions, normalized
from tracestore.ingest.sources import SourceFile
from tracestore.store.write.record import TraceRecord

WITHOUT_ATTENTION = "no attention in the source: stored without edges; detectors that need graphs cannot train on it"
LEFT_OUT = "the store has no attention: that of the source was left out"
# How much is read to decide. If that is without attention, a later trace with attention is refused.
MAX_TRACES = 3  # of each file
_MAX_FILES = 64


class DefaultAttention:
    """The attention of a conversion without `--attention`.

    Parameters
    ----------
    find : callable
        Return whether the traces have attention, as `has_attention` does; called once.
    """

    def __init__(self, find: Callable[[], bool | None]) -> None:
        self._has_attention = cache(find)

    def of_new_store(self) -> str:
        """Return "none" if the first traces have hidden states without attention, "mean" in every other case."""
        return "none" if self._has_attention() is False else "mean"

    def is_refused(self, stored: str) -> bool:
        """Return whether a store with the option `stored` refuses traces with attention, so that none is lost."""
        return stored == "none" and not self._has_attention()

    def note(self, stored: str) -> str | None:
        """Return what the user must know about a store with the option `stored`."""
        notes = {False: WITHOUT_ATTENTION, True: LEFT_OUT, None: None}
        return notes[self._has_attention()] if stored == "none" else None


def has_attention(
    sources: list[SourceFile], keys: KeyOptions, before_file: Callable[[], None] = lambda: None
) -> bool | None:
    """Return whether one of the first traces has attention; None if none of them has hidden states of all tokens.

    The result depends on the sources alone. At most 64 files, evenly spaced, are read.

    Parameters
    ----------
    sources : list of SourceFile
        The sources in their order, at least one.
    keys : KeyOptions
        Names of the fields of a trace in the files.
    before_file : callable
        Called before each file; may raise.
    """
    is_without = False
    maybe: list[str] = []  # values that may be attention under another name: their traces are refused, not stored
    mapped = {key for _, key in keys.renamed}

    def on_trace(trace: Any) -> None:
        maybe.extend(key for key in attention_in(trace) if key not in mapped)

    for source in _some(sources):
        before_file()
        for record in _first_traces(source, keys, MAX_TRACES, on_trace):
            if record.attention is not None or record.edges is not None or maybe:
                return True
            is_without |= record.hidden is not None
    return False if is_without else None


def is_index_id(sources: list[SourceFile], keys: KeyOptions) -> bool:
    """Return whether integers named idx or index, or such as question_idx, are ids: no two of the first traces have one.

    The result depends on the sources alone. The first traces of at most 64 files, evenly spaced, are read; only those
    of the first one if they have another id.
    """
    seen: set[tuple[str, int]] = set()
    is_from_index: list[bool] = []

    def on_trace(trace: Any) -> None:
        roles = assign(trace, keys).roles if isinstance(trace, Mapping) else {}
        is_from_index.append(
            any(role == "question_id" and normalized(key).endswith(INDEX_KEYS) for key, role in roles.items())
        )

    keys = replace(keys, is_index_id=True)
    for source in _some([source for source in sources if source.export is None]):
        for record in _first_traces(source, keys, MAX_TRACES, on_trace):
            key = record.question_id, record.sample
            if key in seen or not any(is_from_index):
                return False
            seen.add(key)
    return bool(seen)


def _some(sources: list[SourceFile]) -> list[SourceFile]:
    return sources[:: max(1, -(-len(sources) // _MAX_FILES))]


def _first_traces(
    source: SourceFile, keys: KeyOptions, count: int, on_trace: Callable[[Any], None]
) -> Iterator[TraceRecord]:
    """Yield the first traces of a source. The conversion reports what is refused."""
    options = ReadOptions(None, keys, on_refused=lambda _: None, on_trace=lambda _, trace: on_trace(trace))
    traces = read_traces(source, options)
    try:
        with closing(traces):  # type: ignore[type-var]
            yield from islice(traces, count)
    except InvalidInputError:
        return
