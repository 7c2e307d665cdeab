"""Test the report of a run in Chromium: pictures, accessibility, size and time."""

from pathlib import Path

import pytest

from tests.browser import OpenPage

SCREENSHOTS = Path(__file__).parent / "screenshots"
pytestmark = pytest.mark.long


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_report_looks_as_kept_and_is_accessible(chromium, report, width, scheme):
    with OpenPage(chromium, report, width, scheme) as visit:
        visit.wait_for_plots()
        visit.assert_fits()
        visit.assert_looks_like(SCREENSHOTS / f"report-{width}-{scheme}.png", is_whole_page=True)
        visit.assert_accessible()


@pytest.mark.parametrize("width", [360, 1440])
def test_comparison_fits_and_is_accessible(chromium, comparison, width):
    with OpenPage(chromium, comparison, width, "dark") as visit:
        visit.wait_for_plots()
        visit.assert_fits()
        visit.assert_accessible()
        differing = visit.page.locator("table", has_text="Options that differ").locator("tbody tr")
        assert differing.count() == 1 and differing.locator("td").all_inner_texts() == ["0.001", "0.01"]


def test_report_is_small_and_ready_at_once(chromium, report):
    assert report.stat().st_size < 5_000_000
    times = []
    # The shortest of three: other programs delay a browser, but none makes it faster.
    for _ in range(3):
        with OpenPage(chromium, report) as visit:
            times.append(visit.ready_after_s)
    assert min(times) < 2
