"""Find the tokens of traces that are their answers."""

import hashlib
from collections.abc import Iterable

import numpy as np

from tracestore.errors import CorruptStoreError
from tracestore.store.read import table
from tracestore.store.read.batch_sources import primary_locations
from tracestore.store.read.index import grouped
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace


def answer_span(trace: Trace, num_positions: int) -> tuple[int, int] | None:
    """Return the first position of the answer and the position after its last one.

    The positions come from ``answer_span``, else from the last run of ``generated_mask`` (the last turn), else from
    ``prompt_length``. They are clipped to the positions that have hidden states, of which there may be one fewer than
    tokens, and hold at least one.

    Parameters
    ----------
    trace : Trace
    num_positions : int
        Positions of the trace with hidden states, S, or its tokens T.

    Returns
    -------
    (int, int) or None
        None if the trace does not tell where its answer is, or the answer is empty.

    Raises
    ------
    CorruptStoreError
        If the trace has fewer tokens than prompt_length or answer_span say.
    """
    begin, end = trace.answer_span or (-1, -1)
    _require_possible(trace, begin, end)
    mask = trace.generated_mask
    if (begin < 0 or end < 0) and mask is not None and mask.any():
        last = int(np.flatnonzero(mask)[-1])
        before = np.flatnonzero(mask[:last] == 0)
        begin, end = (int(before[-1]) + 1 if len(before) else 0), last + 1
    if begin < 0 or end < 0:
        if trace.prompt_length is None:
            return None
        begin, end = trace.prompt_length, max(num_positions, trace.prompt_length)
    if num_positions == 0 or begin >= end:
        return None
    begin = min(begin, num_positions - 1)
    return begin, max(begin + 1, min(end, num_positions))


def _require_possible(trace: Trace, begin: int, end: int) -> None:
    """Raise CorruptStoreError if the trace has fewer tokens than `answer_span`, begin to end, or its prompt say."""
    length, count = trace.prompt_length or 0, trace.num_tokens
    if count and max(begin, end, length) > count and (tokens := trace.tokens) is not None:
        count = len(tokens)  # one more
    if count and (max(begin, end, length) > count or -1 < end < begin):
        found = f"prompt_length {length}" if length > count else f"answer_span {(begin, end)}"
        raise CorruptStoreError(f"trace {trace.index} ({trace.question_id}): found {found} in {count} tokens")


def answer_bounds(store: TraceStore, indices: Iterable[int]) -> np.ndarray:
    """Return the `answer_span` of traces; an empty answer is the last token, and traces without one count as a whole.

    Parameters
    ----------
    store : TraceStore
    indices : iterable of int
        Store indices of n traces.

    Returns
    -------
    np.ndarray
        ``(n, 2)`` int64, the first token and the one after the last.
    """
    indices = np.fromiter(indices, np.int64)
    locations = store.internals.index.locations(indices)
    # A trace is read by itself only where more than its prompt_length tells the answer, or what it says is impossible.
    places = primary_locations(locations)
    length, prompt = locations[:, 2], np.full(len(indices), np.iinfo(np.int64).max)
    for number, own in grouped(places[:, 0]):
        segment = store.internals.segment(number)
        if not segment.has_answers:
            prompt[own] = segment.prompt_lengths(places[own, 1])
    begin = np.where(prompt < 0, 0, np.minimum(prompt, np.maximum(length - 1, 0)))
    bounds = np.where((prompt <= length)[:, None], np.stack([begin, length], 1), -1)
    for k in np.flatnonzero(bounds[:, 0] < 0).tolist():
        bounds[k] = _bounds(store[int(indices[k])])
    return bounds


def answers_digest(store: TraceStore, indices: np.ndarray) -> str:
    """Return a digest of the `answer_bounds` of traces, the same in every order and every store; see TraceStore.digest."""
    hashes = table.hashes(store.internals, indices)
    rows = np.column_stack([hashes.view(np.int64), answer_bounds(store, indices)])
    return hashlib.blake2b(rows[np.lexsort(rows.T)].astype("<i8").tobytes(), digest_size=16).hexdigest()


def _bounds(trace: Trace) -> tuple[int, int]:
    length, span = trace.num_tokens, trace.answer_span or (-1, -1)
    is_unknown = min(span) < 0 and trace.generated_mask is None and trace.prompt_length is None
    return answer_span(trace, length) or (0 if is_unknown else length - 1, length)
