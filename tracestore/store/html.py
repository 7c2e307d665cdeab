"""Stores and traces as HTML, for reports and notebooks."""

import math
import shlex
from typing import Any

import numpy as np

from tracestore.errors import UsageError, escape_unprintable
from tracestore.pages.elements import Html, element, join, number, paragraph, table, tokens
from tracestore.pages.notebook import fragment
from tracestore.store.format.labels import DEFAULT_THRESHOLD
from tracestore.words import plural

_MAX_TEXT, _MAX_CELL, _MAX_TOKENS, _MAX_ROWS = 1_000, 120, 400, 5


def trace_facts(trace: Any) -> Html:
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


def view_command(store: Any, index: int) -> str:
    """Return the command that shows a trace: by id, because a number may be the id of another trace."""
    trace, (path, position) = store[index], store.internals.origin(index)
    is_plain = trace.question_id.isprintable() and not trace.question_id.startswith("-")
    name = (
        [trace.question_id, *(["--sample", str(trace.sample)] if trace.sample else [])] if is_plain else [str(position)]
    )
    return shlex.join(["tracestore", "view", path, *name])


def serve_command(store: object, results: object, score: str | None, score_threshold: float | None) -> str:
    """Return the command that shows results by the labels that they were made with; `score` None: the store's default."""
    words = ["tracestore", "serve", str(store), "--results", str(results)]
    words += [] if score is None else ["--score", score]
    words += [] if score_threshold in (None, DEFAULT_THRESHOLD) else ["--score-threshold", f"{score_threshold!r}"]
    return shlex.join(words)


def trace_texts(trace: Any) -> Html:
    """Return question, answer, and the tokens colored by their log-probability or the attention they get."""
    texts = [
        element("p", element("strong", name, ":"), Html(" "), escape_unprintable(text, _MAX_TEXT))
        for name, text in (("Question", trace.question), ("Answer", trace.answer))
        if text
    ]
    return join([*texts, _tokens(trace)])


def _tokens(trace: Any) -> Html:
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


def _token_values(trace: Any) -> tuple[str, np.ndarray | None, float]:
    """Return the name of a value per token, the values (n,) float32, and the end of their color scale."""
    values = trace.optional("token_logprob")
    if values is not None and np.isfinite(values).any():
        return "log-probability", values, float(np.nanmin(np.where(np.isfinite(values), values, np.nan)))
    if trace.attention_layout is None or trace.num_tokens < 2:
        return "", None, 0.0
    store = trace._store
    layer = store.num_layers // 2
    weights = np.asarray(trace.attention_layer(layer), "<f4")
    weights = (weights if weights.ndim == 2 else weights.mean(axis=0))[-1]
    # The first token often gets nearly all attention.
    others = weights[1:][np.isfinite(weights[1:])]
    return f"attention of the last token, layer {layer}", weights, float(others.max(initial=0)) or 1.0


def trace_html(trace: Any) -> str:
    """Return a trace for a notebook."""
    shapes = {"hidden states": None, "attention": trace.attention_layout}
    if trace.num_tokens:
        shapes["hidden states"] = " x ".join(map(str, trace.hidden_states_bits.shape))
    return fragment(f"Trace {trace.index}", trace_facts(trace), trace_texts(trace), values=shapes)


def collection_html(collection: Any) -> str:
    """Return the values of a collection and its first traces for a notebook."""
    try:
        targets = collection.targets()
    except UsageError:  # no score threshold fits by default
        targets = np.full(len(collection), np.nan)
    rows = [
        [
            trace.index,
            trace.question_id[:_MAX_CELL],
            escape_unprintable(trace.question or "", _MAX_CELL),
            escape_unprintable(trace.answer or "", _MAX_CELL),
            trace.num_tokens,
            number(trace.score),
            {1.0: "hallucinated", 0.0: "correct"}.get(targets[k], ""),
        ]
        for k, trace in enumerate(collection[k] for k in range(min(_MAX_ROWS, len(collection))))
    ]
    header = ["trace", "question id", "question", "answer", "tokens", "score", "class"]
    attributes = collection.internals.attributes
    values = {
        "traces": len(collection),
        "hallucinated": int((targets == 1).sum()),
        "correct": int((targets == 0).sum()),
        "layers": collection.num_layers,
        "hidden size": collection.hidden_dim,
        "attention": attributes.attention,
        "dtype": attributes.hidden_dtype,
        "models": ", ".join(sorted({p.model for p in attributes.provenance if p.model})) or None,
    }
    first = table(header, rows, caption=f"First {plural(len(rows), 'trace')}", is_sortable=False) if rows else ""
    return fragment(f"{type(collection).__name__} {collection.path}", first, values=values)
