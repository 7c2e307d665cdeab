"""Find the tokens of a trace that are its answer."""

from collections.abc import Iterable

import numpy as np

from tracestore.store.read.store import TraceStore


def answer_bounds(store: TraceStore, indices: Iterable[int]) -> np.ndarray:
    """Return the first token of the answer of each trace and the one after its last.

    The answer is answer_span, else the tokens from the first to the last that generated_mask marks,
    else those after the prompt. An empty answer becomes the last token. Traces without any of these
    fields count as a whole.

    Parameters
    ----------
    store : TraceStore
    indices : iterable of int
        Store indices of n traces.

    Returns
    -------
    np.ndarray
        ``(n, 2)`` int64.
    """
    bounds = []
    for index in indices:
        trace = store[int(index)]
        length, span, mask = trace.num_tokens, trace.optional("answer_span"), trace.optional("generated_mask")
        begin, end = 0, length
        if span is not None:
            begin, end = span
        elif mask is not None:
            marked = np.flatnonzero(mask)
            begin, end = (int(marked[0]), int(marked[-1]) + 1) if len(marked) else (length, length)
        elif trace.prompt_length is not None:
            begin = trace.prompt_length
        end = min(end, length)
        bounds.append((begin, end) if begin < end else (length - 1, length))
    return np.array(bounds, np.int64).reshape(-1, 2)
