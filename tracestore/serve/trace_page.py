"""The page of one trace: texts, tokens colored by a value, attention by layer and head, norms, logit lens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracestore.errors import TracestoreError, UsageError, escape_unprintable
from tracestore.pages.document import Section
from tracestore.pages.elements import (
    Html,
    command,
    details,
    element,
    facts,
    join,
    number,
    paragraph,
    preformatted,
    table,
    tokens,
)
from tracestore.pages.plots import MAX_SIDE, heat_map
from tracestore.serve.forms import (
    address,
    alert,
    form,
    hidden_fields,
    number_field,
    number_of,
    part,
    select,
    short_text,
)
from tracestore.serve.pictures import PICTURE_SIDE
from tracestore.serve.search import Query, TraceSearch, label_name
from tracestore.store.format import schema
from tracestore.store.html import view_command
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace
from tracestore.trace_view import View, downsample

# Maximum number of tokens that are shown, and of pairs of tokens in the table.
_MAX_TOKENS = 4_000
_MAX_PAIRS = 50
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


def trace_sections(search: TraceSearch, index: int, arguments: Mapping[str, str]) -> list[Section]:
    """Return the sections of the page of a trace. An error of its arrays is a line on the page."""
    store, query = search.store, Query.from_arguments(arguments)
    trace = store[index]
    sections = [
        Section("Question and answer", join([_around(search, query, index), _texts(trace), _about(search, trace)]))
    ]
    try:
        choice = Choice.from_arguments(arguments, store, trace)
        view = View.read(store, trace, choice.layer, choice.head) if store.num_layers else None
        controls, content = _views(store, trace, view, choice, query)
    except TracestoreError as error:
        controls, content = Html(""), alert(str(error))
    return [*sections, Section("Tokens and layers", join([controls, part("view", content)]))]


def _around(search: TraceSearch, query: Query, index: int) -> Html:
    """Return links to the list and to the traces before and after this one in it."""
    arguments = query.arguments()
    links = [element("a", "All traces found", href=address("/store", arguments))]
    try:
        found = search.find(query)
    except TracestoreError:
        found = np.zeros(0, np.int64)
    here = np.flatnonzero(found == index)
    for name, step, relation in (("Previous trace", -1, "prev"), ("Next trace", 1, "next")):
        if len(here) and 0 <= here[0] + step < len(found):
            link = address(f"/trace/{found[here[0] + step]}", arguments)
            links.append(element("a", name, href=link, rel=relation))
    return element("nav", *links, aria_label="Traces found", class_="numbers")


def _texts(trace: Trace) -> Html:
    answer = trace.answer or ""
    pieces = [
        element("mark", preformatted(text), title=kind) if kind else preformatted(text)
        for text, kind in span_parts(answer, trace.optional("spans") or [])
    ]
    pairs = [("Question", preformatted(trace.question or "")), ("Answer", join(pieces))]
    others = {name: value for name, value in trace.extras.items() if not isinstance(value, str)}
    pairs += [(name, preformatted(value)) for name, value in trace.extras.items() if name not in others]
    terms = [element("dt", name) + element("dd", text, class_=name.lower() if k < 2 else None)
             for k, (name, text) in enumerate(pairs)]  # fmt: skip
    shown = [element("dl", *map(Html, terms), class_="texts")]
    if others:
        shown.append(details("Other fields of the source", facts({k: str(v) for k, v in others.items()})))
    return join(shown)


def _about(search: TraceSearch, trace: Trace) -> Html:
    source, position = trace.source
    target = search.targets[trace.index]
    values: dict[str, Any] = {
        "sample": trace.sample,
        "label": label_name(target) or "unlabeled",
        **{name if "score" in name else f"score {name}": f"{value:g}" for name, value in trace.scores.items()},
        "group": trace.group or None,
        "tokens": f"{trace.num_tokens}" if trace.num_tokens else "last token only",
        "tokens of the prompt": trace.prompt_length,
        "temperature": trace.optional("temperature"),
        "seed": trace.optional("seed"),
        "model": trace.provenance.model if trace.provenance is not None else None,
        "source": short_text(f"{source}, trace {position}"),
        "note": "its arrays hold NaN or infinite values" if trace.has_nonfinite else None,
    }
    rows = []
    for name, probabilities in search.results.probabilities.items():
        probability, threshold = float(probabilities[trace.index]), search.results.threshold(name)
        if probability == probability:
            predicted = label_name(float(search.results.predicts(name)[trace.index]))
            verdict = "" if target != target else "right" if predicted == label_name(target) else "wrong"
            rows.append([name, number(probability), number(threshold), predicted, verdict])
    header = [
        "detector",
        "probability or rank" if search.results.ranked else "probability",
        "threshold",
        "predicts",
        "verdict",
    ]
    found = [table(header, rows, caption="Detectors")] if rows else []
    return join(
        [element("div", facts(values), class_="about"), *found, command(view_command(search.store, trace.index))]
    )


def _views(store: TraceStore, trace: Trace, view: View | None, choice: Choice, query: Query) -> tuple[Html, Html]:
    """Return the controls, and the parts of the page that follow them."""
    values = token_values(trace, view, choice) if view is not None else {}
    name, texts = chosen_value(values, choice.value), token_texts(trace)
    heads = range(store.num_stored_heads if store.attention_mode == "heads" and trace.attention_layout else 0)
    controls = [
        *hidden_fields(query.pairs()),
        *([select("Color of the tokens", "value", list(values), name, next(iter(values)))] if values else []),
        number_field("Layer", "layer", choice.layer, min=0, max=max(0, store.num_layers - 1)),
    ]
    if heads:
        options = [(MEAN, "mean over the heads"), *((str(k), str(k)) for k in heads)]
        controls.append(select("Head", "head", options, MEAN if choice.head is None else str(choice.head), MEAN))
    controls.append(number_field("Chosen token", "token", choice.token, min=0, max=max(0, len(texts) - 1)))
    content = [alert(""), *_tokens(texts, values, name, choice)]
    if view is not None and view.attention is not None:
        content += _attention(view, texts, choice, query, list(heads), store.num_layers)
    if view is not None and view.norms is not None:
        content += [_map(np.log1p(view.norms), "Norms of the hidden states",
                    ("token", "layer", "log (1 + norm)"), (texts, None))]  # fmt: skip
    content += _lens(store, trace, texts, choice)
    return form(f"/trace/{trace.index}", "Values of the trace", *controls), join(content)


def _tokens(texts: list[str], values: dict[str, np.ndarray], name: str, choice: Choice) -> list[Html]:
    if not texts:
        return [paragraph("Only the last token of this trace is stored.")]
    shown = texts[:_MAX_TOKENS]
    title = f"Tokens by {name}" if name else "Tokens"
    found = values[name][: len(shown)] if name else None
    low = high = None
    if found is not None and name == schema.TOKEN_FIELDS["token_logprob"].title and np.isfinite(found).any():
        # Unlikely tokens have the strongest color.
        known = found[np.isfinite(found)]
        low, high = float(known.max()), float(known.min())
    numbers = None if found is None else found.tolist()
    colored = tokens(shown, numbers, label=name, low=low, high=high, chosen=choice.token)
    cut = f" The first {len(shown):,} of {len(texts):,} tokens are shown." if len(shown) < len(texts) else ""
    note = paragraph(f"Chosen: token {choice.token}. A click on a token chooses it.{cut}", kind="note")
    rows = [
        [k, short_text(text), *(number(float(found[k])) for found in values.values())] for k, text in enumerate(shown)
    ]
    listed = table(["token", "text", *values], rows, caption="Values of the tokens")
    return [element("h3", title), colored, note, element("div", details("Values as a table", listed))]


def _attention(
    view: View, texts: list[str], choice: Choice, query: Query, heads: list[int], num_layers: int
) -> list[Html]:
    attention = view.attention
    assert attention is not None
    axes = ("attended token", "attending token", "square root of attention")
    drawn = _map(np.sqrt(np.maximum(attention, 0)), f"Attention, {view.title}", axes, (texts, texts))
    attending, attended = strongest_pairs(attention, _MAX_PAIRS)
    rows = [
        [f"{i}: {texts[i]}", f"{j}: {texts[j]}", number(float(attention[i, j]), 4)]
        for i, j in zip(attending.tolist(), attended.tolist(), strict=True)
    ]
    pairs = table(["attending token", "attended token", "attention"], rows, caption="Strongest pairs")
    content = [drawn, details("Strongest pairs as a table", pairs)]
    if heads:
        cells = [(f"head {k}", {"head": k}, choice.head == k) for k in heads]
        content += [element("h3", f"Heads of layer {choice.layer}"), _grid(view.trace, cells, choice, query)]
    title = "mean over the heads" if choice.head is None else f"head {choice.head}"
    cells = [(f"layer {k}", {"layer": k}, choice.layer == k) for k in range(num_layers)]
    return [*content, element("h3", f"Layers, {title}"), _grid(view.trace, cells, choice, query)]


def _grid(trace: Trace, cells: list[tuple[str, dict[str, int], bool]], choice: Choice, query: Query) -> Html:
    """Return small pictures of the attention, each a link that chooses its layer or head."""
    items = []
    for name, change, is_chosen in cells:
        pairs = dict(choice.pairs(**change))
        source = address(f"/picture/{trace.index}", "", **{k: pairs.get(k) for k in ("layer", "head")})
        picture = element("img", src=source, alt="", width=PICTURE_SIDE, height=PICTURE_SIDE, loading="lazy")
        link = address(f"/trace/{trace.index}", query.arguments(), **pairs)
        items.append(element("li", element("a", picture, name, href=link, aria_current="true" if is_chosen else None)))
    return element("ul", *items, class_="grid")


def _map(
    values: np.ndarray, title: str, axes: tuple[str, str, str], names: tuple[list[str] | None, list[str] | None]
) -> Html:
    """Return a heat map of at most MAX_SIDE rows and columns, each the maximum of a block if there are more.

    `axes` are the meanings of columns, rows and values, `names` those of single columns and rows.
    """
    shown = downsample(downsample(np.where(np.isfinite(values), values, np.nan), MAX_SIDE, 0), MAX_SIDE, 1)
    note = "" if shown.shape == values.shape else "Each cell is the maximum of neighboring tokens."
    kept = [own[:size] if own and size == full else None
            for own, size, full in zip(names, shown.shape[::-1], values.shape[::-1], strict=True)]  # fmt: skip
    across, down, meaning = axes
    return heat_map(title, shown, x_label=across, y_label=down, value_label=meaning, x_names=kept[0], y_names=kept[1],
                    height=420, note=note)  # fmt: skip


def _lens(store: TraceStore, trace: Trace, texts: list[str], choice: Choice) -> list[Html]:
    ids = trace.tokens
    known = {} if ids is None else dict(zip(ids.tolist(), texts, strict=False))
    rows: list[list[object]] = []
    for row in lens_rows(store, trace, choice.token):
        likely = ", ".join(f"{known.get(k, f'id {k}')!r} {share:.3f}" for k, share in row.likely)
        rows.append([row.layer, likely or "not finite", number(row.probability, 4), row.rank])
    if not rows:
        return []
    following = f" The next token is {texts[choice.token + 1]!r}." if choice.token + 1 < len(texts) else ""
    header = ["layer", "most likely next tokens", "probability of the next token", "its rank"]
    note = f"At token {choice.token}, {texts[choice.token]!r}.{following} Ids stand for tokens that this trace lacks."
    listed = table(header, rows, caption="Predictions of each layer", is_sortable=False)
    return [element("h3", "Logit lens"), paragraph(note, kind="note"), listed]


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
