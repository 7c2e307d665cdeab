"""Make the pictures of docs/gallery.md, light and dark, from a store and the results of training.

    python docs/make_pictures.py STORE RESULTS_DIR

Needs Chromium; without it the pictures are left unchanged. The script compares the detectors on the same store.
"""

import argparse
import io
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

PICTURES = Path(__file__).parent / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main() -> None:
    """Make the pages of a store and save pictures of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", metavar="STORE", type=Path)
    parser.add_argument("results", metavar="RESULTS_DIR", type=Path)
    args = parser.parse_args()
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        print(f"none of {', '.join(BROWSERS)} is installed: the pictures are left unchanged")
        return
    tracestore = [sys.executable, "-m", "tracestore"]
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        # The pages name the store as the command does.
        (folder / "store.zarr").symlink_to(args.store.resolve())
        subprocess.run([*tracestore, "view", args.store, "0", "--output", folder / "view.png"], check=True)
        save("view", (folder / "view.png").read_bytes())
        subprocess.run([*tracestore, "benchmark", "store.zarr"], cwd=folder, check=True)
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        files = {
            "report": args.results / "report.html",
            "benchmark": folder / "benchmark" / "report.html",
        }
        photograph(browser, {picture: file.resolve().as_uri() for picture, file in files.items()})
        (folder / "results").symlink_to(args.results.resolve())
        command = [*tracestore, "serve", "store.zarr", "--results", "results", "--json"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                text += server.stdout.readline()
            try:
                url = json.loads(text)["url"]
                path = url.partition("?")[0]
                pages = {"trace": "trace/0", "predictions": "results"}
                photograph(browser, {"serve": url} | {f"serve-{key}": path + page for key, page in pages.items()})
            finally:
                server.send_signal(signal.SIGINT)
        browser.close()


def photograph(browser: Browser, urls: dict[str, str]) -> None:
    """Save a light and a dark picture of the upper part of each page."""
    for suffix in ("", "-dark"):
        scheme: Literal["light", "dark"] = "dark" if suffix else "light"
        page = browser.new_page(viewport={"width": 1110, "height": 1330}, color_scheme=scheme)
        for name, url in urls.items():
            page.goto(url)
            prepare(page, name)
            page.wait_for_timeout(1_500)
            save(name + suffix, page.screenshot())
        page.context.close()


def prepare(page: Page, name: str) -> None:
    """Bring the page of a picture into the state that is shown."""
    if name == "serve":
        page.get_by_label("Order by").select_option("score")
    elif name.startswith("serve-"):
        page.locator("[data-state=drawn]").first.wait_for()
    if name == "serve-trace":
        page.locator("#view").evaluate("(part) => part.scrollIntoView()")


def save(name: str, picture: bytes) -> None:
    """Save a picture of at most 256 colors."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
