"""Test the search against plain loops over all traces, and the reading of results."""

import shutil

import numpy as np
import pytest

import tracestore
from tests.serve.conftest import COUNT, DETECTOR
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.serve.results import Results
from tracestore.serve.search import TraceSearch


@pytest.fixture(scope="module")
def store(served_store):
    with tracestore.open(served_store) as store:
        yield store


@pytest.fixture(scope="module")
def search(store, results_folder):
    return TraceSearch(store, Results.read(results_folder, store))


def test_words_match_in_any_case_and_field(search, store):
    def expected(*words):
        texts = [f"{t.question_id}\n{t.question}\n{t.answer}".lower() for t in store]
        return [k for k, text in enumerate(texts) if all(w in text for w in words)]

    for words in (("blue",), ("red", "12"), ("<script>",), ("nowhere",), ("✓", "q7")):
        assert search.find(" ".join(words).upper()).tolist() == expected(*words)
    assert search.find("  ").tolist() == list(range(COUNT))


def test_filters_by_label_and_by_errors_of_detectors(search, store):
    targets = store.targets(0.5)
    assert search.find(filter_name="hallucinated").tolist() == np.flatnonzero(targets == 1).tolist()
    assert search.find(filter_name="correct").tolist() == np.flatnonzero(targets == 0).tolist()
    assert search.find(filter_name="unlabeled").tolist() == np.flatnonzero(np.isnan(targets)).tolist()
    # lstm_solo makes no errors. The other detector stays below its threshold and predicts all correct.
    assert search.find(filter_name="missed by lstm_solo").tolist() == []
    hallucinated = [k for k in range(4, 100) if targets[k] == 1]
    assert search.find(filter_name=f"missed by {DETECTOR}").tolist() == hallucinated
    with pytest.raises(KeyError):
        search.find(filter_name="other")


@pytest.mark.parametrize("descending", [False, True])
def test_missing_values_come_last_in_every_order(search, store, descending):
    for order, values in (
        ("score", store.scores),
        ("tokens", store.num_tokens.astype(float)),
        (DETECTOR, search.results.probabilities[DETECTOR]),
    ):
        found = search.find(order=order, descending=descending)
        assert sorted(found.tolist()) == list(range(COUNT))
        shown = values[found]
        known = shown[~np.isnan(shown)]
        assert np.isnan(shown[len(known) :]).all()
        assert (np.diff(known) * (-1 if descending else 1) >= 0).all()
    assert search.find(descending=True).tolist() == list(range(COUNT))[::-1]


def test_probability_of_a_trace_is_the_mean_of_its_tests(store, results_folder):
    results = Results.read(results_folder, store)
    assert results.probabilities["lstm_solo"][4] == pytest.approx(0.3)
    assert results.probabilities[DETECTOR][5] == pytest.approx(0.9)
    assert np.isnan(results.probabilities["lstm_solo"][[0, 100]]).all() and results.num_unknown == 1
    assert results.thresholds["lstm_solo"] == 0.5 and results.thresholds[DETECTOR] == pytest.approx(0.95)
    assert results.thresholds["logistic_probe"] == pytest.approx(0.25) and "logistic_probe" in results.test
    assert np.isnan(results.history["lstm_solo"]["val_auroc"][1])


@pytest.mark.parametrize(
    "name, text",
    [
        ("results.json", "[]"),
        ("results.json", "{"),
        ("results.json", '{"models": {"a": {"test": 3}}}'),
        ("predictions.csv", "question_id,sample,m\nq4,x,1\n"),
        ("predictions.csv", "question_id,sample,m\nq4,0,high\n"),
        ("predictions.csv", "m\n1\n"),
        ("predictions.csv", "question_id,sample,m\nq4,99999999999,1\n"),
    ],
)
def test_invalid_results_are_one_line(store, results_folder, tmp_path, name, text):
    for file in results_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=f"{name}: not what tracestore train writes") as raised:
        Results.read(tmp_path, store)
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match=r"results\.json"):
        Results.read(tmp_path / "nowhere", store)


def test_unreadable_texts_raise_instead_of_an_empty_result(served_store, tmp_path):
    shutil.copytree(served_store, tmp_path / "s.zarr")
    (rows,) = (tmp_path / "s.zarr").glob("segments/*/rows.zip")
    question = tracestore.open(served_store)[3].question.encode()
    rows.chmod(0o644)
    rows.write_bytes(rows.read_bytes().replace(question, b"\xff" * len(question)))
    with tracestore.open(tmp_path / "s.zarr") as store:
        search = TraceSearch(store)
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match=r"rows\.zip: .*decode"):
                search.find("red")
        assert len(search.find()) == COUNT
