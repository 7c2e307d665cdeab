"""The tokens that view "tokens" chooses, and where their hidden states are stored. Imports no torch."""

import operator
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tracestore._core.gather import find_runs, sort_roughly
from tracestore._core.kernels import crc32c
from tracestore.data.batches.batch_format import BatchFormat
from tracestore.errors import CorruptStoreError, MissingFieldError, UsageError
from tracestore.store.format.schema import MAX_TOKENS
from tracestore.store.read.batch_sources import GRAPH_ROW, GRAPH_SEGMENT, NUM_TOKENS, describe
from tracestore.store.read.index import grouped
from tracestore.store.read.segment import SegmentReader
from tracestore.store.read.store import TraceStore


class Tokens(NamedTuple):
    """B tokens.

    `segment` and `row` tell where hidden_states has a token in the K layers.
    """

    trace: np.ndarray  # (B,) int64, store indices
    position: np.ndarray  # (B,) int64
    segment: np.ndarray  # (B * K,) int32
    row: np.ndarray  # (B * K,) int64


class _Runs(NamedTuple):
    """Runs of tokens: entry in the list of traces, first position and length of each, int64 (R,)."""

    entry: np.ndarray
    start: np.ndarray
    length: np.ndarray


class TokenTable:
    """The chosen tokens of some traces, numbered trace after trace in the order of their positions.

    It takes 36 bytes for each run of neighboring tokens; most traces have one run.

    Parameters
    ----------
    store : TraceStore
        The store. Every trace must have hidden states of all tokens.
    batch_format : BatchFormat
        Gives positions and layers.
    indices : ndarray of int64, optional
        Restrict the table to these traces.

    Raises
    ------
    MissingFieldError
        If a trace lacks what a named position needs.
    UsageError
        If a trace lacks a position of a list, or a list names a token of it twice.
    """

    def __init__(self, store: TraceStore, batch_format: BatchFormat, indices: np.ndarray | None = None) -> None:
        self._arguments = store, batch_format, indices
        traces = np.arange(len(store), dtype=np.int64) if indices is None else indices
        self.layers = np.array(batch_format.layer_numbers(store) or range(store.num_layers), np.int64)
        locations = store.internals.index.locations(traces)
        num_tokens = locations[:, NUM_TOKENS]
        begins = np.zeros(len(traces), np.int64)
        positions = "all" if batch_format.positions is None else batch_format.positions
        self._step, spans = 1, list[_Runs]()
        for number, entries in grouped(locations[:, GRAPH_SEGMENT]):
            segment, rows = store.internals.segment(number), locations[entries, GRAPH_ROW]
            begins[entries] = segment.begins("hidden_states", rows)
            if positions in ("prompt", "answer"):
                spans += _named_runs(store, str(positions), segment, rows, traces, entries, num_tokens[entries])
        if isinstance(positions, slice):
            runs, self._step = _slice_runs(positions, num_tokens)
        elif positions in ("prompt", "answer"):
            runs = _join(spans)
        elif positions in ("all", "last"):
            length = num_tokens if positions == "all" else np.minimum(num_tokens, 1)
            runs = _Runs(np.arange(len(traces)), num_tokens - length, length)
        else:
            assert not isinstance(positions, str)
            runs = _listed_runs(store, positions, traces, num_tokens)  # type: ignore[arg-type]
        runs = _Runs(*(values[runs.length > 0] for values in runs))
        self._first = np.cumsum(runs.length) - runs.length
        self._num_tokens = int(runs.length.sum())
        self._trace, self._start = traces[runs.entry], runs.start.astype(np.int32)
        self._segment = locations[runs.entry, GRAPH_SEGMENT].astype(np.int32)
        self._begin, self._stride = begins[runs.entry], num_tokens[runs.entry].astype(np.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        store, batch_format, indices = self._arguments  # a copy may open the store with further traces
        return TokenTable, (store, batch_format, store.indices if indices is None else indices)

    def __len__(self) -> int:
        return self._num_tokens

    @cached_property
    def crc32c(self) -> int:
        """A checksum that differs, with high probability, between tables of other tokens."""
        sums = [crc32c(values) for values in (self._trace, self._start, self._first)]
        return crc32c(np.array([*sums, self._step, len(self)], np.int64))

    def locate(self, numbers: np.ndarray) -> Tokens:
        """Look tokens up by their numbers, int64 (B,). IndexError for a number outside the table."""
        if len(numbers) == 0:
            return Tokens(*(np.zeros(0, dtype) for dtype in ("i8", "i8", "i4", "i8")))
        if numbers.min() < 0 or numbers.max() >= len(self):
            raise IndexError(f"found numbers {numbers.min()} to {numbers.max()} of {len(self)} tokens")
        run = np.empty(len(numbers), np.int64)
        find_runs(self._first, numbers, run)
        position = self._start[run] + (numbers - self._first[run]) * self._step
        segment, row = self._segment[run], self._begin[run] + position
        if len(self.layers) == 1:
            row += self.layers * self._stride[run]
        else:
            row = (row[:, None] + self.layers * self._stride[run][:, None]).reshape(-1)
            segment = np.repeat(segment, len(self.layers))
        return Tokens(self._trace[run], position, segment, row)

    def store_order(self, numbers: np.ndarray) -> np.ndarray:
        """Return an order, int64 (B * K,), in which the rows of tokens lie in the store, except for near ones."""
        order = np.empty(len(numbers), np.int64)
        sort_roughly(numbers, len(self), order)
        num_layers = len(self.layers)
        if num_layers == 1:
            return order
        expanded: np.ndarray = (order[:, None] * num_layers + np.arange(num_layers)).reshape(-1)
        return expanded


def _join(parts: list[_Runs]) -> _Runs:
    """Join runs and sort them by trace."""
    none = _Runs(*(np.zeros(0, np.int64) for _ in range(3)))
    entry, start, length = (np.concatenate(values) for values in zip(none, *parts, strict=True))
    order = np.argsort(entry, kind="stable")
    return _Runs(entry[order], start[order], length[order])


def _slice_runs(positions: slice, num_tokens: np.ndarray) -> tuple[_Runs, int]:
    """Return the run of a slice in each trace, and the step between its positions."""
    lengths, which = np.unique(num_tokens, return_inverse=True)
    try:
        ranges = [range(*positions.indices(n)) for n in lengths.tolist()]
    except (TypeError, ValueError) as error:
        raise UsageError(f"found positions {positions}: {error}") from None
    start, length = (np.array([f(r) for r in ranges], np.int64)[which] for f in (operator.attrgetter("start"), len))
    return _Runs(np.arange(len(num_tokens)), start, length), ranges[0].step if ranges else 1


def _listed_runs(
    store: TraceStore, positions: int | tuple[int, ...], traces: np.ndarray, num_tokens: np.ndarray
) -> _Runs:
    """Return a run for each list of consecutive positions in each trace, in the order of the list."""
    chosen = [positions] if isinstance(positions, int) else list(positions)
    listed = np.array(chosen).clip(-MAX_TOKENS - 1, MAX_TOKENS).astype(np.int64)
    for position in (listed.max(), listed.min()):
        short = (num_tokens <= position) | (num_tokens < -position)
        if short.any():
            where = describe(store.internals, int(traces[np.flatnonzero(short)[0]]))
            raise UsageError(
                f"{where} has {num_tokens[short][0]} tokens and none at position {position}; use a slice, which takes those that exist"
            )
    equal = np.isin(num_tokens, np.subtract.outer(listed[listed >= 0], listed[listed < 0]))
    if equal.any():
        where = describe(store.internals, int(traces[np.flatnonzero(equal)[0]]))
        raise UsageError(f"positions {chosen!s:.80} name a token of {where} twice")
    # A run does not continue from -1 to 0.
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(listed) != 1) | (listed[1:] == 0)]))
    lengths = np.diff(np.append(begins, len(listed)))
    start = np.where(listed[begins] < 0, num_tokens[:, None], 0) + listed[begins]
    entry = np.repeat(np.arange(len(traces)), len(begins))
    return _Runs(entry, start.reshape(-1), np.tile(lengths, len(traces)))


