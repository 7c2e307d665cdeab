"""HTML elements of all pages. Every text is escaped, unless it is `Html`.

A value with a method `__html__` is inserted unchanged; every other value becomes text, with unprintable
characters (control characters, changes of the writing direction, lone surrogates) made visible. Ids,
questions, names and paths from files therefore need no care by the caller. A `Table` is also shown as text.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tracestore.errors import escape_unprintable

# Number of classes of the color scale of tokens, v0 to v9 in style.css.
_LEVELS = 10


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()

    def __html__(self) -> str:
        """Return the HTML."""
        return str(self)


@dataclass(frozen=True)
class TableCell:
    """A table cell with a formatted text and the number that it is sorted by.

    Parameters
    ----------
    text : object
        What is shown.
    value : float, optional
        What the column is sorted by. Default: the text.
    """

    text: object
    value: float | None = None


def escape(value: object) -> Html:
    """Return a value as HTML: unchanged if it has a method `__html__`, escaped otherwise; None is empty."""
    render = getattr(value, "__html__", None)
    if render is not None:
        return Html(render())
    text = "" if value is None else str(value)
    # Spaces at the ends separate the text from its neighbors.
    begin, end = " " * text.startswith(" "), " " * (text.endswith(" ") and not text.isspace())
    return Html(begin + html.escape(escape_unprintable(text)) + end)


def preformatted(text: str, max_length: int = 100_000) -> Html:
    """Return the beginning of a text with its spaces and line breaks; `escape` would make one line of it."""
    characters = (" " if c.isspace() and c != "\n" else c for c in text[:max_length])
    return Html(html.escape("".join(c if c == "\n" or c.isprintable() else escape_unprintable(c) for c in characters)))


def element(tag: str, *content: object, **attributes: object) -> Html:
    """Return an element.

    Parameters
    ----------
    tag : str
        Name of the tag.
    *content : object
        Children, escaped unless they are Html.
    **attributes : object
        `class_` and `for_` lose their underscore, other underscores become hyphens. None and False omit an
        attribute, True writes its name only.
    """
    named = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        named.append(f" {name}" if value is True else f' {name}="{escape(value)}"')
    opening = f"<{tag}{''.join(named)}>"
    if tag in ("input", "link", "meta", "br", "hr", "img"):
        return Html(opening)
    return Html(f"{opening}{''.join(map(escape, content))}</{tag}>")


def join(parts: Iterable[object], separator: object = "") -> Html:
    """Return parts as one HTML text."""
    return Html(escape(separator).join(map(escape, parts)))


def paragraph(*content: object, kind: str | None = None) -> Html:
    """Return a paragraph; kind "note" is small and muted, "verdict" is large, "warning" has a mark."""
    return element("p", *content, class_=kind)


def number(value: float | None, digits: int = 3, *, sign: bool = False) -> TableCell:
    """Return the cell of a number: rounded to `digits` decimals, sorted by its full value, a dash for None or NaN."""
    if value is None or math.isnan(value):
        return TableCell("–")
    return TableCell(f"{value:{'+' if sign else ''},.{digits}f}", value)


def table(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    is_sortable: bool = True,
    order: tuple[int, str] | None = None,
) -> Html:
    """Return a table. The first cell of a row is its heading.

    `page.js` makes the headers buttons that sort (with aria-sort), and adds a field that filters the rows of
    a table with more than ten. Numbers are aligned to the right.

    Parameters
    ----------
    header : sequence
        Names of the columns.
    rows : iterable of sequences
        int, float and TableCell with a value are sorted as numbers, everything else as text.
    caption : str
        What the table contains. It is shown, and it is the name of the table for screen readers.
    is_sortable : bool
        False for tables whose order has a meaning.
    order : (int, "ascending" or "descending"), optional
        The column that the rows are sorted by, for its aria-sort.
    """
    body = [[c if isinstance(c, TableCell) else TableCell(c, _sort_value(c)) for c in row] for row in rows]
    numeric = [any(row[k].value is not None for row in body) for k in range(len(header))]
    cells = []
    for row in body:
        line = []
        for k, cell in enumerate(row):
            options: dict[str, Any] = {"data-v": None if cell.value is None else f"{cell.value:.9g}"}
            options["class"] = "n" if numeric[k] else None
            text = f"{cell.text:,}" if isinstance(cell.text, int) and not isinstance(cell.text, bool) else cell.text
            line.append(element("th", text, scope="row", **options) if k == 0 else element("td", text, **options))
        cells.append(element("tr", *line))
    sorts = [order[1] if order is not None and k == order[0] else None for k in range(len(header))]
    head = [
        element("th", h, scope="col", class_="n" if n else None, aria_sort=sort)
        for h, n, sort in zip(header, numeric, sorts, strict=True)
    ]
    inner = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", Html("\n".join(cells))),
        data_sort=is_sortable,
    )
    return element("div", inner, class_="table", role="group", tabindex="0", aria_label=caption)


def _sort_value(content: object) -> float | None:
    if isinstance(content, bool) or not isinstance(content, int | float) or not math.isfinite(content):
        return None
    return float(content)


def facts(values: Mapping[str, object] | Iterable[tuple[str, object]]) -> Html:
    """Return a list of names and values; pairs whose value is None are omitted."""
    pairs = values.items() if isinstance(values, Mapping) else values
    shown = ((name, f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else v) for name, v in pairs)
    items = [element("div", element("dt", name), element("dd", v)) for name, v in shown if v is not None]
    return element("dl", *items, class_="facts")


def card(title: object, *content: object, badge: object = None, kind: str | None = None) -> Html:
    """Return a card: a heading of level 3, a badge next to it ("correct" and "hallucinated" are kinds), content."""
    mark = element("span", badge, class_=f"badge {kind or ''}".strip()) if badge is not None else ""
    return element("article", element("h3", title, " ", mark), *content, class_="card")


def cards(items: Iterable[Html]) -> Html:
    """Return cards next to each other, as many as fit."""
    return element("div", *items, class_="cards")


def command(text: str) -> Html:
    """Return a command line that one click selects."""
    return element("pre", element("code", text), class_="command")


def details(summary: object, *content: object, is_open: bool = False) -> Html:
    """Return content that is hidden until its summary is opened."""
    return element("details", element("summary", summary), *content, open=is_open)


def tokens(
    texts: Sequence[str],
    values: Sequence[float] | None = None,
    *,
    label: str = "value",
    low: float | None = None,
    high: float | None = None,
    chosen: int | None = None,
) -> Html:
    """Return tokens as text, colored by a value.

    Parameters
    ----------
    texts : sequence of str
        Texts of the tokens; spaces and line breaks in them are kept.
    values : sequence of float, optional
        One value per token. NaN leaves a token without a color.
    label : str
        Name of the value, for the tooltip and the scale under the tokens.
    low, high : float, optional
        Ends of the color scale: `low` has no color, `high` the strongest. low may be larger than high, which
        colors small values (log-probabilities). Default: the smallest and largest finite value.
    chosen : int, optional
        Position of a token with a frame.
    """
    numbers = [math.nan] * len(texts) if values is None else values
    finite = [v for v in numbers if math.isfinite(v)] or [0.0]
    low, high = min(finite) if low is None else low, max(finite) if high is None else high
    spans = []
    for k, (text, value) in enumerate(zip(texts, numbers, strict=True)):
        color = {}
        if math.isfinite(value):
            share = (value - low) / (high - low) if high != low else 0.0
            level = min(_LEVELS - 1, max(0, int(share * _LEVELS)))
            color = {"class_": f"v{level}", "title": f"{label} {value:.4g}"}
        spans.append(element("span", preformatted(text), **color, data_chosen=k == chosen))
    shown = element("p", *spans, class_="tokens")
    if values is None:
        return shown
    scale = [element("span", Html("&nbsp;"), class_=f"v{k}") for k in range(_LEVELS)]
    legend = element("span", *scale, class_="scale", aria_hidden="true")
    return join([shown, element("p", f"{label} {low:.3g} ", legend, f" {high:.3g}", class_="note")])


_ASCII = str.maketrans({"–": "-", "→": "->"})


class Table(NamedTuple):
    """A table whose cells are those of `elements.table`. It is HTML in a page.

    Parameters
    ----------
    caption : str
        What the table contains; the text lacks it.
    header : sequence of str
        Names of the columns.
    rows : sequence of sequences
        Texts, numbers and cells.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __html__(self) -> Html:
        """Return the table as HTML."""
        return table(self.header, self.rows, caption=self.caption)

    def text(self) -> str:
        """Return the table as lines: names to the left, other columns to the right."""
        lines = [[_text(cell) for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([f"{line[0]:{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        )


def _text(cell: object) -> str:
    content = cell.text if isinstance(cell, TableCell) else cell
    text = "" if content is None else f"{content:,}" if isinstance(content, int) else str(content)
    return text.translate(_ASCII)
