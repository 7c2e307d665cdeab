"""Measure `tracestore serve` in Chromium on a store of 100,000 small traces.

    python bench/serve.py [FOLDER]

FOLDER keeps the store for another run. Each line is the median and the maximum of the rounds, from the action of the visitor
to the content on the page.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import tracestore

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser import BROWSER, OpenPage
from tests.helpers import make_trace
from tests.serve.conftest import start, stop

WORDS = [
    "what",
    "is",
    "the",
    "number",
    "color",
    "red",
    "river",
    "city",
    "capital",
    "atom",
    "who",
    "wrote",
    "when",
    "film",
]


def make_store(path: Path, count: int) -> None:
    """Write `count` traces of 2 to 8 tokens with questions of twelve words, answers of eight, scores and 50 groups."""
    rng = np.random.default_rng(0)
    base = [make_trace(k, tokens=2 + k % 7, layers=4, dim=8, heads=3) for k in range(64)]
    with tracestore.create(path) as writer:
        for k in range(count):
            question, answer = (" ".join(WORDS[j] for j in rng.integers(0, len(WORDS), n)) for n in (12, 8))
            trace = base[k % len(base)] | {"question_id": f"question-{k:06d}", "source_position": k}
            trace |= {"question": f"{question.capitalize()} {k}?", "generated_answer_clean": f"{answer.capitalize()} é"}
            writer.append(trace, score=None if k % 9 == 8 else 0.1 if k % 3 == 0 else 0.9, group=f"topic {k % 50}")


def measure(browser: object, store: Path, rounds: int) -> None:
    """Print the times of the first page and of each action, and the memory of the server."""
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        times.setdefault(name, []).append(time.perf_counter() - begin)

    for _ in range(rounds):
        begin = time.perf_counter()
        served = start(store)
        times.setdefault("start of the server", []).append(time.perf_counter() - begin)
        address = f"http://127.0.0.1:{served.port}"
        cookie = {"name": f"tracestore-{served.port}", "value": served.token, "url": address}
        with OpenPage(browser, f"{address}/store", cookies=[cookie]) as visit:
            page = visit.page

            def found(count: str) -> None:
                page.locator(".message").filter(has_text=f"of {count} found").wait_for()

            found("100,000")
            # From the request to the complete page, without the start of a window.
            script = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
            times.setdefault("first page", []).append(page.evaluate(script) / 1e3)
            words = page.get_by_label("Words in id")
            timed("first search", lambda: (words.fill("question-0012"), found("100")))
            timed("later search", lambda: (words.fill("question-00124"), found("10")))
            timed("search of a letter", lambda: (words.fill("e"), found("100,000")))
            timed("group", lambda: (page.locator("select[name=group]").select_option("topic 3"), found("2,000")))
            page.locator("select[name=order]").select_option("score")
            timed("order", lambda: (page.get_by_label("largest first").check(),
                                    page.locator(".traces tbody th").first.filter(has_text="103").wait_for()))  # fmt: skip
            timed("page 2", lambda: (page.locator(".numbers a").filter(has_text="2").first.click(),
                                     page.locator(".message").filter(has_text="101 to 200").wait_for()))  # fmt: skip
            timed("trace", lambda: (page.goto(f"{address}/trace/153"), visit.wait_for_plots(all_of_them=False)))
            timed("projection", lambda: (page.goto(f"{address}/projection"), visit.wait_for_plots()))
            status = Path(f"/proc/{served.process.pid}/status").read_text(encoding="utf-8")
            memory = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        stop(served)
    for name, values in times.items():
        print(f"{name:22} {statistics.median(values):6.3f} s, at most {max(values):6.3f} s")
    print(f"memory of the server   {memory:6.0f} MiB at most")


def main() -> None:
    """Make the store unless it exists, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--traces", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        store = (args.folder or Path(scratch)) / "serve.zarr"
        if not store.exists():
            make_store(store, args.traces)
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        measure(browser, store, args.rounds)
        browser.close()


if __name__ == "__main__":
    main()
