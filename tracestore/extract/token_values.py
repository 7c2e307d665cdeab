"""Log-probability, entropy and most likely tokens at each generated token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# Tokens whose distributions are computed at once: 64 of a vocabulary of 150,000 take 38 MB in float32.
_CHUNK_TOKENS = 64


def token_values(
    logits: torch.Tensor, first: int, tokens: Sequence[int], runs: Sequence[tuple[int, int]], top_k: int = 0
) -> dict[str, Any]:
    """Return the optional fields of a trace that describe the distribution of each generated token.

    Parameters
    ----------
    logits : Tensor
        Logits (P, V). Row i is the distribution of the token at position first + i + 1.
    first : int
        Position of the first row.
    tokens : sequence of int
        Token ids (T,).
    runs : sequence of (int, int)
        First generated token, and the token after the last one, for each answer. No run begins before first + 1.
    top_k : int
        Number of most likely tokens.

    Returns
    -------
    dict
        `token_logprob` and `token_entropy` (in nats), float32 (T,), NaN where the token was not generated; with
        `top_k`, `top_ids` int32 and `top_logprobs` float32 (T, K), the most likely first, -1 and NaN there.
    """
    count, top_k = len(tokens), min(top_k, logits.shape[-1])
    logprob, entropy = np.full(count, np.nan, "f4"), np.full(count, np.nan, "f4")
    top_ids, top_logprobs = np.full((count, top_k), -1, "i4"), np.full((count, top_k), np.nan, "f4")
    for begin, end in _chunks(runs):
        log_p = logits[begin - 1 - first : end - 1 - first].float().log_softmax(-1)
        drawn = torch.tensor(tokens[begin:end], device=logits.device)
        logprob[begin:end] = log_p.gather(-1, drawn[:, None])[:, 0].cpu().numpy()
        entropy[begin:end] = torch.special.entr(log_p.exp()).sum(-1).cpu().numpy()
        if top_k:
            values, ids = log_p.topk(top_k)
            top_ids[begin:end], top_logprobs[begin:end] = ids.cpu().numpy(), values.cpu().numpy()
    fields: dict[str, Any] = {"token_logprob": logprob, "token_entropy": entropy}
    return fields | ({"top_ids": top_ids, "top_logprobs": top_logprobs} if top_k else {})


def _chunks(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the runs in parts of at most _CHUNK_TOKENS."""
    return [(part, min(part + _CHUNK_TOKENS, end)) for begin, end in runs for part in range(begin, end, _CHUNK_TOKENS)]
