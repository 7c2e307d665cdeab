"""Test the pages in Chromium."""

import re
from pathlib import Path

import pytest

from tests.browser import OpenPage, chromium
from tests.serve.conftest import COUNT, DETECTOR, MALICIOUS, start, stop

__all__ = ["chromium"]
SCREENSHOTS = Path(__file__).parent / "screenshots"


def visit(chromium, served, path="/store", width=1440, scheme="light"):
    """Return an open page of a server, as a browser with its cookie opens it."""
    address = f"http://127.0.0.1:{served.port}"
    cookie = {"name": f"tracestore-{served.port}", "value": served.token, "url": address}
    return OpenPage(chromium, address + path, width, scheme, [cookie])


def assert_shows(page, name, text):
    """Assert that an element contains the text within the timeout of the page."""
    page.locator(f".{name}").filter(has_text=text).first.wait_for()


def test_token_opens_the_list(chromium, served):
    page = chromium.new_page()
    page.goto(served.url)
    page.wait_for_url("**/store")
    assert page.title() == "tracestore: Traces" and "token" not in page.url
    assert_shows(page, "message", f"1 to 100 of {COUNT} found")
    assert page.locator("header dd").filter(has_text="150 hallucinated, 250 correct").count() == 1
    page.close()


def test_search_filters_and_pages(chromium, served):
    with visit(chromium, served) as open_page:
        page = open_page.page
        page.get_by_label("Words in id").fill("color red")
        red = sum(k % 2 for k in range(len(MALICIOUS), COUNT))
        assert_shows(page, "message", f"1 to 100 of {red} found")
        assert page.evaluate("document.activeElement.name") == "words"
        page.get_by_role("navigation", name="Pages of the list").get_by_text("3").click()
        assert_shows(page, "message", f"201 to {red} of {red} found")
        assert "page=3" in page.url and page.get_by_label("Words in id").input_value() == "color red"
        page.reload()
        assert_shows(page, "message", f"201 to {red} of {red} found")
        page.get_by_label("Label").select_option("unlabeled")
        assert_shows(page, "message", "1 to 25 of 25 found")
        page.get_by_label("Words in id").fill("")
        assert_shows(page, "message", "1 to 50 of 50 found")
        page.get_by_label("Label").select_option("any")
        page.get_by_label("Misclassified by").select_option(DETECTOR)
        # The hallucinated traces with a score among 4 to 99. The detector predicts all of them correct.
        missed = len([k for k in range(4, 100) if k % 3 == 0 and k % 9 != 8])
        assert_shows(page, "message", f"1 to {missed} of {missed} found")
        page.get_by_label("Group").select_option("odd")
        assert_shows(page, "message", f"1 to {missed // 2} of {missed // 2} found")
        address = page.url
        page.get_by_text("Reset").click()
        assert_shows(page, "message", f"of {COUNT} found")
        page.goto(address)
        assert_shows(page, "message", f"1 to {missed // 2} of {missed // 2} found")
        assert page.get_by_label("Group").input_value() == "odd"


@pytest.mark.long
def test_bounds_and_orders(chromium, served):
    with visit(chromium, served) as open_page:
        page = open_page.page
        score = page.get_by_role("group", name="Score")
        score.get_by_label("from").fill("0.5")
        assert_shows(page, "message", "of 250 found")
        page.get_by_role("group", name="Tokens").get_by_label("to").fill("2")
        fitting = len([k for k in range(COUNT) if k % 9 != 8 and k % 3 and k % 7 == 0])
        assert_shows(page, "message", f"of {fitting} found")
        page.get_by_label("Order by").select_option("tokens")
        score.get_by_label("from").fill("")
        page.get_by_role("group", name="Tokens").get_by_label("to").fill("")
        page.get_by_label("largest first").check()
        page.locator(".traces tbody tr").first.filter(has_text="8").wait_for()
        page.get_by_role("columnheader", name="tokens").get_by_role("link").click()
        assert_shows(page, "message", f"of {COUNT} found")
        assert page.locator(".traces tbody tr").first.locator("td").nth(3).inner_text() == "2"
        assert page.get_by_role("columnheader", name="tokens").get_attribute("aria-sort") == "ascending"
        assert page.locator("[aria-sort]").count() == 1
        page.get_by_label("Words in id").fill("no such words")
        assert_shows(page, "message", "0 to 0 of 0 found")


