"""Features of a trace: of its causal attention, its hidden states, and the tokens of its answer.

Sizes: L layers, H stored heads, S tokens, D hidden size, M positions of the answer. Row i of a packed triangle has the
weights of the positions 0 to i, so its pairs begin at i (i + 1) / 2. No dense matrix is built. Sums are float64.
"""

import functools
from collections.abc import Callable

import numpy as np

from tracestore.data.tokens.answers import answer_span
from tracestore.store.format import schema
from tracestore.store.read.trace import Trace
from tracestore.store.trace_fields import PackedEdges

# float64 values that are held at once: 64 MiB.
_BLOCK_VALUES = 8 << 20
# The smallest weight of float16: the logarithm of a weight that was rounded to 0 is taken of it.
SMALLEST = 2.0**-24


@functools.lru_cache(maxsize=16)
def _column_order(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of a triangle column after column, and where each column begins."""
    rows, columns = np.tril_indices(num_tokens)
    order = np.lexsort((rows, columns))
    return order, np.cumsum(np.r_[0, np.arange(num_tokens, 1, -1)])


def _diagonal(num_tokens: int) -> np.ndarray:
    rows = np.arange(num_tokens)
    return rows * (rows + 1) // 2 + rows


def laplacian_eigenvalues(packed: np.ndarray, num_tokens: int, top_k: int) -> np.ndarray:
    """Return the largest eigenvalues of the Laplacian of attention maps.

    The Laplacian D - A of causal attention is lower triangular, so its eigenvalues are d_i - a_ii, with the mean weight
    that later tokens give to token i, d_i = sum_u a_ui / (S - i).

    Parameters
    ----------
    packed : np.ndarray
        ``(n, S (S + 1) / 2)`` float64.
    num_tokens : int
        S.
    top_k : int

    Returns
    -------
    np.ndarray
        ``(n, top_k)`` float64, descending; 0 beyond S.

    References
    ----------
    Binkowski et al. 2025, "Hallucination Detection in LLMs Using Spectral Features of Attention Maps",
    arXiv:2502.17598.
    """
    order, starts = _column_order(num_tokens)
    degree = np.add.reduceat(packed[:, order], starts, axis=1) / np.arange(num_tokens, 0, -1)
    values = np.sort(degree - packed[:, _diagonal(num_tokens)], axis=1)[:, ::-1]
    out = np.zeros((len(packed), top_k))
    out[:, : min(top_k, num_tokens)] = values[:, :top_k]
    return out


def lookback_ratio(packed: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return the lookback ratio of attention maps, averaged over the rows of the answer.

    For the answer's token t the ratio is c / (c + n), with the mean weight c of the positions before the answer, and
    the mean weight n of the answer's positions up to t.

    Parameters
    ----------
    packed : np.ndarray
        ``(n, S (S + 1) / 2)`` float64.
    begin, end : int
        The answer's first position, at least 1, and the position after its last one.

    Returns
    -------
    np.ndarray
        ``(n,)`` float64.

    References
    ----------
    Chuang et al. 2024, "Lookback Lens: Detecting and Mitigating Contextual Hallucinations in Large Language Models
    Using Only Attention Maps", arXiv:2407.07071: the lookback ratio.
    """
    rows = np.arange(begin, end)
    starts = rows * (rows + 1) // 2
    first = starts[0]
    # The segments of a row: the positions before the answer, and those of the answer.
    bounds = np.stack([starts, starts + begin], axis=1).ravel() - first
    sums = np.add.reduceat(packed[:, first : starts[-1] + rows[-1] + 1], bounds, axis=1)
    context, new = sums[:, ::2] / begin, sums[:, 1::2] / (rows - begin + 1)
    total = context + new
    ratio: np.ndarray = np.divide(context, total, out=np.full_like(total, 0.5), where=total != 0).mean(1)
    return ratio


def log_diagonal(packed: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return the mean logarithm of the diagonal of attention maps over the answer: their log-determinant by token.

    Parameters
    ----------
    packed : np.ndarray
        ``(n, S (S + 1) / 2)`` float64; weights of 0 count as 2^-24.
    begin, end : int
        The answer's first position, and the position after its last one.

    Returns
    -------
    np.ndarray
        ``(n,)`` float64.

    References
    ----------
    Sriramanan et al. 2024, "LLM-Check": the attention score of a head.
    """
    diagonal: np.ndarray = np.log(np.maximum(packed[:, _diagonal(end)[begin:]], SMALLEST)).mean(1)
    return diagonal


def attention_features(trace: Trace, dtype: str, top_k: int) -> dict[str, np.ndarray]:
    """Return the features of the attention of one trace.

    Parameters
    ----------
    trace : Trace
        Its arrays should be in memory of their own.
    dtype : str
        Stored dtype of the attention.
    top_k : int
        Eigenvalues of each map.

    Returns
    -------
    dict of str to np.ndarray
        laplacian ``(L, H, top_k)``, lookback ``(L, H)`` and attention_logdet ``(L, H)`` float64; H is 1 for the head
        mean. Empty for a trace without causal attention; the last two need a trace that tells where its answer is.
    """
    if trace.attention_layout != "causal":
        return {}
    stored, num_tokens = trace.attention_packed_bits, trace.num_tokens
    assert not isinstance(stored, PackedEdges)
    maps = stored.reshape(-1, stored.shape[-1])
    shape = (len(stored), len(maps) // len(stored))
    span = answer_span(trace, num_tokens)
    functions: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "laplacian": lambda packed: laplacian_eigenvalues(packed, num_tokens, top_k)
    }
    if span is not None:
        functions["attention_logdet"] = lambda packed: log_diagonal(packed, *span)
        if span[0] > 0:
            functions["lookback"] = lambda packed: lookback_ratio(packed, *span)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in functions}
    step = max(1, _BLOCK_VALUES // maps.shape[1])
    for first in range(0, len(maps), step):
        packed = schema.as_float32(maps[first : first + step], dtype).astype(np.float64)
        for name, function in functions.items():
            parts[name].append(function(packed))
    return {name: np.concatenate(of).reshape(*shape, *of[0].shape[1:]) for name, of in parts.items()}


# The ridge of the covariance in `log_determinant`.
RIDGE = 1e-3


def log_determinant(states: np.ndarray) -> np.ndarray:
    """Return the mean logarithm of the eigenvalues of the centered Gram matrix, for each layer.

    With the states Z (M, D) of a layer, whose rows are centered, the matrix is Z Z^T + 0.001 I.

    Parameters
    ----------
    states : np.ndarray
        ``(L, M, D)`` float32, M at least 1.

    Returns
    -------
    np.ndarray
        ``(L,)`` float64.

    References
    ----------
    Sriramanan et al. 2024, "LLM-Check: Investigating Detection of Hallucinations in Large Language Models": the
    hidden score, mean log-determinant of the covariance of the response's tokens, regularized.
    """
    centered = states.astype(np.float64)
    centered -= centered.mean(2, keepdims=True)
    gram = centered @ centered.transpose(0, 2, 1)
    count = gram.shape[1]
    gram[:, np.arange(count), np.arange(count)] += RIDGE
    values: np.ndarray = np.linalg.slogdet(gram)[1] / count
    return values


def pooled_states(trace: Trace, dtype: str) -> dict[str, np.ndarray]:
    """Return the features of the hidden states of one trace.

    Parameters
    ----------
    trace : Trace
        Its arrays should be in memory of their own.
    dtype : str
        Stored dtype of the hidden states.

    Returns
    -------
    dict of str to np.ndarray
        prompt_last, answer_mean, answer_max: ``(L, D)`` float32, the state before the answer, and mean and maximum
        over the answer. hidden_logdet: ``(L,)`` float64, see `log_determinant`. NaN, or left out, where the trace does
        not tell where its answer is.
    """
    span = answer_span(trace, trace.num_tokens)
    if span is None:
        return {}
    hidden, (begin, end) = trace.hidden_states_bits, span
    states = schema.as_float32(hidden[:, begin:end], dtype)
    before = schema.as_float32(hidden[:, begin - 1], dtype) if begin else np.full(states[:, 0].shape, np.nan, "f4")
    finite = np.isfinite(states).all((1, 2))
    logdet = np.full(len(states), np.nan)
    if finite.any():
        logdet[finite] = log_determinant(states[finite])
    with np.errstate(invalid="ignore"):  # infinite values of both signs
        mean = states.mean(1)
    return {"prompt_last": before, "answer_mean": mean, "answer_max": states.max(1), "hidden_logdet": logdet}


STATISTICS = ("mean_logprob", "min_logprob", "perplexity", "mean_entropy", "length")


def token_statistics(trace: Trace) -> np.ndarray:
    """Return the statistics of the answer's tokens, ``(5,)`` float64 in the order of `STATISTICS`.

    Log-probabilities and entropies are in nats, at temperature 1; perplexity is exp(-mean_logprob). NaN where the
    trace lacks them; tokens with NaN are left out.

    References
    ----------
    Guerreiro et al. 2023, "Looking for a Needle in a Haystack" (length-normalized log-probability).
    Manakul et al. 2023, "SelfCheckGPT" (minimum log-probability and mean entropy).
    """
    values = np.full(len(STATISTICS), np.nan)
    counts = [len(a) for a in (trace.tokens, trace.token_logprob, trace.token_entropy) if a is not None]
    span = answer_span(trace, max([trace.num_tokens, *counts]))
    if span is None:
        return values
    values[4] = span[1] - span[0]
    for field, targets in (("token_logprob", (0, 1)), ("token_entropy", (3,))):
        found = trace.optional(field)
        found = np.zeros(0) if found is None else found[span[0] : span[1]].astype(np.float64)
        found = found[~np.isnan(found)]
        if len(found):
            statistics = (found.mean(), found.min())
            values[list(targets)] = statistics[: len(targets)]
    values[2] = np.exp(-values[0])
    return values