def _require_possible(
    store: TraceStore, names: list[str], stored: np.ndarray, counts: np.ndarray, traces: np.ndarray
) -> None:
    """Raise CorruptStoreError if positions (F, n) by name are beyond the tokens of their traces, or not in order."""
    wrong = stored > counts
    if len(names) > 1:
        wrong[-1] |= (stored[-1] < stored[-2]) & (stored[-1] >= 0)
    for k, name in enumerate(names):
        for position in np.flatnonzero(wrong[k])[:1].tolist():
            where = describe(store.internals, int(traces[position]))
            found = f"{name} {stored[k, position]} in {counts[position]} tokens"
            raise CorruptStoreError(f"{where}: found {found}; `tracestore lint` lists such traces")


def _named_runs(
    store: TraceStore,
    name: str,
    segment: SegmentReader,
    rows: np.ndarray,
    traces: np.ndarray,
    entries: np.ndarray,
    num_tokens: np.ndarray,
) -> Iterator[_Runs]:
    """Yield the runs of "prompt" or "answer" of the traces in one segment.

    The prompt is the first prompt_length tokens, else those that generated_mask does not mark. The
    answer is answer_span, else what generated_mask marks, else what follows the prompt.
    """
    names = ["prompt_length", *(("answer_begin", "answer_end") if "answer_span" in segment.optional_names else ())]
    stored = np.stack([segment.values(n)[rows].astype(np.int64) for n in names])
    _require_possible(
        store, names, stored, np.maximum(np.diff(segment.values("tokens_offsets"))[rows], num_tokens), traces[entries]
    )
    prompt, *span = np.minimum(stored, num_tokens)
    begin, end, is_known = np.zeros(len(rows), np.int64), prompt, prompt >= 0
    if name == "answer":
        is_known = np.zeros(len(rows), bool)
        if span:
            begin, end = span
            is_known = (begin >= 0) & (end >= 0)
    yield _Runs(entries[is_known], begin[is_known], np.maximum(end - begin, 0)[is_known])
    has_mask = "generated_mask" in segment.optional_names
    for k in np.flatnonzero(~is_known).tolist():
        mask = segment.optional("generated_mask", int(rows[k])) if has_mask else None
        if mask is not None:
            chosen = (mask[: num_tokens[k]] != 0) == (name == "answer")
        elif prompt[k] >= 0:
            chosen = np.arange(num_tokens[k]) >= prompt[k]
        else:
            needed = (
                "answer_span, generated_mask or prompt_length"
                if name == "answer"
                else "prompt_length or generated_mask"
            )
            where = describe(store.internals, int(traces[entries[k]]))
            raise MissingFieldError(f"{where} has no {needed}, of which positions {name!r} need one")
        bounds = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype("i1")))
        yield _Runs(np.full(len(bounds) // 2, entries[k]), bounds[::2], bounds[1::2] - bounds[::2])
