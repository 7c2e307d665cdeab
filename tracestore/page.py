"""Self-contained HTML pages: one file, no network, no scripts.

Every value is escaped, because ids, groups and paths come from untrusted files.
"""

import base64
import html
from collections.abc import Iterable, Sequence

from tracestore.errors import escape_unprintable

_STYLE = (
    "body{font-family:sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-size:.9rem}"
    "td,th{padding:.3rem .7rem;border-bottom:1px solid #ccc;text-align:left;vertical-align:top}img{max-width:100%}"
)


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with escaped cells."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(escape_unprintable(str(c)))}</td>" for c in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def inline_image(png: bytes, name: str) -> str:
    """Return an image element that contains the bytes of a PNG file."""
    data = base64.b64encode(png).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def page(title: str, parts: Iterable[str]) -> str:
    """Return the HTML document with a title and parts that are HTML already."""
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>tracestore: {html.escape(title.lower())}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>{''.join(parts)}</html>\n"
    )
