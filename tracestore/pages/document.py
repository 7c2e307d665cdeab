"""The skeleton of a page: header, navigation, sections, styles, scripts and content security policy.

`document` makes one file that contains everything (a report), or a page of a server that loads `assets()`
from a folder of the same server (the viewer). Both have a strict policy: only the scripts of this package
run, and no request goes to another host.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tracestore.errors import MissingExtraError
from tracestore.extras import require_module
from tracestore.pages.elements import Html, element, join
from tracestore.pages.elements import facts as facts_list

# An element at the beginning of every page, by which commands recognize their own pages.
PAGE_MARK = '<meta name="generator" content="tracestore">'
_BASE = "base-uri 'none'; object-src 'none'; form-action"
# BokehJS writes style elements and has its icons as data: URLs.
_STYLES = "style-src 'unsafe-inline'{self}; img-src data:{self}"
SERVER_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; "
    + _STYLES.format(self=" 'self'")
    + f"; {_BASE} 'self'; frame-ancestors 'none'"
)
_FOLDER = Path(__file__).parent
_BOKEH = ("bokeh.min.js", "bokeh-api.min.js")


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading of level 2 and content.

    Parameters
    ----------
    title : str
        The heading, and the name in the navigation.
    content : Html
        What follows the heading; `elements.join` makes one of several.
    note : str
        One sentence under the heading: what is shown, and how it was computed.
    """

    title: str
    content: Html
    note: str = ""

    @property
    def anchor(self) -> str:
        """Id of the section, from its title."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


def document(
    title: str,
    *,
    facts: Mapping[str, object] | Iterable[tuple[str, object]] = (),
    sections: Sequence[Section] = (),
    navigation: Sequence[tuple[str, str]] = (),
    assets_at: str | None = None,
) -> str:
    """Return an HTML page.

    Parameters
    ----------
    title : str
        The heading of level 1; the title of the browser's tab is "tracestore: " and it.
    facts : mapping or pairs
        What the page is about, shown under the title.
    sections : sequence of Section
        The content. A page with more than two sections has a list of links to them.
    navigation : sequence of (name, address)
        Links in the header. The page whose address is "" is the current one.
    assets_at : str, optional
        Folder of the server from which the page loads `assets()`, such as "/assets". Send `SERVER_POLICY`
        with such a page. Default: everything is in the page, and its policy too.

    Raises
    ------
    MissingExtraError
        The page has a plot and is one file, and Bokeh is not installed.
    """
    has_plots = any("data-plot" in s.content for s in sections)
    if assets_at is None:
        scripts = [_asset("page.js"), *([*_bokeh(), _asset("plots.js")] if has_plots else ())]
        policy = (
            f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; {_STYLES.format(self='')}; {_BASE} 'none'"
        )
        head = join([
            element("meta", http_equiv="Content-Security-Policy", content=Html(policy)),
            element("style", Html(_asset("style.css"))),
        ])  # fmt: skip
        foot = join(element("script", Html(script)) for script in scripts)
    else:
        names = ["page.js", *([*_BOKEH, "plots.js"] if has_plots else ())]
        # Without an icon browsers request /favicon.ico.
        head = join([
            element("link", rel="icon", href="data:,"),
            element("link", rel="stylesheet", href=f"{assets_at}/style.css"),
        ])  # fmt: skip
        foot = join(element("script", src=f"{assets_at}/{name}", defer=True) for name in names)
    links = [element("a", n, href=a) if a else element("a", n, href="", aria_current="page") for n, a in navigation]
    contents = [element("li", element("a", s.title, href=f"#{s.anchor}")) for s in sections]
    body = join([
        element("a", "Skip to the content", href="#content", class_="skip"),
        element(
            "header",
            element("nav", *links, aria_label="Pages", class_="pages") if links else "",
            element("h1", title),
            facts_list(facts),
        ),
        element("nav", element("ul", *contents), aria_label="Sections", class_="sections") if len(contents) > 2 else "",
        element("main", *map(_render, sections), id="content", tabindex="-1"),
        foot,
    ])  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{PAGE_MARK}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{element("title", "tracestore: ", title)}{head}</head>'
        f"{element('body', body, data_printable=assets_at is None)}</html>\n"
    )


def _render(section: Section) -> Html:
    heading = element("h2", section.title, id=f"{section.anchor}-title")
    note = element("p", section.note, class_="note") if section.note else ""
    return element(
        "section", heading, note, section.content, id=section.anchor, aria_labelledby=f"{section.anchor}-title"
    )


def assets() -> dict[str, tuple[str, bytes]]:
    """Return content type and bytes of each file that a page with `assets_at` loads, by name.

    Raises
    ------
    MissingExtraError
        Bokeh is not installed.
    """
    script = "text/javascript; charset=utf-8"
    files = {name: (script, _asset(name).encode()) for name in ("page.js", "plots.js")}
    files |= {name: (script, text.encode()) for name, text in zip(_BOKEH, _bokeh(), strict=True)}
    return files | {"style.css": ("text/css; charset=utf-8", _asset("style.css").encode())}


def stylesheet() -> str:
    """Return the styles of every page, which define its colors."""
    return _asset("style.css")


@cache
def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _bokeh() -> tuple[str, ...]:
    """Return the scripts of BokehJS. Its Python modules, which take a second to import, are not needed."""
    spec = require_module("bokeh", "serve")
    if not spec.submodule_search_locations:  # a file bokeh.py is another module
        raise MissingExtraError("bokeh is not installed; run: pip install 'tracestore[serve]'", name="bokeh")
    folder = Path(spec.submodule_search_locations[0]) / "server/static/js"
    return tuple((folder / name).read_text(encoding="utf-8") for name in _BOKEH)


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