def test_trace_follows_its_controls(chromium, served):
    with visit(chromium, served, "/store?words=q11") as open_page:
        page = open_page.page
        page.locator(".traces tbody a").first.click()
        open_page.wait_for_plots()
        assert page.title() == "tracestore: Trace 11: q11"
        assert_shows(page, "about", "correct")
        assert_shows(page, "question", "What is the number 11 of color red?")
        assert_shows(page, "answer", "answer 11 ✓")
        assert page.get_by_role("table", name="Detectors").locator("tr").filter(has_text="lstm_solo").count() == 1
        page.get_by_label("Layer", exact=True).fill("3")
        page.locator("select[name=head]").select_option("2")
        page.locator("figcaption").filter(has_text="Attention, layer 3, head 2").wait_for()
        page.locator("#view .tokens > span").nth(1).click()
        page.locator(".note").filter(has_text="Chosen: token 1.").wait_for()
        assert page.locator("[data-chosen]").inner_text().strip() == "t1é"
        page.get_by_label("Color of the tokens").select_option("norm of hidden states")
        page.locator("h3").filter(has_text="Tokens by norm").wait_for()
        assert re.search(r"layer=3&head=2&token=1$", page.url) and "words=q11" in page.url
        page.reload()
        page.locator("figcaption").filter(has_text="Attention, layer 3, head 2").wait_for()
        assert page.locator("input[name=token]").input_value() == "1"
        assert page.locator("#view .tokens .v9").count() >= 1
        page.locator(".grid img").first.scroll_into_view_if_needed()
        page.wait_for_timeout(100)
        assert page.locator(".grid").first.locator("img").evaluate_all("all => all.every(i => i.naturalWidth === 6)")
        page.get_by_role("link", name="head 0").click()
        page.locator("figcaption").filter(has_text="Attention, layer 3, head 0").wait_for()
        page.get_by_role("link", name="Next trace").click()
        page.get_by_role("heading", name="Trace 110: q110").wait_for()
        page.get_by_role("link", name="All traces found").click()
        assert_shows(page, "message", "of 11 found")


@pytest.mark.long
def test_projection_links_to_traces_and_back(chromium, served):
    with visit(chromium, served, "/store?label=correct") as open_page:
        page = open_page.page
        page.get_by_role("link", name="Project these traces").click()
        assert_shows(page, "message", "Layer 3: 250 of the 250 traces found")
        open_page.wait_for_plots()
        page.get_by_label("Layer", exact=True).fill("0")
        assert_shows(page, "message", "Layer 0: 250 of the 250")
        open_page.wait_for_plots()
        page.get_by_text("Points as a table").click()
        page.get_by_role("table", name="Points").get_by_role("link", name="11: q11", exact=True).click()
        page.get_by_role("heading", name="Trace 11: q11").wait_for()
        page.go_back()
        page.get_by_role("link", name="List these traces").click()
        assert_shows(page, "message", "of 250 found")


@pytest.mark.long
def test_results(chromium, served):
    with visit(chromium, served, "/results") as open_page:
        page = open_page.page
        open_page.wait_for_plots()
        assert page.locator("[data-plot]").count() == 3 + 2 * 2
        row = page.get_by_role("table", name="Metrics of the test split").locator("tr").filter(has_text="auroc")
        assert row.locator("td").all_inner_texts() == ["0.750", "0.750", "0.800"]
        page.get_by_role("link", name="list the traces").nth(1).click()
        assert_shows(page, "message", "1 to 32 of 32 found")


