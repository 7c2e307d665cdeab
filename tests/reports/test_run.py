"""Files for the user: report.html and predictions.csv."""

import csv
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import tracestore
from tests.experiment.quiet import train_quietly
from tests.helpers import make_traces, write_store
from tracestore.console import nan_to_none
from tracestore.evaluation.store_split import make_split
from tracestore.reports import comparison_page, curves, detector_tables
from tracestore.reports.controls import control_entries
from tracestore.reports.run_page import RunFacts, report_page
from tracestore.train.config import TrainConfig

MALICIOUS = '</td><script src="//evil.example/x.js">alert(1)</script><img src=x onerror=alert(1)>&amp;\u202e'
QUESTION = '=HYPERLINK("//evil.example"),\r\n"quoted"'


class Page(HTMLParser):
    """Parser that collects the tags with their attributes, the rows of each table by its caption, and the headings."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tables, self.headings, self.text, self.open, self.rows = [], {}, [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.rows = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "h2":
            self.headings.append("")
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        if tag in ("td", "th"):
            self.rows[-1][-1] += data
        if tag == "caption":
            self.tables[data] = self.rows
        if tag == "h2":
            self.headings[-1] += data
        if tag not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module", params=["plain", "folds"])
def finished(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    traces = make_traces(60, tokens=2)
    traces[7]["question_id"] = QUESTION
    for trace in traces:
        trace |= {
            "question": f"{MALICIOUS} question",
            "token_logprob": np.array([-0.5, -2], "f4"),
            "reference": "Paris",
        }
    write_store(
        folder / "store.zarr", traces, score=lambda k: k % 2, group=lambda k: MALICIOUS if k < 20 else f"g{k % 8}"
    )
    config = TrainConfig(epochs=2, loader_threads=1, seed=3)
    folds = {"folds": 2, "seeds": 2} if request.param == "folds" else {}
    sizes = {"lstm_hidden": 4, "gnn_hidden": 4}
    results = train_quietly(
        folder / "store.zarr", folder / "r", ["lstm_solo", "gnn_det_lstm"], config, sizes, probe=True, **folds
    )
    return folder / "r", results


@pytest.fixture
def page(finished):
    return Page((finished[0] / "report.html").read_text(encoding="utf-8"))


@pytest.mark.long
def test_sections_begin_with_the_verdict_and_end_with_the_configuration(finished, page):
    assert page.headings == [
        "Verdict", "Models", "Training", "Ranking", "Calibration", "Scores by class", "Layers", "Groups", "Lengths",
        "Most confident mistakes", "Runs", "Out of memory", "Memory and time", "Configuration",
    ]  # fmt: skip
    best = max(detector_tables.entries_of(finished[1]), key=lambda item: item[1]["test"]["auroc"])[0]
    assert f"{best} has the highest AUROC" in page.text
    for fact in ("60", "30 hallucinated (50 %)", tracestore.__version__, str(finished[0].parent / "store.zarr")):
        assert fact in page.text


@pytest.mark.long
def test_the_report_contains_the_results(finished, page):
    _, results = finished
    tables = page.tables
    models = {row[0].removesuffix(" (best)"): row[1:] for row in tables["Test split"][1:]}
    controls = ["number of tokens", "mean log-probability"]
    assert list(models) == ["lstm_solo", "gnn_det_lstm", "logistic probe", *controls]
    test = results["models"]["lstm_solo"]["test"]
    low, high = test["auroc_interval"]
    counts = [str(test["num_traces"]), str(test["num_questions"])]
    assert models["lstm_solo"][:4] == ["detector", *counts, f"{test['auroc']:.3f} ({low:.3f} to {high:.3f})"]
    assert models["lstm_solo"][5:7] == [f"{test['brier']:.3f}", f"{test['ece']:.3f}"]
    # All traces have two tokens and the same log-probabilities.
    assert results["controls"]["number of tokens"]["test"]["auroc"] == 0.5
    assert results["controls"]["mean log-probability"]["test"]["auroc"] == 0.5
    assert [row[0] for row in tables["Differences"][1:]] == [
        "lstm_solo - gnn_det_lstm",
        "lstm_solo - logistic probe",
        "gnn_det_lstm - logistic probe",
    ]
    assert ("Test AUROC of each run" in tables) == ("runs" in results)
    counted = [row for row in tables["Traces of the splits"][1:] if row[0] in ("–", "0")]
    assert sum(int(row[2]) + int(row[3]) for row in counted) == 60
    config = {row[0]: row[1] for row in tables["Options of the run"][1:]}
    assert config["lstm_hidden"] == "4" and config["seed"] == "3"
    text = detector_tables.format_table(results)
    assert text.splitlines()[1].startswith("lstm_solo") and len(text.splitlines()) == 8
    assert len({len(line) for line in text.splitlines()[:4]}) == 1


def test_curves_show_the_probe(finished, page):
    specs = re.findall(r'<script type="application/json">(.*?)</script>', (finished[0] / "report.html").read_text())
    plots = list(map(json.loads, specs))
    first = plots[0]
    assert first["x"]["integer"] and [s["name"] for s in first["series"]] == ["lstm_solo", "gnn_det_lstm"]
    assert first["references"][0][0] == "logistic probe, validation" and first["series"][0]["x"] == [1, 2]
    names = [[s["name"].rsplit(" ", 1)[0] for s in p["series"]] for p in plots if p.get("square")]
    assert len(names) == 4 and all("logistic" in " ".join(of) for of in names)
    kinds = {tag for tag, _ in page.tags}
    assert "img" not in kinds and "iframe" not in kinds


def test_malicious_names_are_escaped(finished, page):
    _, results = finished
    groups = {g["group"]: g for g in results["models"]["lstm_solo"]["by_group"]}
    shown = {row[0]: row for row in page.tables["AUROC by group"][1:]}
    assert len(shown) == len(groups)
    if MALICIOUS in groups:
        row = shown[MALICIOUS.replace("\u202e", "\\u202e")]
        assert [int(c) for c in row[1:3]] == [groups[MALICIOUS]["num_traces"], groups[MALICIOUS]["num_hallucinated"]]
    if "runs" in results:
        assert MALICIOUS in groups and sum(g["num_traces"] for g in groups.values()) == 60
    assert all(a.keys() <= {"type"} for tag, a in page.tags if tag == "script")


def test_mistakes_are_cards_with_the_command_that_opens_the_trace(finished, page):
    folder, _ = finished
    cards = [a for tag, a in page.tags if tag == "article"]
    assert cards and len(cards) <= 12
    assert f"tracestore view {folder.parent / 'store.zarr'} q" in page.text
    assert "Reference: Paris" in page.text and "log-probability" in page.text
    assert f"Question: {MALICIOUS}".replace("\u202e", "\\u202e") in page.text


def test_a_comparison_draws_the_trainings_that_both_runs_have(finished):
    _, results = finished
    if "runs" in results:
        results = results | {"models": {}}  # the means of all trainings
        fewer = results | {"runs": [run for run in results["runs"] if run["seed"] == 3]}
        found = comparison_page._plots({"a": results, "b": fewer}, "lstm_solo")
        assert found == comparison_page._plots({"a": fewer, "b": fewer}, "lstm_solo")
        assert found != comparison_page._plots({"a": results, "b": results}, "lstm_solo")


def test_oom_events_are_listed(finished):
    folder, results = finished
    event = {"epoch": 0, "step": 3, "phase": "<forward>", "size_before": 16, "size_after": 8}
    models = {name: {**entry, "oom_events": [event]} for name, entry in results["models"].items()}
    with tracestore.open(folder.parent / "store.zarr") as store:
        text = report_page({**results, "models": models}, store, RunFacts("tracestore train", None, 5 << 20), folder)
    rows = Page(text).tables["Recovered out-of-memory errors"]
    assert rows[1] == ["lstm_solo", "1", "3", "<forward>", "16", "8"] and len(rows) == 3
    assert "5.0 MiB" in text or "5 MiB" in text


def test_predictions_contain_each_tested_trace(finished):
    folder, results = finished
    with (folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = ["lstm_solo", "gnn_det_lstm", "logistic_probe"]
    assert list(rows[0]) == ["question_id", "sample", "trace_index", "split", "fold", "seed", "label", *names]
    of = {(int(r["trace_index"]), int(r["seed"])): r for r in rows}
    assert len(of) == len(rows) == (120 if "runs" in results else results["models"]["lstm_solo"]["test"]["num_traces"])
    assert list(of) == sorted(of, key=lambda key: (key[1], key[0]))
    for (trace, _), row in of.items():
        assert row["question_id"] == (QUESTION if trace == 7 else f"q{trace}") and row["label"] == str(1 - trace % 2)
        assert (row["fold"] == "") == ("runs" not in results)
    written = json.loads((folder / "results.json").read_text())
    assert written == nan_to_none(json.loads(json.dumps(results)))


def test_curves_of_known_scores():
    y, score = np.array([0, 1, 0, 1]), np.array([0.1, 0.2, 0.3, 0.4])
    x, rate = curves.roc(y, score)
    assert list(zip(x, rate, strict=True)) == [(0, 0), (0, 0.5), (0.5, 0.5), (0.5, 1), (1, 1)]
    recall, precision = curves.precision_recall(y, score)
    assert list(recall) == [0, 0.5, 0.5, 1, 1]
    assert precision == pytest.approx([1, 1, 1 / 2, 2 / 3, 1 / 2])
    coverage, risk = curves.risk_coverage(y, score)
    assert list(coverage) == [0, 0.25, 0.5, 0.75, 1] and risk == pytest.approx([0, 0, 1 / 2, 1 / 3, 1 / 2])


def test_length_bins_cover_every_length_once():
    lengths = np.random.default_rng(0).integers(3, 90, 500)
    bins = curves.length_bins(lengths)
    assert sum(((lengths >= first) & (lengths <= last)).sum() for first, last in bins) == 500
    assert curves.length_bins(np.array([5, 5])) == [(5, 5)]


@pytest.mark.parametrize("told_by", ["prompt_length", "answer_span", "generated_mask", "last_turn", "answer_inside"])
def test_the_control_reads_the_log_probabilities_of_the_answer(tmp_path, told_by):
    """Those of the prompt, whose order is the opposite one, do not count, whatever tells where the answer is."""
    mask = np.array([0] * 6 + [1] * 2, np.uint8)
    fields = {
        "prompt_length": {"prompt_length": 6},
        "answer_span": {"answer_span": (6, 8)},
        "generated_mask": {"generated_mask": mask},
        "last_turn": {"generated_mask": mask | np.array([1, 1, 0, 0, 0, 0, 0, 0], np.uint8)},
        "answer_inside": {"prompt_length": 1, "answer_span": (6, 8)},
    }[told_by]
    traces = make_traces(20, tokens=8)
    for k, trace in enumerate(traces):
        is_wrong = k % 2
        trace |= fields | {"token_logprob": np.array([-9.0 + 8 * is_wrong] * 6 + [-1.0 - is_wrong] * 2, "f4")}
    with tracestore.open(write_store(tmp_path / "s.zarr", traces, label=lambda k: k % 2)) as store:
        entries = control_entries(store, [make_split(store, store.targets(), 0)], store.targets(), 0)
    assert entries["mean log-probability"]["test"]["auroc"] == 1
