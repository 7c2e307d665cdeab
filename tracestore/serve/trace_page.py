"""The page of one trace: texts, tokens colored by a value, attention by layer and head, norms, logit lens."""

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracestore.errors import TracestoreError
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
from tracestore.serve.page_values import (
    MEAN,
    Choice,
    chosen_value,
    lens_rows,
    span_parts,
    strongest_pairs,
    token_texts,
    token_values,
)
from tracestore.serve.search import Query, TraceSearch, label_name
from tracestore.store.format import schema
from tracestore.store.html import view_command
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace
from tracestore.trace_view import View, downsample, read_attention

# Maximum number of tokens that are shown, and of pairs of tokens in the table.
_MAX_TOKENS = 4_000
_MAX_PAIRS = 50
# Rows and columns of the pictures of heads and layers.
_PICTURE_SIDE = 96
# Colors of the pictures, from low to high: those of the heat maps (cividis), of which the pages have 256.
_COLORS = ((0, 32, 76), (64, 77, 107), (124, 123, 120), (188, 174, 108), (255, 233, 69))


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
    listed = element("dl", *map(Html, terms), class_="texts")
    return (
        join([listed, details("Other fields of the source", facts({k: str(v) for k, v in others.items()}))])
        if others
        else listed
    )


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
        picture = element("img", src=source, alt="", width=_PICTURE_SIDE, height=_PICTURE_SIDE, loading="lazy")
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


def attention_picture(store: TraceStore, index: int, arguments: Mapping[str, str]) -> bytes:
    """Return a small PNG picture of the attention of a layer and head.

    UsageError if the store lacks the layer or head; KeyError for a trace without attention.
    """
    trace = store[index]
    layer = number_of(arguments, "layer", max(1, store.num_layers), store.num_layers // 2)
    head = number_of(arguments, "head", store.num_stored_heads, 0) if arguments.get("head") else None
    attention = read_attention(store, trace, layer, head)
    if attention is None:
        raise KeyError(index)
    values = np.sqrt(np.maximum(np.nan_to_num(attention, nan=0, posinf=0, neginf=0), 0))
    values = downsample(downsample(values, _PICTURE_SIDE, 0), _PICTURE_SIDE, 1)
    levels = (values / max(float(values.max()), 1e-30) * 255).astype("u1")
    steps = np.linspace(0, len(_COLORS) - 1, 256)
    palette = np.stack([np.interp(steps, range(len(_COLORS)), channel) for channel in zip(*_COLORS, strict=True)], 1)
    return png(levels, palette.astype("u1"))


def png(levels: np.ndarray, palette: np.ndarray) -> bytes:
    """Return a PNG picture of levels (rows, columns) uint8, whose colors are a palette (256, 3) uint8."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows, columns = levels.shape
    # 8 bits per pixel, with a palette; each row begins with the number of its filter, 0.
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    data = zlib.compress(np.pad(levels, ((0, 0), (1, 0))).tobytes(), 1)
    chunks = (b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", data), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, part) for kind, part in chunks)
