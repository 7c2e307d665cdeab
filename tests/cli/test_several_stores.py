"""Commands that read several stores as one, and those that take one store."""

import csv
import json
import shutil
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracestore
from tests.helpers import command, error_of, make_trace, make_traces, write_store
from tracestore.serve.results import Results
from tracestore.store.maintain.merge import merge_stores

FAST = ("--epochs", 2, "--batch-size", 8, "--models", "lstm_solo", "--no-probe", "--num-threads", 1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Paths of two stores and of their merged store."""
    folder = tmp_path_factory.mktemp("stores")
    traces = make_traces(70, tokens=lambda k: 2 + k % 4)
    for k, trace in enumerate(traces):
        trace["hidden_states"] = [layer + np.float16(k % 2) for layer in trace["hidden_states"]]
    paths = [
        write_store(folder / name, part, score=lambda k: k % 2)
        for name, part in (("a.zarr", traces[:30]), ("b.zarr", traces[30:]))
    ]
    merge_stores(paths, folder / "merged.zarr")
    return *paths, folder / "merged.zarr"


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def with_stores(path, stores):
    """Return the rows of a file of the merged store, with the column that the two stores add."""
    return [row | {"store": str(stores[int(row["question_id"][1:]) >= 30])} for row in rows_of(path)]


def without_times(entry):
    return {name: value for name, value in entry.items() if "seconds" not in name and "bytes" not in name}


@pytest.fixture(scope="module")
def trained(stores, tmp_path_factory):
    """The folder of a training on two stores."""
    folder = tmp_path_factory.mktemp("trained") / "both"
    command("train", *stores[:2], "--output", folder, *FAST, check=0)
    return folder


@pytest.mark.long
def test_a_training_on_two_stores_equals_that_on_the_merged_store(stores, trained, tmp_path):
    command("train", stores[2], "--output", tmp_path / "merged", *FAST, check=0)
    both, merged = results_of(trained), results_of(tmp_path / "merged")
    assert both["split"] == merged["split"] and both["traces"] == merged["traces"]
    entries = [without_times(results["models"]["lstm_solo"]) for results in (both, merged)]
    assert entries[0]["test"] == entries[1]["test"] and entries[0]["test_scores"] == entries[1]["test_scores"]
    assert rows_of(trained / "predictions.csv") == with_stores(tmp_path / "merged" / "predictions.csv", stores)
    named = both["store"]["stores"]
    assert [(s["path"], s["num_traces"]) for s in named] == [(str(stores[0]), 30), (str(stores[1]), 40)]
    assert both["store"]["path"] == f"{stores[0]} + {stores[1]}" and "stores" not in merged["store"]


@pytest.mark.long
def test_resume_names_the_stores_and_refuses_others(stores, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    command("train", "--store", stores[0], "--store", stores[1], "--output", folder, *FAST, "--resume", check=0)
    assert results_of(folder)["models"]["lstm_solo"]["test"] == results_of(trained)["models"]["lstm_solo"]["test"]
    longer = [3 if word == 2 else word for word in FAST]
    message = error_of("train", *stores[1::-1], "--output", folder, *longer, "--resume", code=2)
    assert "stores" in message or "another" in message, message


def test_predict(stores, trained, tmp_path):
    words = ["--checkpoint", trained / "lstm_solo" / "best.pt", "--num-threads", 1]
    done = command("predict", *stores[:2], *words, "--output", tmp_path / "both.csv", "--json", check=0)
    command("predict", stores[2], *words, "--output", tmp_path / "merged.csv", check=0)
    assert rows_of(tmp_path / "both.csv") == with_stores(tmp_path / "merged.csv", stores)
    assert json.loads(done.stdout)["store"] == f"{stores[0]} + {stores[1]}" and "more than one" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "flipped", "differing"),
    [(10, range(10, 30), 20), (29, [29], 1), (29, [], 0), (0, [5, 7, 9, 28], 4), (0, range(0, 30, 3), 10)],
)
def test_keys_that_two_stores_have_are_told(stores, trained, tmp_path, first, flipped, differing):
    """The second store has the last questions of the first one again, some with the other label, and ten new ones."""
    again = make_traces(40, tokens=lambda k: 2 + k % 4)[first:]
    score = [(k in flipped) ^ (k % 2) for k in range(first, 40)]
    path = write_store(tmp_path / "again.zarr", again, score=score.__getitem__)
    text = f"keys (question id and sample) in more than one store: {30 - first}"
    done = command("train", stores[0], path, "--output", tmp_path / "r", *FAST, check=0)
    assert f"{text}, {differing} of them with different labels\n" in done.stdout + done.stderr
    rows = rows_of(tmp_path / "r" / "predictions.csv")
    assert len(rows) == len({(row["question_id"], row["sample"], row["store"]) for row in rows})
    words = ["--checkpoint", trained / "lstm_solo" / "best.pt", "--num-threads", 1, "--output", tmp_path / "p.csv"]
    done = command("predict", stores[0], path, *words, check=0)
    assert f"{text}\n" in done.stdout + done.stderr
    rows = rows_of(tmp_path / "p.csv")
    assert [(row["store"], row["question_id"]) for row in rows] == [
        *((str(stores[0]), f"q{k}") for k in range(30)),
        *((str(path), f"q{k}") for k in range(first, 40)),
    ]
    with tracestore.open(path) as opened:
        shown = Results.read([tmp_path / "p.csv"], opened)
    expected = [float(row["hallucination_score"]) for row in rows[30:]]
    assert shown.probabilities["hallucination_score"].tolist() == expected and shown.num_unknown == 30


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 5), st.sampled_from([None, 0, 1]), min_size=1), min_size=1, max_size=4))
def test_shared_keys_of_any_stores(tmp_path_factory, labels_of):
    """labels_of: for each store the labels by the number of the question."""
    folder = tmp_path_factory.mktemp("stores")
    paths = [
        write_store(folder / f"{k}.zarr", map(make_trace, labels), label=list(labels.values()).__getitem__)
        for k, labels in enumerate(labels_of)
    ]
    by_key = defaultdict(list)
    for labels in labels_of:
        for number, label in labels.items():
            by_key[number].append(label)
    shared = [found for found in by_key.values() if len(found) > 1]
    differing = sum({0, 1} <= set(found) for found in shared)
    with tracestore.open(paths) as store:
        assert sorted(map(len, store.internals.shared_keys())) == sorted(map(len, shared))
        assert bool(shared) == bool(lines := store.describe_shared_keys(store.y))
        assert not shared or lines[0].endswith(f": {len(shared)}, {differing} of them with different labels")


def test_report(stores, tmp_path):
    command("report", *stores[:2], "--output", tmp_path / "page.html", check=0)
    page = (tmp_path / "page.html").read_text()
    assert f"tracestore serve {stores[1]}" in page and "a.zarr + b.zarr" in page
    assert f"tracestore view {stores[1]} " in page or f"tracestore view {stores[0]} " in page
    assert f"tracestore view {stores[0]} + " not in page


@pytest.mark.long
def test_benchmark(stores, tmp_path):
    words = ["--detectors", "probe_last", "--folds", 2, "--workers", 1]
    command("benchmark", *stores[:2], "--as-one", *words, "--output", tmp_path / "both", check=0)
    command("benchmark", stores[2], *words, "--output", tmp_path / "merged", check=0)
    both, merged = (json.loads((tmp_path / name / "benchmark.json").read_text()) for name in ("both", "merged"))
    assert both["transfer"] == [] and list(both["stores"]) == ["a+b"]
    of = [results["stores"][name] for results, name in ((both, "a+b"), (merged, "merged"))]
    assert of[0]["num_traces"] == of[1]["num_traces"] == 70
    assert of[0]["detectors"].keys() == of[1]["detectors"].keys()
    assert rows_of(tmp_path / "both/scores.csv") == with_stores(tmp_path / "merged/scores.csv", stores)
    for path, num_others in zip(stores[:2], (40, 30), strict=True):
        with tracestore.open(path) as store:
            assert Results.read([tmp_path / "both"], store).num_unknown == num_others


def test_a_missing_store_and_stores_that_do_not_fit(stores, tmp_path):
    other = write_store(tmp_path / "c.zarr", make_traces(2, dim=16))
    for name in ("train", "predict", "report"):
        words = {"predict": ["--checkpoint", stores[0]], "report": []}.get(name, FAST)
        if name != "predict":
            words = [*words, "--output", tmp_path / "out.html"]
        assert "no such store" in error_of(name, stores[0], tmp_path / "none.zarr", *words, code=2)
    for name, words in (("train", FAST), ("report", ())):
        message = error_of(name, stores[0], other, "--output", tmp_path / f"{name}.html", *words, code=2)
        assert "hidden_dim: found 16, expected 8" in message


@pytest.mark.parametrize("name", ["info", "verify", "lint", "clean", "serve", "plan", "score"])
def test_commands_that_take_one_store(stores, name):
    words = ["--scores", "scores.csv"] if name == "score" else []
    done = command(name, *stores[:2], *words)
    assert done.returncode == 2 and str(stores[1]) in done.stderr
