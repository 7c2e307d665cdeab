"""Test the design in Chromium: colors, widths, tables, plots, accessibility, policy."""

from pathlib import Path

import pytest

from tests.browser import OpenPage, share_of_different_cells
from tests.pages.example import MALICIOUS
from tracestore.pages.document import Section, document
from tracestore.pages.plots import Series, plot

SCREENSHOTS = Path(__file__).parent / "screenshots"


def test_another_picture_is_different():
    image = pytest.importorskip("PIL.Image")
    light, dark = (image.open(SCREENSHOTS / f"example-768-{scheme}.png").convert("RGB") for scheme in ("light", "dark"))
    assert share_of_different_cells(light, light) == 0 and share_of_different_cells(light, dark) > 0.9
    # All but the header is shifted by 40 pixels of the page.
    shifted = light.copy()
    shifted.paste(light.crop((0, 100, light.width, light.height - 10)), (0, 110))
    assert share_of_different_cells(light, shifted) > 0.05


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 768, 1440, 2560])
def test_page_fits_and_is_accessible(chromium, example, width, scheme):
    with OpenPage(chromium, example, width, scheme) as visit:
        visit.wait_for_plots()
        visit.assert_fits()
        if width in (360, 768, 1440):
            visit.assert_looks_like(SCREENSHOTS / f"example-{width}-{scheme}.png", is_whole_page=True)
        visit.page.locator("summary", has_text="data").first.click()
        visit.assert_accessible()


def test_tables_sort_and_filter_by_keyboard(chromium, example):
    with OpenPage(chromium, example) as visit:
        page = visit.page
        header = page.locator("thead th", has_text="traces")
        first = page.locator("tbody tr").first.locator("td").nth(2)
        header.get_by_role("button").press("Enter")
        assert header.get_attribute("aria-sort") == "ascending" and first.inner_text() == "0"
        header.get_by_role("button").press("Enter")
        assert header.get_attribute("aria-sort") == "descending" and first.inner_text() == "14,000"
        page.locator("thead th", has_text="AUROC").get_by_role("button").press("Enter")
        assert header.get_attribute("aria-sort") is None
        assert page.locator("tbody tr").last.locator("th").inner_text() == "without a value"
        page.get_by_role("searchbox").fill("WITHOUT value")
        assert page.locator("tbody tr:visible").count() == 1
        assert page.get_by_role("status").inner_text() == "1 of 16 rows"


@pytest.mark.long
def test_only_tables_that_are_wider_than_their_place_scroll_by_keyboard(chromium, example):
    with OpenPage(chromium, example, 360) as visit:
        place = visit.page.locator(".table").first
        assert (
            place.get_attribute("tabindex") == "0" and place.get_attribute("aria-label") == "Models, scrolls sideways"
        )
        place.press("ArrowRight")
        visit.page.wait_for_timeout(300)
        assert place.evaluate("(e) => e.scrollLeft") > 0
        assert place.locator("tbody th").first.bounding_box()["x"] >= 0
        visit.page.set_viewport_size({"width": 2560, "height": 900})
        visit.page.wait_for_timeout(100)
        assert place.get_attribute("tabindex") is None and place.get_attribute("aria-label") == "Models"


def test_references_are_in_the_range_of_the_axes(chromium, tmp_path):
    page = tmp_path / "p.html"
    lines = plot("L", [Series("a", [1, 2], [0.3, 0.4])], x_label="x", y_label="y", references=[("probe", "y", 0.9)])
    page.write_text(document("t", sections=[Section("s", lines)]))
    with OpenPage(chromium, page) as visit:
        visit.wait_for_plots()
        visit.page.evaluate("() => { window.range = Bokeh.documents[0].roots()[0].y_range; }")
        assert visit.page.evaluate("window.range.end") > 0.9
        assert visit.page.locator(".legend").inner_text().split("\n")[-1].strip() == "probe (0.9)"


def test_plots_zoom_hide_and_list_their_numbers(chromium, example):
    with OpenPage(chromium, example) as visit:
        visit.wait_for_plots()
        figure = visit.page.locator("figure", has_text="By group")
        canvas = figure.locator("[role=img]")
        figure.get_by_label("Reset").focus()
        before = canvas.screenshot()
        figure.get_by_label("Zoom in").press("Enter")
        visit.page.wait_for_timeout(300)
        zoomed = canvas.screenshot()
        figure.get_by_label("Reset").press("Enter")
        visit.page.wait_for_timeout(300)
        assert zoomed != before == canvas.screenshot()
        figure.locator(".legend button").press("Enter")
        assert figure.locator(".legend button").get_attribute("aria-pressed") == "false"
        visit.page.wait_for_timeout(300)
        assert canvas.screenshot() != before
        figure.locator("summary").press("Enter")
        assert figure.locator("details td").nth(2).inner_text() == "0.6"
        assert figure.locator("details td").nth(1).inner_text() == MALICIOUS[0][:40].rstrip()


def test_plots_follow_the_theme(chromium, example):
    with OpenPage(chromium, example) as visit:
        visit.wait_for_plots()
        swatch = visit.page.locator(".legend i").first
        light = swatch.evaluate("(i) => getComputedStyle(i).backgroundColor")
        visit.page.emulate_media(color_scheme="dark")
        visit.page.wait_for_timeout(100)
        visit.wait_for_plots()
        assert swatch.evaluate("(i) => getComputedStyle(i).backgroundColor") != light


def test_tooltips_show_malicious_texts_as_text(chromium, example):
    with OpenPage(chromium, example) as visit:
        visit.wait_for_plots()
        canvas = visit.page.locator("figure", has_text="Bars").locator("[role=img]")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        for share in (0.3, 0.5, 0.8):
            visit.page.mouse.move(box["x"] + share * box["width"], box["y"] + 0.7 * box["height"])
            visit.page.wait_for_timeout(200)
        tooltip = visit.page.locator(".bk-tooltip-content").first
        tooltip.wait_for()
        assert any(text[:20] in tooltip.inner_text() for text in MALICIOUS)
