"""Pages in Chromium: a fixture for the browser, and a page that records what it must not do.

A conftest.py imports the fixture `chromium`. Tests are skipped where the machine has no Chromium.
"""

import io
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def chromium():
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        # The sandbox of Chromium does not run as root.
        fonts = os.environ | {"FONTCONFIG_FILE": str(Path(__file__).parent / "fonts.conf")}
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"], env=fonts)
        yield browser
        browser.close()


def share_of_different_cells(first, second):
    """Return the share of cells of 2 x 2 pixels that differ by more than 32 of 255, up to the lower edge of both."""
    box = (0, 0, first.width, min(first.height, second.height))
    cells = [np.asarray(picture.crop(box).reduce(2), int) for picture in (first, second)]
    return float((np.abs(cells[0] - cells[1]).max(-1) > 32).mean())


class OpenPage:
    """An open page, with its requests and errors. As a context it asserts that there was no foreign request or error.

    Parameters
    ----------
    browser : Browser
        The fixture `chromium`.
    url : str or Path
        Address or file.
    width : int
        Width of the window in pixels; its height is 900.
    scheme : str
        "light" or "dark".
    cookies : sequence of dict
        Cookies that the browser has: name, value, url.
    """

    def __init__(self, browser, url, width=1440, scheme="light", cookies=()):
        url = url.as_uri() if isinstance(url, Path) else url
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.context.add_cookies(list(cookies))
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.requests, self.errors = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        begin = time.perf_counter()
        self.page.goto(url)
        self.wait_for_plots(all_of_them=False)
        self.ready_after_s = time.perf_counter() - begin
        self._origin = url if url.startswith("file:") else "/".join(url.split("/")[:3])

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        hacked = self.page.evaluate("window.hacked")
        self.context.close()
        if kind is None:
            foreign = [u for u in self.requests if not u.startswith((self._origin, "data:", "blob:"))]
            assert (foreign, self.errors, hacked) == ([], [], None)

    def wait_for_plots(self, *, all_of_them=True):
        """Wait until all plots are drawn, or those that the window shows."""
        script = """(everything) => [...document.querySelectorAll("[data-plot]")]
            .filter((p) => everything || p.getBoundingClientRect().top < innerHeight)
            .every((p) => p.dataset.state === "drawn" || !p.getClientRects().length)"""
        end = time.monotonic() + 30
        # Not wait_for_function, which evaluates strings: the policy of the pages forbids that.
        while not self.page.evaluate(script, all_of_them):
            assert time.monotonic() < end, "plots are not drawn"
            self.page.wait_for_timeout(20)

    def assert_fits(self):
        """Assert that the page is not wider than its window."""
        assert self.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0

    def assert_looks_like(self, kept, *, is_whole_page=False):
        """Assert that the window, or the whole page, looks like a kept picture of a quarter of its width and height.

        The font is the same everywhere (tests/fonts.conf), its drawing differs between machines: at most 2 % of the
        cells of 8 x 8 pixels may differ by more than 32 of 255 in the mean of a color, and the height of a whole page
        by 1 %. TRACESTORE_KEEP_SCREENSHOTS=1 replaces the picture.
        """
        if not any(Path("/usr/share/fonts").rglob("DejaVuSans.ttf")):
            pytest.skip("the font DejaVu Sans is not installed")
        Image = pytest.importorskip("PIL.Image")
        seen = Image.open(io.BytesIO(self.page.screenshot(full_page=is_whole_page))).convert("RGB").reduce(4)
        if os.environ.get("TRACESTORE_KEEP_SCREENSHOTS"):
            kept.parent.mkdir(exist_ok=True)
            seen.quantize(128).save(kept, optimize=True)
        expected = Image.open(kept).convert("RGB")
        assert seen.width == expected.width
        assert abs(seen.height - expected.height) <= 0.01 * expected.height * is_whole_page
        share = share_of_different_cells(seen, expected)
        if share > 0.02:
            path = Path(tempfile.gettempdir()) / kept.name
            seen.save(path)
            raise AssertionError(f"{share:.1%} of {kept} differ, see {path}")

    def assert_prints(self):
        """Assert that a sheet of A4 holds the whole width, in light colors, with a picture of each plot, without controls."""
        num_plots = self.page.locator("[data-plot]").count()
        end = time.monotonic() + 30
        while self.page.locator("img.printed").count() < num_plots:
            assert time.monotonic() < end, "there is no picture of a plot for paper"
            self.page.wait_for_timeout(20)
        self.page.emulate_media(media="print")
        # 210 mm without margins of 12 mm.
        self.page.set_viewport_size({"width": 703, "height": 1000})
        found = self.page.evaluate("""() => ({
            wide: [...document.querySelectorAll("table, img, pre, figure, .card")]
                .filter((e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 200)),
            controls: [...document.querySelectorAll(".zoom, .tools, nav, [data-plot] canvas, .plot > [role=img]")]
                .filter((e) => e.checkVisibility()).length,
            pictures: [...document.querySelectorAll("img.printed")].filter((e) => e.checkVisibility() && e.naturalWidth).length,
            background: getComputedStyle(document.documentElement).backgroundColor,
        })""")
        assert found == {"wide": [], "controls": 0, "pictures": num_plots, "background": "rgb(255, 255, 255)"}
        self.assert_fits()
        assert self.page.pdf(format="A4").startswith(b"%PDF")
        self.page.emulate_media(media="screen")

    def assert_accessible(self):
        """Assert that axe-core finds no violation."""
        axe = pytest.importorskip("axe_playwright_python")
        script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
        # Defined through the debugger, because the policy forbids other scripts.
        self.page.evaluate(f"() => {{ {script} }}")
        found = self.page.evaluate("() => axe.run()")["violations"]
        assert not found, [(v["id"], v["help"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found]
