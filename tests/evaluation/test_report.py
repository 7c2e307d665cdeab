"""Files for the user: report.html, plots and predictions.csv."""

import base64
import csv
import json
from html.parser import HTMLParser

import pytest

from tests.experiment.quiet import train_quietly
from tests.helpers import make_traces, write_store
from tracestore.console import nan_to_none
from tracestore.evaluation import report
from tracestore.evaluation.plots import PLOTS
from tracestore.train.config import TrainConfig

MALICIOUS = '</td><script src="//evil.example/x.js">alert(1)</script><img src=x onerror=alert(1)>&amp;\u202e'
QUESTION = '=HYPERLINK("//evil.example"),\r\n"quoted"'


class Page(HTMLParser):
    """Parser that collects the tags with their attributes, and the rows of the table under each heading."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tables, self.title, self.open = [], {}, "Models", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables[self.title] = []
        if tag == "tr":
            self.tables[self.title].append([])
        self.open = [tag]

    def handle_endtag(self, tag):
        self.open = []

    def handle_data(self, data):
        if self.open in (["td"], ["th"]):
            self.tables[self.title][-1].append(data)
        if self.open == ["h2"]:
            self.title = data


@pytest.fixture(scope="module", params=["plain", "folds"])
def finished(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    traces = make_traces(60, tokens=2)
    traces[7]["question_id"] = QUESTION
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


def test_the_report_uses_no_network_and_no_script(finished):
    folder, _ = finished
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= {"html", "meta", "title", "style", "h1", "h2", "p", "img"} | {
        "table",
        "tr",
        "td",
        "th",
    }
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert name in ("lang", "charset", "alt", "src"), (tag, name)
            assert name != "src" or value.startswith("data:image/png;base64,")
    images = [a["src"].partition(",")[2] for tag, a in page.tags if tag == "img"]
    assert [base64.b64decode(i) for i in images] == [(folder / name).read_bytes() for name in PLOTS]
    assert "url(" not in text and "@import" not in text and "//" not in text.partition("<h1>")[0]


def test_the_report_contains_the_results(finished):
    folder, results = finished
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    tables = page.tables
    models = {row[0]: row[1:] for row in tables["Models"][1:]}
    assert list(models) == ["lstm_solo", "gnn_det_lstm", "logistic probe"]
    test = results["models"]["lstm_solo"]["test"]
    low, high = test["auroc_interval"]
    assert models["lstm_solo"][:2] == [str(test["num_traces"]), f"{test['auroc']:.3f} ({low:.3f} to {high:.3f})"]
    assert models["lstm_solo"][3:5] == [f"{test['brier']:.3f}", f"{test['ece']:.3f}"]
    assert [row[0] for row in tables["Comparisons"][1:]] == [
        "lstm_solo - gnn_det_lstm",
        "lstm_solo - logistic probe",
        "gnn_det_lstm - logistic probe",
    ]
    assert {"Calibration", "AUROC by group", "Traces", "Configuration", "Store"} <= set(tables)
    assert ("Runs" in tables) == ("runs" in results)
    counts = {(row[0], row[1]): [int(c) for c in row[2:]] for row in tables["Traces"][1:]}
    assert sum(sum(c) for (fold, _), c in counts.items() if fold == "0") == 60
    config = {row[0]: row[1] for row in tables["Configuration"][1:]}
    assert config["lstm_hidden"] == "4" and config["seed"] == "3"
    text = report.format_table(results)
    assert text.splitlines()[1].startswith("lstm_solo") and len(text.splitlines()) == 8
    assert len({len(line) for line in text.splitlines()[:4]}) == 1


def test_malicious_names_are_escaped(finished):
    folder, results = finished
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    groups = {g["group"]: g for g in results["models"]["lstm_solo"]["by_group"]}
    shown = {row[0]: row for row in page.tables["AUROC by group"][1:]}
    assert len(shown) == len(groups)
    if MALICIOUS in groups:
        row = shown[MALICIOUS.replace("\u202e", "\\u202e")]
        assert [int(c) for c in row[1:3]] == [groups[MALICIOUS]["num_traces"], groups[MALICIOUS]["num_hallucinated"]]
    if "runs" in results:
        assert MALICIOUS in groups and sum(g["num_traces"] for g in groups.values()) == 60


def test_oom_events_are_listed(finished, tmp_path):
    _, results = finished
    event = {"epoch": 0, "step": 3, "phase": "<forward>", "size_before": 16, "size_after": 8}
    models = {name: {**entry, "oom_events": [event]} for name, entry in results["models"].items()}
    report.write_page({**results, "models": models}, [], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    rows = page.tables["Out of memory"]
    assert rows[1] == ["lstm_solo", "0", "3", "<forward>", "16", "8"] and len(rows) == 3


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
