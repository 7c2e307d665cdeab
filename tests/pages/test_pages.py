"""Test the elements and the skeleton of pages, without a browser."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.pages.example import MALICIOUS, example_page
from tracestore.errors import MissingExtraError
from tracestore.pages.document import SERVER_POLICY, Section, assets, document
from tracestore.pages.elements import Html, TableCell, element, escape, facts, number, preformatted, table, tokens
from tracestore.pages.plots import MAX_SIDE, Series, heat_map, plot


class Parser(HTMLParser):
    """Parser that collects tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.stack = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text += data


def spec_of(figure):
    """Return the JSON document of a plot."""
    return json.loads(re.search(r'<script type="application/json">(.*)</script>', str(figure))[1])


def test_malicious_texts_are_escaped_everywhere():
    page = Parser(example_page())
    assert page.stack == []
    scripts = [a for tag, a in page.tags if tag == "script"]
    assert len(scripts) == 4 + 7 and all(a in ({}, {"type": "application/json"}) for a in scripts)
    assert not {tag for tag, _ in page.tags} & {"img", "svg", "iframe", "object", "base", "form"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    for text in MALICIOUS:
        assert text.replace("\u202e", "\\u202e").replace("\ud800", "\\ud800") in page.text


def test_policy_of_one_file_allows_only_its_scripts():
    text = example_page()
    policy = next(a["content"] for tag, a in Parser(text).tags if a.get("http-equiv"))
    directives = {d.split()[0]: d.split()[1:] for d in policy.split("; ")}
    assert directives["default-src"] == ["'none'"] and "connect-src" not in directives
    assert len(directives["script-src"]) == 4 and all(s.startswith("'sha256-") for s in directives["script-src"])
    assert not re.search(r'(?:src|href)="(?!#)', text.partition("<body")[2].partition("<script>")[0])


def test_a_page_of_a_server_loads_its_assets():
    text = example_page(assets_at="/assets", navigation=[("Traces", "/traces"), ("Store", "")])
    files = assets()
    loaded = re.findall(r'(?:src|href)="/assets/([^"]+)"', text)
    assert sorted(loaded) == sorted(files) and "http-equiv" not in text
    assert all(data and ("css" in kind) == name.endswith(".css") for name, (kind, data) in files.items())
    assert "'unsafe-eval'" not in SERVER_POLICY and "script-src 'self';" in SERVER_POLICY
    assert '<a href="/traces">Traces</a>' in text and 'aria-current="page">Store' in text


def test_pages_without_plots_need_no_bokeh(monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    from tracestore.pages import document as module

    module._bokeh.cache_clear()
    assert len(document("Title", sections=[Section("A", Html("<p>a"))])) < 20_000
    with pytest.raises(MissingExtraError, match=r"pip install 'tracestore\[serve\]'"):
        example_page()


@pytest.mark.long
def test_bokeh_is_not_imported():
    code = "import sys; from tests.pages.example import example_page as e; e(); print('bokeh' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_elements():
    assert element("p", "<a>", Html("<b>"), class_="x", for_="y", data_v=None, hidden=True) == (
        '<p class="x" for="y" hidden>&lt;a&gt;<b></p>'
    )
    assert escape(None) == "" and escape(3) == "3" and escape("\u202e") == "\\u202e"
    assert [escape(text) for text in (" ", " a ", "a \n b", "a ")] == [" ", " a ", "a b", "a "]
    assert preformatted(" <\t\n  \u202e\ud800") == " &lt; \n  \\u202e\\ud800" and preformatted("abc", 2) == "ab"
    assert facts({"a": 1_000, "b": None, "c": "<"}).count("<dt>") == 2
    assert number(1234.5678, 2) == TableCell("1,234.57", 1234.5678) and number(0.1, sign=True).text == "+0.100"
    assert number(None) == number(math.nan) == TableCell("–")


def test_table_aligns_and_sorts_numbers():
    text = table(["name", "n"], [["a", 1_000], ["b", None]], caption="All <1>")
    assert '<td data-v="1000" class="n">1,000</td>' in text and '<th scope="row">a</th>' in text
    assert '<th scope="col" class="n">n</th>' in text and text.count("All &lt;1&gt;") == 2
    assert " data-sort>" in text and "data-sort" not in table(["a"], [], caption="c", is_sortable=False)


def test_tokens_are_colored_by_value():
    text = tokens(["a", "b", "c", "d"], [0, -3, -9, math.nan], label="log-probability", low=0, high=-6)
    spans = re.findall(r'<span(?: class="(v\d)")?[^>]*>(\w)</span>', text)
    assert spans == [("v0", "a"), ("v5", "b"), ("v9", "c"), ("", "d")]
    assert 'title="log-probability -3"' in text and tokens(["<"]).count("&lt;") == 1
    assert 'class="v0"' in tokens(["a"], [1.0])
    for values in (None, [1.0, math.nan]):
        assert re.findall(r"<span([^>]*)>([^<]+)<", tokens([" a", "\n"], values, chosen=1))[1] == (" data-chosen", "\n")


def test_names_of_folders_that_differ_at_the_end_differ_in_a_legend():
    names = [f"/home/user/experiments/2026-11-25/facts600/results_{end}" for end in ("heads", "top_k")]
    spec = spec_of(plot("T", [Series(name, [0], [1]) for name in names], x_label="x", y_label="y"))
    assert [series["name"][-13:] for series in spec["series"]] == ["results_heads", "results_top_k"]


def test_plots_hold_their_numbers():
    values = [0.123456789, math.nan, math.inf]
    spec = spec_of(plot("T", [Series("s", [0, 1, 2], values)], x_label="x", y_label="y"))
    assert spec["series"][0]["y"] == [0.123457, None, None]
    image = spec_of(heat_map("T", np.array([[0.0, 1.0], [np.nan, 0.5]]), x_label="x", y_label="y", value_label="v"))
    assert image["image"] | {"levels": ""} == {"rows": 2, "columns": 2, "low": 0, "high": 1, "levels": "", "label": "v"}  # fmt: skip
    with pytest.raises(ValueError, match="at most 400"):
        heat_map("T", np.zeros((2, MAX_SIDE + 1)), x_label="x", y_label="y", value_label="v")
