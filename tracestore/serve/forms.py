"""Addresses of pages, and the controls that change them."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from tracestore.errors import UsageError, escape_unprintable
from tracestore.pages.elements import Html, element, preformatted


def address(path: str, arguments: str, **more: Any) -> str:
    """Return an address of this server; `more` are arguments that are appended unless they are None."""
    added = urlencode({k: v for k, v in more.items() if v is not None}, errors="surrogatepass")
    text = "&".join(filter(None, (arguments, added)))
    return f"{path}?{text}" if text else path


def short_text(text: str, length: int = 200) -> Html:
    """Return the beginning of a text in one line, with the whole text as its title if it is cut."""
    line = text.replace("\n", " ")
    if len(text) <= length:
        return preformatted(line)
    return element("span", preformatted(line, length), "…", title=preformatted(text, 4_000))


def alert(text: str) -> Html:
    """Return the line for an error; it is invisible while it is empty."""
    return element("p", preformatted(text), role="alert")


def number_field(label: str, name: str, value: float | None, **options: object) -> Html:
    """Return a field for a number; None leaves it empty."""
    text = "" if value is None else str(value).removesuffix(".0")
    return element("label", label, element("input", type="number", name=name, value=text, **options))


def select(label: str, name: str, values: Iterable[str | tuple[str, str]], chosen: str, default: str) -> Html:
    """Return a list to choose from; a pair is a value and the text that is shown. The default is not in addresses."""
    options = []
    for value in values:
        key, text = (value, value) if isinstance(value, str) else value
        content = Html(html.escape(escape_unprintable(text or "any")))
        options.append(element("option", content, value=_attribute(key), selected=key == chosen))
    return element("label", label, element("select", *options, name=name, data_default=_attribute(default)))


def hidden_fields(pairs: Sequence[tuple[str, str]]) -> list[Html]:
    """Return fields that the visitor does not see."""
    return [element("input", type="hidden", name=name, value=_attribute(value)) for name, value in pairs]


def _attribute(value: str) -> Html:
    """Return a value of a form without the changes that make text visible: the server gets it unchanged."""
    return Html(html.escape(value.encode("utf-8", "replace").decode()))


def form(action: str, label: str, *controls: Html, role: str | None = None) -> Html:
    """Return a form whose controls change the parts of the page. Without scripts its button loads the page again."""
    button = element("button", "Show", type="submit")
    return element(
        "form", *controls, button, action=action, method="get", class_="controls", aria_label=label, role=role
    )


def part(name: str, *content: object) -> Html:
    """Return a part of the page that is replaced when a control changes."""
    return element("div", *content, id=name, data_part=True)


def number_of(arguments: Mapping[str, str], name: str, count: int, default: int) -> int:
    """Return an integer of an address from 0 to count - 1.

    UsageError names the argument and its limits.
    """
    text = arguments.get(name, "").strip()
    if text == "":
        return max(0, min(default, count - 1))
    if not (text.isdecimal() and text.isascii() and len(text) < 10 and int(text) < count):
        raise UsageError(f"{name}: found {escape_unprintable(text, 20)}, expected 0 to {count - 1}")
    return int(text)
