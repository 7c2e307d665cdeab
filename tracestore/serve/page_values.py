"""Values of a trace for its page: per token, per layer and head, and by the logit lens."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tracestore.errors import UsageError, escape_unprintable
from tracestore.serve.forms import number_of
from tracestore.store.format import schema
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace
from tracestore.trace_view import View

FROM_TOKEN, TO_TOKEN, NORM = "attention from the chosen token", "attention to the chosen token", "norm of hidden states"
MEAN = "mean"
# Most likely tokens of each layer that the logit lens lists.
_LENS_TOKENS = 3


@dataclass(frozen=True)
class Choice:
    """Hold what a visitor wants to see of a trace, as the address of its page contains it.

    Parameters
    ----------
    value : str
        Name of the value that colors the tokens; "": the first that the trace has.
    layer : int
        Layer of attention, norms and logit lens.
    head : int or None
        Head of the attention; None: the mean of the heads.
    token : int
        Token that attends, or is attended to, and whose next token the logit lens predicts.
    """

    value: str
    layer: int
    head: int | None
    token: int

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, str], store: TraceStore, trace: Trace) -> "Choice":
        """Return the choice in the arguments of an address; UsageError names an argument that is not valid."""
        count = max(1, num_tokens(trace))
        layer = number_of(arguments, "layer", max(1, store.num_layers), store.num_layers // 2)
        heads = store.num_stored_heads if store.attention_mode == "heads" else 0
        is_mean = arguments.get("head", MEAN).strip() in ("", MEAN)
        head = None if is_mean else number_of(arguments, "head", heads, 0)
        # The last token attends to all others.
        return cls(arguments.get("value", ""), layer, head, number_of(arguments, "token", count, count - 1))

    def pairs(self, **changes: int | str | None) -> list[tuple[str, str]]:
        """Return names and values of the arguments of an address; `changes` replaces some."""
        values = {"value": self.value, "layer": self.layer, "head": self.head, "token": self.token} | changes
        return [(name, str(value)) for name, value in values.items() if value not in ("", None)]


def num_tokens(trace: Trace) -> int:
    """Return the number of tokens that are shown: of the ids if there are any, else of the hidden states."""
    tokens = trace.tokens
    return max(trace.num_tokens, 0 if tokens is None else len(tokens))


def token_texts(trace: Trace) -> list[str]:
    """Return the text of each token, else its id or its position."""
    count, texts, ids = num_tokens(trace), trace.tokens_decoded, trace.tokens
    found = texts or ([] if ids is None else [f" {k}" for k in ids.tolist()])
    return [*found, *(f" {k}" for k in range(len(found), count))][:count]


def token_values(trace: Trace, view: View, choice: Choice) -> dict[str, np.ndarray]:
    """Return the values per token (T,) that a trace has, by name; NaN where unknown."""
    count, values = num_tokens(trace), {}
    for name, field in schema.PER_TOKEN_FIELDS.items():
        found = trace.optional(name)
        if found is not None:
            values[field.title or name] = field.shown(found)
    attention = view.attention
    if attention is not None and choice.token < len(attention):
        values[FROM_TOKEN], values[TO_TOKEN] = attention[choice.token], attention[:, choice.token]
    if view.norms is not None:
        values[NORM] = view.norms[choice.layer]
    return {name: _padded(found, count) for name, found in values.items()}


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    """Return the first values, and NaN for tokens without one."""
    out = np.full(count, np.nan)
    out[: len(values)] = values[:count]
    return out


def strongest_pairs(attention: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the attending and attended tokens (n,) of the largest values of attention (S, S), largest first."""
    flat = np.where(np.isfinite(attention), attention, 0).reshape(-1)
    chosen = np.argpartition(-flat, min(count, len(flat)) - 1)[:count]
    chosen = chosen[np.argsort(-flat[chosen], kind="stable")]
    attending, attended = np.divmod(chosen[flat[chosen] > 0], attention.shape[1])
    return attending, attended


@dataclass(frozen=True)
class LensRow:
    """Hold the predictions of one layer: (id, probability) of its most likely tokens, and probability and rank of the next token."""

    layer: int
    likely: list[tuple[int, float]]
    probability: float | None
    rank: int | None


def lens_rows(store: TraceStore, trace: Trace, token: int) -> list[LensRow]:
    """Return the predictions of each layer for the token after `token`; none without an unembedding matrix."""
    lens, ids = store.lens, trace.tokens
    if lens is None or token >= trace.num_tokens:
        return []
    states = store.private_trace(trace.index).hidden_states[:, token]
    is_normalized = trace.provenance is not None and bool(trace.provenance.final_norm)
    logits = lens.logits(states)
    if is_normalized:
        logits[-1] = lens.logits(states[-1], normalized=True)
    following = int(ids[token + 1]) if ids is not None and token + 1 < len(ids) else None
    if following is not None and not 0 <= following < lens.num_tokens:
        following = None
    rows = []
    for layer, row in enumerate(logits):
        if not np.isfinite(row).all():
            rows.append(LensRow(layer, [], None, None))
            continue
        shares = np.exp(row - row.max())
        shares /= shares.sum()
        best = np.argsort(-row, kind="stable")[:_LENS_TOKENS]
        probability = None if following is None else float(shares[following])
        rank = None if following is None else 1 + int((row > row[following]).sum())
        rows.append(LensRow(layer, [(int(k), float(shares[k])) for k in best], probability, rank))
    return rows


def chosen_value(values: Mapping[str, np.ndarray], name: str) -> str:
    """Return the name of the value that colors the tokens. UsageError if the trace has no value of the name."""
    if name and name not in values:
        raise UsageError(f"value: found {escape_unprintable(name, 60)}, expected one of {', '.join(values)}")
    return name or next(iter(values), "")


def span_parts(answer: str, spans: list[dict[str, object]]) -> list[tuple[str, str]]:
    """Return the pieces of an answer and the type of the span that covers each, "" for none."""
    names = [""] * len(answer)
    for span in spans:
        begin, end = span.get("start"), span.get("end")
        if isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end <= len(answer):
            names[begin:end] = [str(span.get("type") or "span")] * (end - begin)
    edges = [k for k in range(len(answer)) if k == 0 or names[k] != names[k - 1]]
    return [(answer[a:b], names[a]) for a, b in zip(edges, [*edges[1:], len(answer)], strict=False)]