@pytest.mark.long
def test_several_results_side_by_side(chromium, served_store, results_folder, tmp_path):
    scores = tmp_path / "scores.csv"
    scores.write_text("question_id,sample,hallucination_score,predicted\nq4,0,0.4,1\nq5,0,0.2,0\nq6,0,,\n")
    served = start(served_store, "--results", results_folder, "--results", scores)
    with visit(chromium, served, "/trace/4") as open_page:
        names = open_page.page.get_by_role("table", name="Detectors").locator("tbody th").all_inner_texts()
        # q4 is correct: the threshold of the scores is the lowest one with a prediction.
        row = open_page.page.get_by_role("table", name="Detectors").locator("tr").filter(has_text="scores.csv")
        assert row.locator("td").all_inner_texts() == ["0.400", "0.400", "hallucinated", "wrong"]
    assert names == [f"results: {n}" for n in ("lstm_solo", DETECTOR, "logistic_probe")] + [
        "scores.csv: hallucination_score"
    ]
    assert stop(served) == (0, "stopped\n")


@pytest.mark.long
def test_malicious_texts_stay_text(chromium, served):
    with visit(chromium, served) as open_page:
        page = open_page.page
        for k, text in enumerate(MALICIOUS):
            shown = "\\u202etxt.exe" if k == 3 else text  # codespell:ignore etxt
            assert shown in page.locator(".traces tbody tr").nth(k).inner_text().replace("\n", "")
            page.locator(".traces tbody a").nth(k).click()
            open_page.wait_for_plots()
            page.get_by_role("heading", name=f"Trace {k}: ").wait_for()
            assert_shows(page, "question", shown)
            assert_shows(page, "answer", shown)
            assert shown[:8] in page.locator("#view .tokens").inner_text()
            page.get_by_text("Values as a table").click()
            page.go_back()
        assert page.locator("thead").filter(has_text="<b>gnn</b><img").count() == 1
        page.get_by_role("link", name="Results").click()
        open_page.wait_for_plots()
        assert page.get_by_role("columnheader", name="<b>gnn</b>").count() == 1
        assert page.locator("b, img, a[href^=javascript]").count() == 0
        page.get_by_role("link", name="Projection").click()
        open_page.wait_for_plots()
        box = page.locator("[data-plot] [role=img]").bounding_box()
        for share in (0.3, 0.4, 0.5, 0.6, 0.7):
            page.mouse.move(box["x"] + share * box["width"], box["y"] + 0.5 * box["height"])
            page.wait_for_timeout(100)


@pytest.mark.long
def test_a_click_on_a_point_opens_its_trace(chromium, served):
    with visit(chromium, served, "/projection?words=q1&max_tokens=2") as open_page:
        page = open_page.page
        open_page.wait_for_plots()
        canvas = page.locator("[data-plot] [role=img]")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        # The outermost points are at the edges of the axes: scan for one.
        for x in range(60, int(box["width"]), 9):
            for y in range(10, int(box["height"]) - 60, 40):
                page.mouse.move(box["x"] + x, box["y"] + y)
                if page.locator(".bk-tooltip-content").count():
                    page.mouse.click(box["x"] + x, box["y"] + y)
                    page.wait_for_url("**/trace/*")
                    assert "words=q1" in page.url
                    return
        raise AssertionError("no point found")


PAGES = {
    "list": "/store",
    "trace": "/trace/11?head=1",
    "projection": "/projection?label=correct&words=q4",
    "results": "/results",
    "error": "/trace/11?layer=99",
}


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 768, 1440, 2560])
def test_pages_fit_are_accessible_and_look_as_before(chromium, served, width, scheme):
    with visit(chromium, served, "/store", width, scheme) as open_page:
        page = open_page.page
        for name, path in PAGES.items():
            page.goto(f"http://127.0.0.1:{served.port}{path}")
            open_page.wait_for_plots(all_of_them=width in (320, 2560))
            open_page.assert_fits()
            if width in (360, 768, 1440):
                # The folder of the store differs from run to run.
                page.locator("header dd").first.evaluate("(e) => { e.textContent = 'store.zarr'; }")
                for command in page.locator(".command code").all():
                    command.evaluate("(e) => { e.textContent = 'tracestore view store.zarr 11'; }")
                open_page.assert_looks_like(SCREENSHOTS / f"{name}-{width}-{scheme}.png")
            for summary in page.locator("main summary").all()[:2]:
                summary.press("Enter")
            open_page.assert_accessible()
