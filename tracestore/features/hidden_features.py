"""Features of hidden states. Sizes: L layers, S positions, D hidden size, M positions of the answer."""

import numpy as np

from tracestore.data.tokens.answers import answer_span
from tracestore.store.format import schema
from tracestore.store.read.trace import Trace

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
