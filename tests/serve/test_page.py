"""Test the page, most of it in Chromium."""

import re
import shutil

import pytest

import tracestore
from tests.serve.conftest import COUNT, DETECTOR, MALICIOUS, start, stop
from tracestore.errors import CorruptStoreError
from tracestore.serve.page import Page
from tracestore.serve.search import TraceSearch

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def chromium():
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        # The sandbox of Chromium does not run as root.
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """An open page, with its network requests and console errors."""

    def __init__(self, chromium, served):
        self.page = chromium.new_page(viewport={"width": 1150, "height": 1600})
        self.page.set_default_timeout(30_000)
        self.requests, self.errors = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(served.url)
        self.page.wait_for_url("**/store")
        self.assert_shows("message", f"1 to 200 of {COUNT} found")
        self.port = served.port

    def assert_shows(self, name, text):
        """Assert that an element contains the text within the timeout of the page."""
        self.page.locator(f".{name}").filter(has_text=text).wait_for()

    def close(self):
        """Close the page, and assert that it made no external request, no error and ran no foreign script."""
        external = [u for u in self.requests if not re.match(rf"(http|ws)://127\.0\.0\.1:{self.port}/|data:|blob:", u)]
        assert not external and not self.errors
        assert self.page.evaluate("window.hacked") is None
        self.page.close()


@pytest.fixture
def visit(chromium, served):
    visit = Visit(chromium, served)
    yield visit
    visit.close()


def test_page_shows_table_and_plots(visit):
    page = visit.page
    assert page.title() == "tracestore" and "token" not in page.url
    assert page.locator(".table .slick-row").count() > 3
    assert page.locator(".bk-Figure").count() >= 3 and page.locator("canvas").count() >= 3
    visit.assert_shows("pairs", "of 3 pairs")
    # A screenshot of an empty plot would be smaller.
    shot = page.locator(".bk-Figure").first.screenshot()
    assert len(shot) > 3_000


def test_search_filters_and_pages(visit):
    page = visit.page
    page.locator(".words input").fill("color red")
    page.locator(".words input").press("Enter")
    red = sum(k % 2 for k in range(len(MALICIOUS), COUNT))
    visit.assert_shows("message", f"1 to 200 of {red} found")
    page.locator(".later button").click()
    visit.assert_shows("message", f"201 to {red} of {red} found")
    assert page.locator(".later button").is_disabled()
    page.locator(".earlier button").click()
    visit.assert_shows("message", f"1 to 200 of {red} found")
    page.locator(".filter select").select_option("unlabeled")
    visit.assert_shows("message", "1 to 25 of 25 found")
    page.locator(".words input").fill("")
    page.locator(".words input").press("Enter")
    visit.assert_shows("message", "1 to 50 of 50 found")
    page.locator(".filter select").select_option(f"missed by {DETECTOR}")
    # The hallucinated traces with a score among 4 to 99. The detector predicts all of them correct.
    missed = len([k for k in range(4, 100) if k % 3 == 0 and k % 9 != 8])
    visit.assert_shows("message", f"1 to {missed} of {missed} found")
    page.locator(".filter select").select_option("any")
    page.locator(".order select").select_option("tokens")
    page.locator(".descending button").click()
    page.locator(".table .slick-row .slick-cell.r4").filter(has_text="8").first.wait_for()
    page.locator(".words input").fill("no such words")
    page.locator(".words input").press("Enter")
    visit.assert_shows("message", "0 to 0 of 0 found")


def test_trace_shows_the_chosen_layer_head_and_threshold(visit):
    page = visit.page
    page.locator(".words input").fill("q11 number 11")
    page.locator(".words input").press("Enter")
    visit.assert_shows("message", "1 to 11 of 11 found")
    page.locator(".table .slick-row").first.locator(".slick-cell").nth(1).click()
    visit.assert_shows("about", "trace 11: q11, sample 0; 6 tokens")
    visit.assert_shows("about", "lstm_solo 0.200")
    visit.assert_shows("question", "Question: What is the number 11 of color red?")
    visit.assert_shows("answer", "Answer: answer 11 ✓")
    visit.assert_shows("pairs", re.compile(r"of 21 pairs .* above 0\.05"))
    handle = page.locator(".threshold .noUi-handle")
    handle.focus()
    for _ in range(5):
        handle.press("ArrowRight")
    visit.assert_shows("pairs", re.compile(r"above 0\.[1-9]"))
    page.locator(".head select").select_option("2")
    handle = page.locator(".layer .noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    page.locator(".layer").filter(has_text="3").wait_for()
    visit.assert_shows("pairs", "of 21 pairs")


def test_other_tabs_show_their_plots(visit):
    page = visit.page
    page.get_by_text("Projection", exact=True).click()
    page.locator(".project button").click()
    visit.assert_shows("projection-note", f"{COUNT} of the {COUNT} traces found")
    page.get_by_text("Predictions", exact=True).click()
    page.locator(".bk-Figure:visible").nth(2).wait_for()
    assert page.locator(".bk-Figure:visible").count() == 3
    page.get_by_text("Training", exact=True).click()
    visit.assert_shows("test-metrics", "lstm_solo: auroc 0.750")
    page.locator(".bk-Figure:visible").nth(3).wait_for()
    assert page.locator(".bk-Figure:visible").count() == 4


def test_malicious_texts_stay_text(visit):
    page = visit.page
    for k, text in enumerate(MALICIOUS):
        row = page.locator(".table .slick-row").nth(k)
        row.locator(".slick-cell").nth(1).click()
        visit.assert_shows("about", f"trace {k}: ")
        shown = "\\u202etxt.exe" if k == 3 else text  # codespell:ignore etxt
        visit.assert_shows("question", shown)
        visit.assert_shows("answer", shown)
        assert shown[:20] in row.inner_text()
    assert page.locator(".slick-header").filter(has_text="<b>gnn</b><img").count() == 1
    assert page.locator(".slick-header b").count() == 0
    assert page.locator("img[src=x]").count() == 0 and page.locator("a[href^=javascript]").count() == 0
    page.get_by_text("Training", exact=True).click()
    visit.assert_shows("test-metrics", DETECTOR)
    assert page.locator(".test-metrics b").count() == 0
    page.screenshot()


def test_without_results_the_page_names_the_option(chromium, served_store):
    served = start(served_store)
    visit = Visit(chromium, served)
    visit.page.get_by_text("Predictions", exact=True).click()
    visit.page.get_by_text("tracestore serve STORE --results DIR").first.wait_for()
    visit.close()
    assert stop(served) == (0, "stopped\n")


def test_error_of_a_search_stays_on_the_page(served_store, monkeypatch):
    """The list of the empty result does not clear it; the next action does."""
    with tracestore.open(served_store) as store:
        page = Page(TraceSearch(store))
        with monkeypatch.context() as patch:
            patch.setattr(TraceSearch, "_all_texts", _raise_damage)
            page._words.value = "red"
        assert len(page._found) == 0 and page._problem.text == "rows.zip: damaged"
        page._words.value = ""
        assert len(page._found) == COUNT and page._problem.text == ""


def _raise_damage(_search):
    raise CorruptStoreError("rows.zip: damaged")
