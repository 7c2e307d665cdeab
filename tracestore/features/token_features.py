"""Features of the answer's tokens: log-probabilities, entropy and length."""

import numpy as np

from tracestore.data.tokens.answers import answer_span
from tracestore.store.read.trace import Trace

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
