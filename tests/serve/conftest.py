"""A store with hostile texts, what training left beside it, and a server of both."""

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
HOSTILE = (
    "<script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=2">',
    "$$\\href{javascript:window.hacked=3}{x}$$",
    "\u202etxt.exe @{window.hacked=4} {{7*7}}",
)
DETECTOR = "<b>gnn</b><img src=x onerror=window.hacked=5>"


def make_store(path, attention="heads"):
    """450 traces, every third hallucinated, every ninth without a score; the first four hostile."""
    with tracestore.create(path, attention=attention) as writer:
        for k in range(COUNT):
            trace = make_trace(k, tokens=2 + k % 7, layers=4, dim=8, heads=3)
            trace["question"] = f"What is the number {k} of colour {'red' if k % 2 else 'blue'}?"
            if k < len(HOSTILE):
                trace |= {"question": HOSTILE[k], "generated_answer_clean": HOSTILE[k], "question_id": HOSTILE[k]}
                trace["tokens_decoded"] = [HOSTILE[k]] * (2 + k % 7)
            writer.append(trace, score=None if k % 9 == 8 else 0.1 if k % 3 == 0 else 0.9)
    return path


def make_results(folder, store):
    """results.json and predictions.csv of two detectors; the second test of trace 4 counts half."""
    folder.mkdir()
    curve = [0.7, 0.6, 0.5]
    entry = {
        "test": {"auroc": 0.75, "accuracy": 0.5},
        "history": {"train_loss": curve, "val_loss": curve, "val_auroc": [0.5, None, 0.7]},
    }
    # As logits: 0.95 is where the second one begins to say "hallucinated", 0.25 where the probe does.
    results = {
        "models": {"lstm_solo": entry, DETECTOR: entry | {"threshold": math.log(0.95 / 0.05)}},
        "probe": {"test": {"auroc": 0.8}, "threshold": math.log(0.25 / 0.75)},
    }
    (folder / "results.json").write_text(json.dumps(results))
    names = ["question_id", "sample", "trace_index", "split", "fold", "seed", "label"]
    with (folder / "predictions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "lstm_solo", DETECTOR, "logistic_probe"])
        for k in range(4, 100):
            writer.writerow([f"q{k}", 0, k, "test", "", 42, "", 0.8 if k % 3 == 0 else 0.2, 0.9, 0.3])
        writer.writerow(["q4", 0, 4, "test", "", 43, "", 0.4, 0.7, 0.3])
        writer.writerow(["gone", 0, 999, "test", "", 42, "", 0.4, 0.7, 0.3])
    return folder


@pytest.fixture(scope="session")
def served_store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("serve") / "s.zarr")


@pytest.fixture(scope="session")
def results_folder(served_store):
    return make_results(served_store.parent / "results", served_store)


@dataclass
class Served:
    url: str
    port: int
    process: subprocess.Popen

    @property
    def token(self):
        return self.url.split("token=")[1]


def start(store, *options):
    command = [sys.executable, "-m", "tracestore", "serve", store, "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    said = json.loads(text)
    return Served(said["url"], said["port"], process)


def stop(served):
    served.process.send_signal(signal.SIGINT)
    return served.process.wait(20), served.process.stderr.read()


@pytest.fixture(scope="module")
def served(served_store, results_folder):
    served = start(served_store, "--results", results_folder)
    yield served
    code, errors = stop(served)
    assert (code, errors) == (0, "stopped\n")
