"""The list of traces: filters, one page of rows, links that sort, and numbers of pages."""

import numpy as np

from tracestore.errors import TracestoreError
from tracestore.pages.document import Section
from tracestore.pages.elements import Html, element, join, number, paragraph, table
from tracestore.serve.forms import address, alert, form, number_field, part, select, short_text
from tracestore.serve.search import ANY, LABELS, SCORE, STORED, TOKENS, Query, TraceSearch, label_name
from tracestore.store.read.table import facts as facts_of
from tracestore.words import plural

PAGE_ROWS = 100
# Maximum number of groups in a list to choose from.
_MAX_GROUPS = 500


def store_facts(search: TraceSearch) -> list[tuple[str, object]]:
    """Return names and values of the header: what the store holds."""
    info = facts_of(search.store.internals)
    targets, scores = search.targets, search.store.scores
    known = scores[~np.isnan(scores)]
    mean = f", mean {known.mean():.3f}" if len(known) else ""
    return [
        ("store", info["path"]),
        ("traces", f"{info['num_traces']:,} with {info['num_tokens']:,} tokens"),
        ("labels", f"{int((targets >= 0.5).sum()):,} hallucinated, {int((targets < 0.5).sum()):,} correct"),
        ("score", f"{info['score']}: {plural(len(known), 'trace')}{mean}" if info["score"] else None),
        ("hidden states", f"{info['num_layers'] or 0} layers of {info['hidden_dim'] or 0}, {info['hidden_dtype']}"),
        ("attention", ", ".join(str(info[k]) for k in ("attention", "attention_layout", "attention_dtype") if info[k])),
        ("heads", info["num_heads"]),
        ("models", ", ".join(sorted({p["model"] for p in info["provenance"] if p.get("model")})) or None),
        ("size", f"{info['bytes'] / 1e6:,.1f} MB, generation {info['generation']}"),
    ]


def list_sections(search: TraceSearch, query: Query) -> list[Section]:
    """Return the sections of the page. An error of the search is a line on the page."""
    try:
        found, problem = search.find(query), ""
    except TracestoreError as error:
        found, problem = np.zeros(0, np.int64), str(error)
    count = max(1, -(-len(found) // PAGE_ROWS))
    page = min(query.page, count)
    begin = (page - 1) * PAGE_ROWS
    shown = found[begin : begin + PAGE_ROWS]
    message = f"{min(begin + 1, len(found)):,} to {begin + len(shown):,} of {len(found):,} found"
    links = element("a", "Project these traces", href=address("/projection", query.arguments()))
    content = part(
        "found",
        alert(problem),
        element("p", message, role="status", class_="message"),
        paragraph(links),
        element("div", _table(search, query, shown), class_="traces"),
        _pages(query, page, count),
    )
    return [Section("Search", join([_controls(search, query), content]))]


def _controls(search: TraceSearch, query: Query) -> Html:
    groups, detectors = search.groups, list(search.results.probabilities)
    words = element("input", type="search", name="words", value=query.words, autocomplete="off")
    controls = [
        element("label", "Words in id, question or answer", words),
        select("Label", "label", LABELS, query.label, ANY),
    ]
    if detectors:
        controls.append(select("Misclassified by", "missed", ["", *detectors], query.missed, ""))
    if len(groups) > _MAX_GROUPS:
        field = element("input", type="text", name="group", value=query.group)
        controls.append(element("label", "Group, its whole name", field))
    elif groups:
        controls.append(select("Group", "group", ["", *groups], query.group, ""))
    for title, name, low, high in (
        ("Score", "score", query.min_score, query.max_score),
        ("Tokens", "tokens", query.min_tokens, query.max_tokens),
    ):
        bounds = [
            number_field("from", f"min_{name}", low, step="any"),
            number_field("to", f"max_{name}", high, step="any"),
        ]
        controls.append(element("fieldset", element("legend", title), *bounds))
    box = element("input", type="checkbox", name="descending", value="1", checked=query.descending)
    controls.append(select("Order by", "order", search.orders, query.order, STORED))
    controls.append(element("label", box, "largest first", class_="check"))
    reset = element("a", "Reset", href="/store")
    return form("/store", "Filters", *controls, reset, role="search")


def _table(search: TraceSearch, query: Query, indices: np.ndarray) -> Html:
    names = list(search.results.probabilities)
    # Titles of the columns, and the orders of those that sort.
    columns = [("trace", STORED), ("question id", None), ("question", None), ("answer", None), ("tokens", TOKENS),
               ("score", SCORE), ("label", None), *([("group", None)] if search.groups else []), *((name, name) for name in names)]  # fmt: skip
    header = [title if order is None else _sort_link(query, title, order) for title, order in columns]
    direction = "descending" if query.descending else "ascending"
    # An address may name an order that there is not.
    sorted_by = next(((k, direction) for k, (_, order) in enumerate(columns) if order == query.order), None)
    rows, arguments = [], query.arguments()
    for index in indices.tolist():
        trace = search.store[index]
        row: list[object] = [element("a", index, href=address(f"/trace/{index}", arguments))]
        row += [short_text(text) for text in (trace.question_id, trace.question or "", trace.answer or "")]
        row += [trace.num_tokens, number(trace.score), label_name(search.targets[index])]
        row += [short_text(search.store.group(index))] if search.groups else []
        rows.append([*row, *(number(search.results.probabilities[name][index]) for name in names)])
    return table(header, rows, caption="Traces", is_sortable=False, order=sorted_by)


def _sort_link(query: Query, title: str, order: str) -> Html:
    """Return a link that sorts by a column; a second click reverses the order. Numbers begin with the largest."""
    is_order = query.order == order
    descending = not query.descending if is_order else order != STORED
    mark = element("span", "↓" if query.descending else "↑", aria_hidden="true")
    link = address("/store", query.arguments(order=order, descending=descending, page=1))
    return join([element("a", title, href=link), Html("&nbsp;"), mark if is_order else ""])


def _pages(query: Query, page: int, count: int) -> Html:
    """Return links to the first, the last and the neighboring pages."""
    numbers = sorted({1, *range(max(1, page - 2), min(count, page + 2) + 1), count})
    links: list[Html] = []
    for previous, k in zip([0, *numbers], numbers, strict=False):
        if k - previous > 1:
            links.append(element("span", "…", aria_hidden="true"))
        if k == page:
            links.append(element("a", f"{k:,}", aria_current="page", href=""))
        else:
            links.append(element("a", f"{k:,}", href=address("/store", query.arguments(page=k))))
    return element("nav", element("span", "Page"), *links, aria_label="Pages of the list", class_="numbers")
