"""Fixtures: a store with malicious texts, results of training, and a server of both."""

import csv
import json
import math
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

import tracestore
from tests.helpers import ROOT, make_trace

COUNT = 450
MALICIOUS = (
    "<script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=2">',
    "$$\\href{javascript:window.hacked=3}{x}$$",
    "\u202etxt.exe @{window.hacked=4} {{7*7}}",  # codespell:ignore etxt
)
DETECTOR = "<b>gnn</b><img src=x onerror=window.hacked=5>"


def make_store(path, attention="heads"):
    """Make 450 traces: the first four malicious, every third hallucinated, every ninth without a score."""
    with tracestore.create(path, attention=attention) as writer:
        for k in range(COUNT):
            trace = make_trace(k, tokens=2 + k % 7, layers=4, dim=8, heads=3)
            trace["question"] = f"What is the number {k} of color {'red' if k % 2 else 'blue'}?"
            if k < len(MALICIOUS):
                trace |= {"question": MALICIOUS[k], "generated_answer_clean": MALICIOUS[k], "question_id": MALICIOUS[k]}
                trace["tokens_decoded"] = [MALICIOUS[k]] * (2 + k % 7)
            writer.append(trace, score=None if k % 9 == 8 else 0.1 if k % 3 == 0 else 0.9, group=("even", "odd")[k % 2])
    return path


def make_results(folder, store):
    """Write results.json and predictions.csv of two detectors and the probe. Trace 4 was tested twice."""
    folder.mkdir()
    curve = [0.7, 0.6, 0.5]
    entry = {
        "test": {"auroc": 0.75, "accuracy": 0.5},
        "history": {"train_loss": curve, "val_loss": curve, "val_auroc": [0.5, None, 0.7]},
    }
    scores = {"trace_index": [4, 5], "question_id": ["q4", "q5"], "sample": [0, 0], "group": ["", ""], "label": [0, 1]}
    entry |= {"threshold": 0.0, "temperature": 1.0, "test_scores": scores | {"logit": [0.0, 1.0]}}
    # Thresholds are logits: of the probability 0.95 for the second detector, 0.25 for the probe.
    results = {
        "models": {"lstm_solo": entry, DETECTOR: entry | {"threshold": math.log(0.95 / 0.05)}},
        "probe": entry | {"test": {"auroc": 0.8}, "threshold": math.log(0.25 / 0.75)},
        "config": {"seed": 42},
        "store": {"path": str(store), "provenance": []},
        "traces": "",
        "answers": None,
    }
    (folder / "results.json").write_text(json.dumps(results))
    names = ["question_id", "sample", "trace_index", "split", "fold", "seed", "label"]
    with (folder / "predictions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "lstm_solo", DETECTOR, "logistic_probe"])
        for k in range(4, 100):
            writer.writerow([f"q{k}", 0, k, "test", "", 42, "", 0.8 if k % 3 == 0 else 0.2, 0.9, 0.3])
        writer.writerow(["q4", 0, 4, "test", "", 43, "", 0.4, 0.7, 0.3])
        writer.writerow(["missing", 0, 999, "test", "", 42, "", 0.4, 0.7, 0.3])
    return folder


@pytest.fixture(scope="session")
def served_store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("serve") / "s.zarr")


@pytest.fixture(scope="session")
def results_folder(served_store):
    return make_results(served_store.parent / "results", served_store)


@dataclass
class Served:
    """A running server."""

    url: str
    port: int
    process: subprocess.Popen

    @property
    def token(self):
        return self.url.split("token=")[1]


def start(store, *options):
    """Start a server in a process of its own."""
    command = [sys.executable, "-m", "tracestore", "serve", store, "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    document = json.loads(text)
    return Served(document["url"], document["port"], process)


def stop(served):
    """Interrupt a server; return its exit code and standard error."""
    served.process.send_signal(signal.SIGINT)
    return served.process.wait(20), served.process.stderr.read()


@pytest.fixture(scope="module")
def served(served_store, results_folder):
    served = start(served_store, "--results", results_folder)
    yield served
    code, errors = stop(served)
    assert (code, errors) == (0, "stopped\n")
