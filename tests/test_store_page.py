"""Test `tracestore report`: contents of the page, and that text of the store is never interpreted."""

import html
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import tracestore
from tests.browser import OpenPage, chromium
from tests.helpers import command, make_optional, make_trace, write_store

__all__ = ["chromium"]
SCREENSHOTS = Path(__file__).parent / "reports/screenshots"
MALICIOUS = "</td><script>window.hacked=1</script><img src=http://evil.example/x onerror=window.hacked=2>&"


def report(*args, check=0):
    return command("report", *args, check=check)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "s.zarr"
    provenance = {"model": MALICIOUS, "layer_ids": [1, 2, 3]}
    with tracestore.create(path, provenance=provenance) as writer:
        for k in range(30):
            score = None if k % 10 == 0 else k / 30
            writer.append(make_trace(k, tokens=2 + k) | {"question": f"question {k}?"}, score=score)
        bad = (
            make_trace(40, tokens=4)
            | make_optional(4)
            | {
                "question": MALICIOUS,
                "question_id": MALICIOUS,
                "generated_answer_clean": MALICIOUS + "\ud800",
                "tokens_decoded": [MALICIOUS] * 4,
            }
        )
        bad["hidden_states"][1][2, 3] = np.nan
        writer.append(bad, score=0.9)
    return path


def test_commands_name_traces_by_id(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for number, sample in ((2, 0), (0, 0), (0, 1), (1, 0)):
            writer.append(make_trace(number) | {"question_id": str(number), "sample": sample}, label=number % 2)
    report(tmp_path / "s.zarr", "--output", tmp_path / "r.html")
    shown = re.findall(r"tracestore view \S+ ([^<]*)<", (tmp_path / "r.html").read_text(encoding="utf-8"))
    assert sorted(shown) == ["0", "0 --sample 1", "1", "2"]


@pytest.fixture(scope="module")
def page(store):
    path = store.parent / "r.html"
    done = report(store, "--output", path)
    assert str(path) in done.stdout
    return path


def test_page_shows_the_store(store, page):
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", text)
    assert titles == ["Contents", "Distributions", "Example traces", "Data-quality issues", "Provenance", "Bytes"]
    assert "31 traces: 13 hallucinated, 15 correct, 3 unlabeled" in text
    assert "<dt>traces</dt><dd>31</dd>" in text and '<td data-v="9.67741935" class="n">9.7 %</td>' in text
    assert "token of 31 traces" in text.replace("tokens of", "token of") and "drawn at random with seed 0" in text
    assert '<th scope="row">nan</th><td>error</td><td data-v="1" class="n">1</td><td><a href="#trace-30">30</a>' in text
    # Only the last trace has optional fields.
    for name in make_optional(4):
        assert f'<th scope="row">{name}</th><td data-v="1" class="n">1</td>' in text
    for name in ("score (default)", "tokens_decoded", "question", "hidden_states"):
        assert f'<th scope="row">{name}</th>' in text
    cards = re.findall(r'<div id="trace-(\d+)">', text)
    assert len(cards) == len(set(cards)) and set(re.findall(r'href="#trace-(\d+)"', text)) <= set(cards)
    assert f"tracestore view {shlex.quote(str(store))} " + html.escape(shlex.quote(MALICIOUS)) in text
    sizes = text.partition("Files of the store by array")[2].partition("</table>")[0]
    shares = [float(s) for s in re.findall(r">([\d.]+) %</td></tr>", sizes)]
    assert sum(shares) == pytest.approx(100, abs=1)
    report(store, "--output", page.with_name("again.html"))
    assert page.with_name("again.html").read_bytes() == page.read_bytes()


def test_texts_of_the_store_are_escaped(page):
    text = page.read_text(encoding="utf-8")
    assert "<script>window" not in text and "&lt;script&gt;window" in text
    assert not re.findall(r"<(?:img|iframe|object)\b", text)


@pytest.mark.parametrize("scores", [1e17, float("nan")])
def test_scores_that_have_no_histogram(tmp_path, scores):
    write_store(tmp_path / "s.zarr", [make_trace(1)], score=scores)
    report(tmp_path / "s.zarr", "--output", tmp_path / "r.html", "--score-threshold", 1)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert ("1e+17" in text) == (scores == 1e17) and "Length" in text


def test_stores_of_last_tokens_edges_and_heads(tmp_path):
    for k, name in enumerate(("v1_edges", "v1_heads", "v1_bfloat16")):
        report(f"tests/golden/{name}.zarr", "--output", tmp_path / f"{k}.html")
        assert "Norm of hidden states by layer" in (tmp_path / f"{k}.html").read_text(encoding="utf-8")


def test_options_and_usage_errors(store, tmp_path):
    done = report(store, "--output", tmp_path / "r.html", "--no-lint", "--json")
    assert json.loads(done.stdout)["output"] == str(tmp_path / "r.html")
    assert "Not checked." in (tmp_path / "r.html").read_text(encoding="utf-8")
    for wrong in (tmp_path, "."):
        assert "found a folder, expected" in report(store, "--output", wrong, check=2).stderr
    assert "does not exist" in report(store, "--output", tmp_path / "no" / "r.html", check=2).stderr
    assert "no such store" in report(tmp_path / "no.zarr", "--output", tmp_path / "r.html", check=2).stderr


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_page_fits_is_accessible_and_looks_as_kept(chromium, page, width, scheme):
    with OpenPage(chromium, page, width, scheme) as visit:
        visit.wait_for_plots()
        visit.assert_fits()
        # The folder of the store differs from run to run.
        visit.page.locator("header dd").first.evaluate("(e) => { e.textContent = 'store.zarr'; }")
        for command in visit.page.locator(".command code").all():
            command.evaluate("(e) => { e.textContent = 'tracestore view store.zarr 11'; }")
        visit.assert_looks_like(SCREENSHOTS / f"store-{width}-{scheme}.png", is_whole_page=True)
        visit.assert_accessible()


@pytest.mark.long
def test_page_prints(chromium, page):
    with OpenPage(chromium, page, 1440, "dark") as visit:
        visit.assert_prints()


def test_an_issue_links_to_its_trace(chromium, page):
    with OpenPage(chromium, page) as visit:
        visit.page.locator("a[href='#trace-30']").first.click()
        assert visit.page.locator("#trace-30").is_visible()
        assert "window.hacked=1" in visit.page.locator("#trace-30").inner_text()


def test_scores_on_another_scale_that_agree_with_the_labels_are_no_issue(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for k in range(20):
            writer.append(make_trace(k, tokens=4), score=90.0 - 4 * k, label=int(k >= 10))
    report(tmp_path / "s.zarr", "--output", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "label differs" not in page and "hallucinated (label 1)" in page and '"threshold"' not in page
