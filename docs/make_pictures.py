"""Make the pictures of docs/looking.md from a store and the results of training.

    python docs/make_pictures.py STORE RESULTS_DIR

Needs Chromium.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).parent / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main() -> None:
    """Save a picture of a trace and of each page of the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("results", metavar="RESULTS_DIR")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error(f"none of {', '.join(BROWSERS)} is installed")
    tracestore = [sys.executable, "-m", "tracestore"]
    subprocess.run([*tracestore, "view", args.store, "0", "--save", PICTURES / "view.png"], check=True)
    command = [*tracestore, "serve", args.store, "--results", args.results, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        try:
            photograph(json.loads(text)["url"], browser)
        finally:
            server.send_signal(signal.SIGINT)


def photograph(url: str, browser: str) -> None:
    """Save screenshots of the pages at an address."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1110, "height": 1330})
        page.goto(url)
        page.get_by_label("Order by").select_option("score")
        page.wait_for_timeout(1_000)
        page.screenshot(path=PICTURES / "serve.png")
        for name, path in (("trace", "trace/0"), ("projection", "projection"), ("predictions", "results")):
            page.goto(f"{url.partition('?')[0]}{path}")
            page.locator("[data-state=drawn]").first.wait_for()
            if name == "trace":
                page.locator("#view").evaluate("(part) => part.scrollIntoView()")
            page.wait_for_timeout(1_000)
            page.screenshot(path=PICTURES / f"serve-{name}.png")
        chromium.close()


if __name__ == "__main__":
    main()
