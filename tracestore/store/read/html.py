"""Traces as HTML, for reports and notebooks."""

import math
from typing import TYPE_CHECKING

import numpy as np

from tracestore.console import plural
from tracestore.errors import escape_unprintable
from tracestore.pages.elements import Html, element, join, paragraph, tokens
from tracestore.store.format import schema

if TYPE_CHECKING:
    from tracestore.store.read.trace import Trace

_MAX_TEXT, _MAX_TOKENS = 1_000, 400


def trace_facts(trace: "Trace") -> Html:
    """Return the numbers and names of a trace in one line."""
    source, position = trace.source
    parts = [escape_unprintable(trace.question_id, 100)]
    parts += [f"sample {trace.sample}"] if trace.sample else []
    parts.append(plural(trace.num_tokens, "token") if trace.num_tokens else "last token only")
    parts += [f"{plural(trace.prompt_length, 'token')} of the prompt"] if trace.prompt_length is not None else []
    parts += [f"{name} {value:.4g}" for name, value in trace.scores.items()]
    parts += [] if math.isnan(trace.label) else [f"label {trace.label:g}"]
    parts += [f"group {escape_unprintable(trace.group, 100)}"] if trace.group else []
    parts.append(f"from {escape_unprintable(source, 200)}, trace {position}")
    return paragraph(", ".join(parts), kind="note")


def trace_texts(trace: "Trace") -> Html:
    """Return question, answer, and the tokens colored by their log-probability or the attention they get."""
    texts = [
        element("p", element("strong", name, ":"), Html(" "), escape_unprintable(text, _MAX_TEXT))
        for name, text in (("Question", trace.question), ("Answer", trace.answer))
        if text
    ]
    return join([*texts, _tokens(trace)])


def _tokens(trace: "Trace") -> Html:
    words = trace.tokens_decoded
    if words is None:
        return Html("")
    shown = words[:_MAX_TOKENS] + (["…"] if len(words) > _MAX_TOKENS else [])
    label, values, high = _token_values(trace)
    if values is None:
        return tokens(shown)
    known = np.full(len(shown), np.nan)
    count = min(len(values), len(words), _MAX_TOKENS)
    known[:count] = values[:count]
    return tokens(shown, known.tolist(), label=label, low=0.0, high=high)


def _token_values(trace: "Trace") -> tuple[str, np.ndarray | None, float]:
    """Return the name of a value per token, the values (n,) float32, and the end of their color scale."""
    values = trace.optional("token_logprob")
    if values is not None and np.isfinite(values).any():
        return "log-probability", values, float(np.nanmin(np.where(np.isfinite(values), values, np.nan)))
    if trace.attention_layout is None or trace.num_tokens < 2:
        return "", None, 0.0
    store = trace._store
    layer, dtype = store.num_layers // 2, store.attributes.attention_dtype or "float16"
    weights = schema.as_float32(trace.attention_layer(layer), dtype)
    weights = (weights if weights.ndim == 2 else weights.mean(axis=0))[-1]
    # The first token often gets nearly all attention.
    others = weights[1:][np.isfinite(weights[1:])]
    return f"attention of the last token, layer {layer}", weights, float(others.max(initial=0)) or 1.0
