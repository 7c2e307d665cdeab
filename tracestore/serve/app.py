"""The viewer: which page or picture answers which address."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tracestore.errors import TracestoreError, escape_unprintable
from tracestore.pages.document import Section, assets, document
from tracestore.pages.elements import Html, element, join, paragraph
from tracestore.serve.forms import address
from tracestore.serve.list_page import list_sections, store_facts
from tracestore.serve.pictures import attention_picture
from tracestore.serve.projection import Projection
from tracestore.serve.results_page import results_sections
from tracestore.serve.search import Query, TraceSearch
from tracestore.serve.trace_page import trace_sections

ASSETS = "/assets"


class Response(NamedTuple):
    """Status, content type and body of a response."""

    status: int
    kind: str
    body: bytes


class Viewer:
    """Answer requests for a store. It is safe to use from threads.

    Parameters
    ----------
    search : TraceSearch
        The search, with its store and results.
    """

    def __init__(self, search: TraceSearch) -> None:
        self._search = search
        self._facts = store_facts(search)
        self._projection = Projection(search)
        self._assets = assets()
        for name, kind in (("viewer.js", "text/javascript"), ("viewer.css", "text/css")):
            self._assets[name] = f"{kind}; charset=utf-8", Path(__file__).with_name(name).read_bytes()

    def respond(self, path: str, arguments: Mapping[str, str]) -> Response:
        """Return the response to a request for a path with the arguments of its address."""
        kind, _, rest = path.removeprefix("/").partition("/")
        if kind == "assets" and rest in self._assets:
            return Response(200, *self._assets[rest])
        try:
            match kind, rest:
                case "store", "":
                    query = Query.from_arguments(arguments)
                    return self._page("Traces", list_sections(self._search, query), query)
                case "projection", "":
                    query = Query.from_arguments(arguments)
                    return self._page("Projection", self._projection.sections(query, arguments), query)
                case "results", "":
                    return self._page("Results", results_sections(self._search), Query())
                case "trace", _:
                    index = self._index(rest)
                    title = f"Trace {index}: {self._search.store.question_ids[index]}"
                    sections = trace_sections(self._search, index, arguments)
                    return self._page(title, sections, Query.from_arguments(arguments), here="")
                case "picture", _:
                    picture = attention_picture(self._search.store, self._index(rest), arguments)
                    return Response(200, "image/png", picture)
            raise KeyError(path)
        except KeyError:
            return self._error(404, "Not found", "The store has no such page.")
        except TracestoreError as error:
            return self._error(400 if error.exit_code == 2 else 500, "Error", str(error))

    def _index(self, text: str) -> int:
        """Return the index of a trace; KeyError if the store has none of it."""
        if not (text.isdecimal() and text.isascii() and len(text) < 12 and int(text) < len(self._search.store)):
            raise KeyError(text)
        return int(text)

    def _page(
        self, title: str, sections: list[Section], query: Query, *, here: str | None = None, status: int = 200
    ) -> Response:
        here, chosen = title if here is None else here, query.arguments()
        pages = (("Traces", "/store", chosen), ("Projection", "/projection", chosen), ("Results", "/results", ""))
        navigation = [(name, "" if name == here else address(path, text)) for name, path, text in pages]
        extra = join([
            element("link", rel="stylesheet", href=f"{ASSETS}/viewer.css"),
            element("script", src=f"{ASSETS}/viewer.js", defer=True),
        ])  # fmt: skip
        first = sections[0]
        sections = [Section(first.title, Html(extra + first.content), first.note), *sections[1:]]
        # The list shows all of them, other pages which store it is.
        facts = self._facts if title == "Traces" else self._facts[:2]
        text = document(title, facts=facts, sections=sections, navigation=navigation, assets_at=ASSETS)
        return Response(status, "text/html; charset=utf-8", text.encode("utf-8", "backslashreplace"))

    def _error(self, status: int, title: str, text: str) -> Response:
        line = Html(paragraph(escape_unprintable(text), kind="warning"))
        return self._page(title, [Section("What happened", line)], Query(), status=status)
