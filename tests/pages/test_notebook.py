"""Test what notebooks show of stores, traces, loaders and results: values, styles without effect outside, no script."""

import json
import re
from pathlib import Path

import pytest

import tracestore
from tests.browser import OpenPage
from tests.helpers import make_optional, make_traces, write_store
from tests.pages.example import MALICIOUS
from tracestore.pages.notebook import fragment
from tracestore.reports.benchmark_page import BenchmarkResults
from tracestore.reports.detector_tables import TrainingResults

SCREENSHOTS = Path(__file__).parent / "screenshots"
TEST = {"num_traces": 60, "auroc": 0.8123, "auroc_interval": [0.7, 0.9], "auprc": 0.7, "brier": 0.2, "ece": 0.1, "accuracy": 0.75, "f1": 0.7} | {"num_questions": 50, "auprc_interval": None, "precision": 0.7, "recall": 0.7}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    traces = make_traces(6, tokens=4)
    for k, trace in enumerate(traces):
        text = MALICIOUS[k % len(MALICIOUS)]
        trace |= {"question": text, "question_id": f"{text}{k}", "generated_answer_clean": text}
        trace["tokens_decoded"] = [text] * 4
    traces[1] |= make_optional(4)
    path = tmp_path_factory.mktemp("notebook") / "s.zarr"
    write_store(path, traces, score=lambda k: k / 6, provenance={"model": MALICIOUS[0]})
    with tracestore.open(path) as opened:
        yield opened


def results():
    """Return results of training and of a benchmark, with malicious names."""
    pair = {
        "first": MALICIOUS[0],
        "second": "lstm",
        "difference": 0.05,
        "interval": None,
        "p": 0.01,
        "p_holm": 0.02,
        "method": "delong",
    }
    trained = {
        "models": {MALICIOUS[0]: {"test": TEST}, "lstm": {"test": TEST}, "unfinished": {}},
        "probe": {"test": TEST},
    }
    trained |= {"comparisons": [pair], "store": {"path": MALICIOUS[1], "num_traces": 600}, "config": {"seed": 42}}
    scheme = {
        "auroc": 0.8,
        "interval_by_question": [0.7, 0.9],
        "within_group_auroc": float("nan"),
        "auprc": 0.7,
        "ece": 0.1,
        "interval_by_group": None,
        "num_without_score": 0,
    }
    scheme |= dict.fromkeys(("prr", "risk_coverage_area", "brier"), 0.2)
    detector = {"kind": "probe", "peak_bytes": 2**20, "fit_s": 1.0, "score_s": 1.0, "schemes": {"question": scheme}}
    entry = {
        "detectors": {MALICIOUS[0]: detector},
        "folds": {"schemes": ["question"]},
        "comparisons": [],
        "skipped": {"lens": MALICIOUS[2]},
    }
    return TrainingResults(trained), BenchmarkResults({"stores": {MALICIOUS[1]: entry | {"num_traces": 60}}})


@pytest.fixture
def fragments(store):
    shown = (store, store[:2], store[0], store[1], tracestore.TraceLoader(store, "graph", batch_size=4), *results())
    return [value._repr_html_() for value in shown]


def test_values_are_shown(fragments):
    of_store, of_subset, trace, with_logprobs, loader, trained, compared = fragments
    assert "<dt>traces</dt><dd>6</dd>" in of_store and "First 5 traces" in of_store and "First 2 traces" in of_subset
    assert "attention of the last token, layer 1" in trace and "3 x 4 x 8" in trace
    assert "log-probability" in with_logprobs
    assert "<dt>batches of an epoch</dt><dd>2</dd>" in loader and "<dt>batch size</dt><dd>4</dd>" in loader
    assert "0.812" in trained and "0.700 to 0.900" in trained and "logistic probe" in trained and "+0.050" in trained
    assert "folds by question" in compared and "1.0 MiB" in compared


def test_fragments_are_scoped_and_without_scripts(fragments):
    for text in fragments:
        assert not re.search(r"<(?:script|img|svg|link|iframe)\b| on\w+=\"|url\(|@import", text)
        style = re.search(r"<style>(.*?)</style>", text)[1]
        selectors = [s for block in re.findall(r"([^{}]+)\{[^}]*\}", style) for s in block.split(",")]
        assert len(style) < 3_000 and all(s.strip().startswith(".tracestore") for s in selectors)
        assert text.startswith('<div class="tracestore">') and text.endswith("</div>")


def test_malicious_texts_are_inert_and_fragments_accessible(chromium, fragments, tmp_path):
    page = tmp_path / "notebook.html"
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>notebook</title><main><h1>n</h1><h2>n</h2>'
    page.write_bytes((head + "".join(fragments)).encode("utf-8", "backslashreplace"))
    with OpenPage(chromium, page, 1000) as visit:
        assert visit.page.locator(".tracestore").count() == len(fragments)
        visit.assert_accessible()


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_fragments_look_as_kept(chromium, fragments, tmp_path, width, scheme):
    page = tmp_path / "notebook.html"
    # The background of a notebook in dark mode is dark.
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>notebook</title>'
    head += '<meta name="color-scheme" content="light dark">'
    page.write_bytes((head + "<hr>".join(fragments)).encode("utf-8", "backslashreplace"))
    with OpenPage(chromium, page, width, scheme) as visit:
        visit.assert_fits()
        # The folder of the store differs from run to run.
        for name in visit.page.locator("h3, dd", has_text=".zarr").all():
            name.evaluate("(e) => { e.textContent = 's.zarr'; }")
        visit.assert_looks_like(SCREENSHOTS / f"notebook-{width}-{scheme}.png", is_whole_page=True)


def test_results_are_dicts():
    trained, compared = results()
    assert json.loads(json.dumps(trained))["config"] == {"seed": 42} and "stores" in compared
    assert fragment("<b>", "<i>", values={"a": None}).endswith('&lt;b&gt;</h3><dl class="facts"></dl>&lt;i&gt;</div>')
