"""Test the search against plain loops over all traces, and the reading of results."""

import json
import shutil
from urllib.parse import parse_qsl

import numpy as np
import pytest

import tracestore
from tests.helpers import make_trace
from tests.serve.conftest import COUNT, DETECTOR
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.evaluation.metrics import probability
from tracestore.serve.results import Results
from tracestore.serve.search import Query, TraceSearch


@pytest.fixture(scope="module")
def store(served_store):
    with tracestore.open(served_store) as store:
        yield store


@pytest.fixture(scope="module")
def search(store, results_folder):
    return TraceSearch(store, Results.read([results_folder], store))


@pytest.mark.long
def test_words_match_in_any_case_and_field(search, store):
    def expected(*words):
        texts = [f"{t.question_id}\n{t.question}\n{t.answer}".casefold() for t in store]
        return [k for k, text in enumerate(texts) if all(w in text for w in words)]

    for words in (("blue",), ("red", "12"), ("<script>",), ("nowhere",), ("✓", "q7"), ("q44",), ("?",), ("a",), ("q",)):
        assert search.find(Query(" ".join(words).upper())).tolist() == expected(*words)
    assert search.find(Query("  ")).tolist() == list(range(COUNT))


def test_texts_of_every_form_are_found(tmp_path):
    """Empty and missing texts, NUL, lone surrogates, answers of two kinds, and traces with later graphs."""
    texts = ["", "NUL\0inside", "lone \ud800 surrogate", "Straße Ⅷ", "plain", "ends in z"]
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for k, text in enumerate(texts):
            trace = make_trace(k, tokens=3)
            trace |= {"question": text, "generated_answer": f"raw{k}", "generated_answer_clean": f"clean{k}"}
            for name in ("question", "generated_answer_clean")[: k % 3]:
                del trace[name]
            writer.append(trace)
    with tracestore.open(tmp_path / "s.zarr") as store:
        search = TraceSearch(store)
        every = (
            "",
            "nul",
            "inside",
            "nul\0inside",
            "\ud800",
            "STRASSE",
            "Ⅷ",
            "raw",
            "clean",
            "raw2",
            "q5",
            "z",
            "sq",
            "q",
        )
        for words in every:
            wanted = words.replace("\0", " ").casefold().split()
            found = [[t.question_id, t.question or "", t.answer or ""] for t in store]
            folded = ["\n".join(f).replace("\0", " ").casefold() for f in found]
            assert search.find(Query(words)).tolist() == [
                k for k, f in enumerate(folded) if all(w in f for w in wanted)
            ]


def test_filters(search, store):
    targets, scores, tokens = store.targets(0.5), store.scores, store.num_tokens
    # lstm_solo makes no errors. The other detector stays below its threshold and predicts all correct.
    tested = (store.indices >= 4) & (store.indices < 100)
    for query, expected in (
        (Query(label="hallucinated"), targets == 1),
        (Query(label="correct"), targets == 0),
        (Query(label="unlabeled"), np.isnan(targets)),
        (Query(missed="lstm_solo"), np.zeros(COUNT, bool)),
        (Query(missed=DETECTOR), tested & (targets == 1)),
        (Query(min_score=0.2), scores >= 0.2),
        (Query(max_score=0.2, min_tokens=3, max_tokens=5), (scores <= 0.2) & (tokens >= 3) & (tokens <= 5)),
        (Query(group="even"), store.indices % 2 == 0),
        (Query("red", label="correct", group="odd"), (store.indices % 2 == 1) & (targets == 0) & (store.indices >= 4)),
    ):
        assert search.find(query).tolist() == np.flatnonzero(expected).tolist()
    for unknown in (Query(label="x"), Query(missed="x"), Query(group="x"), Query(order="x")):
        with pytest.raises(UsageError, match="there is no x"):
            search.find(unknown)


def test_a_query_is_an_address():
    query = Query("a&b é", "correct", DETECTOR, "g/1", 0.25, None, 3, None, "tokens", True, 4)
    arguments = dict(parse_qsl(query.arguments()))
    assert Query.from_arguments(arguments) == query and "max_score" not in arguments
    assert Query().arguments() == "" and Query.from_arguments({"layer": "3", "words": " "}) == Query()
    assert query.arguments(page=1) == Query.from_arguments(arguments | {"page": "1"}).arguments()
    for name, text in (
        ("page", "0"),
        ("page", "x"),
        ("min_score", "nan"),
        ("max_tokens", "2.5"),
        ("descending", "yes"),
    ):
        with pytest.raises(UsageError, match=f"{name}: found {text}, expected"):
            Query.from_arguments({name: text})


@pytest.mark.parametrize("descending", [False, True])
def test_missing_values_come_last_in_every_order(search, store, descending):
    for order, values in (
        ("score", store.scores),
        ("tokens", store.num_tokens.astype(float)),
        (DETECTOR, search.results.probabilities[DETECTOR]),
    ):
        found = search.find(Query(order=order, descending=descending))
        assert sorted(found.tolist()) == list(range(COUNT))
        shown = values[found]
        known = shown[~np.isnan(shown)]
        assert np.isnan(shown[len(known) :]).all()
        assert (np.diff(known) * (-1 if descending else 1) >= 0).all()
    assert search.find(Query(descending=True)).tolist() == list(range(COUNT))[::-1]


def test_probability_of_a_trace_is_the_mean_of_its_tests(store, results_folder):
    results = Results.read([results_folder], store)
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
        ("predictions.csv", "question_id,sample,label,fold:question,m:question\nq4,0,1,0,high\n"),
    ],
)
def test_invalid_results_are_one_line(store, results_folder, tmp_path, name, text):
    for file in results_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=f"{name}: not (what|the results of a run of) tracestore train") as raised:
        Results.read([tmp_path], store)
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match=r"results\.json"):
        Results.read([tmp_path / "nowhere"], store)


def test_scores_of_a_benchmark_are_ranks_of_their_fold(store, tmp_path):
    # Scores of the second fold are larger; two of the first are equal; one trace has none.
    rows = [(4, 1, 0, -3.5), (5, 0, 0, -7), (6, 0, 0, -3.5), (7, 1, 1, 90), (8, 0, 1, 80), (9, 0, 1, "")]
    rows += [(999, 0, 1, 85)]
    lines = [f"q{k},0,{label},g,{fold},{score},0" for k, label, fold, score in rows]
    header = "question_id,sample,label,group,fold:question,gnn:question,length:group"
    (tmp_path / "scores.csv").write_text("\n".join([header, *lines, ""]))
    (tmp_path / "benchmark.json").write_text("{}")
    for path in (tmp_path, tmp_path / "scores.csv"):
        results = Results.read([path], store)
        assert results.num_unknown == 1 and list(results.probabilities) == ["gnn:question"] == list(results.ranked)
        np.testing.assert_allclose(
            results.probabilities["gnn:question"][4:10], [2 / 3, 1 / 6, 2 / 3, 0.75, 0.25, np.nan]
        )
        assert results.thresholds == {"gnn:question": pytest.approx(4 / 6)}


@pytest.mark.parametrize("num_hallucinated", [2, 4, 6, 8])
def test_as_many_traces_of_a_benchmark_are_predicted_as_are_labeled(store, tmp_path, num_hallucinated):
    """Also in each fold, if the folds have the same share."""
    lines = [f"q{k + 10},0,{int(k // 2 < num_hallucinated // 2)},g,{k % 2},{k * 7 % 20}" for k in range(20)]
    (tmp_path / "scores.csv").write_text("\n".join(["question_id,sample,label,group,fold:question,d:question", *lines]))
    results = Results.read([tmp_path / "scores.csv"], store)
    predicted = results.probabilities["d:question"][10:30] >= results.thresholds["d:question"]
    assert [predicted[0::2].sum(), predicted[1::2].sum()] == [num_hallucinated // 2] * 2


def test_each_training_of_a_detector_has_its_own_threshold(store, tmp_path):
    """Traces are judged by the mean distance of their logits above the thresholds of their trainings, also by a probe."""
    thresholds, logits = {0: -3.0, 1: 3.0}, {4: -2.5, 5: -3.5, 6: 3.5, 7: 2.5}
    rows, entries = [], []
    for fold, threshold in thresholds.items():
        traces = [4 + 2 * fold, 5 + 2 * fold]
        scores = {"trace_index": traces, "question_id": [f"q{k}" for k in traces], "sample": [0, 0], "group": ["", ""]}
        scores |= {"label": [0, 1], "logit": [logits[k] for k in traces]}
        entries.append({"test": {}, "threshold": threshold, "temperature": 1.0, "test_scores": scores})
        rows += [f"q{k},0,{k},test,{fold},42,{k % 2},{p},{p}" for k in traces for p in [1 / (1 + np.exp(-logits[k]))]]
    curve = {"history": {key: [0.5] for key in ("train_loss", "val_loss", "val_auroc")}}
    document = {
        "models": {"lstm_solo": curve | {"test": {}, "threshold": 0.0}}, "probe": {"test": {}, "threshold": 0.0},
        "config": {"seed": 42}, "store": {"path": "", "provenance": []}, "traces": "",
        "answers": None,
        "runs": [{"fold": k, "seed": 42, "models": {"lstm_solo": curve | entry}} for k, entry in enumerate(entries)],
        "probes": [{"fold": k} | entry for k, entry in enumerate(entries)],
    }  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(document))
    header = "question_id,sample,trace_index,split,fold,seed,label,lstm_solo,logistic_probe"
    (tmp_path / "predictions.csv").write_text("\n".join([header, *rows]))
    search = TraceSearch(store, Results.read([tmp_path], store))
    for name in ("lstm_solo", "logistic_probe"):
        assert np.flatnonzero(search.results.predicts(name)).tolist() == [4, 6]
        assert search.results.threshold(name) is None
        targets = search.targets[[4, 5, 6, 7]]
        assert search.is_missed(name)[[4, 5, 6, 7]].tolist() == (targets != [1, 0, 1, 0]).tolist()
    known = {4: 0, 5: 1, 6: 0, 7: 1}
    assert search.num_other_labels == sum(search.targets[k] != label for k, label in known.items())
    assert sum(search.is_missed("lstm_solo")) and search.num_other_labels


@pytest.mark.parametrize("logit", [-1.2459109472530652, 0.1, 2.7, -709.0])
def test_a_trace_at_the_threshold_is_predicted_hallucinated(store, results_folder, tmp_path, logit):
    document = json.loads((results_folder / "results.json").read_text())
    document["models"]["lstm_solo"]["threshold"] = logit
    (tmp_path / "results.json").write_text(json.dumps(document))
    header = "question_id,sample,trace_index,split,fold,seed,label,lstm_solo"
    p = float(probability(np.array(logit)))
    (tmp_path / "predictions.csv").write_text(f"{header}\nq4,0,4,test,,42,1,{p!r}\n")
    assert Results.read([tmp_path], store).predicts("lstm_solo")[4]


@pytest.mark.parametrize("name", ["score", "correct", "is_correct"])
def test_a_column_whose_high_values_mean_correct_is_no_probability(store, tmp_path, name):
    (tmp_path / "s.csv").write_text(f"question_id,sample,{name}\nq4,0,0.9\n")
    with pytest.raises(UsageError, match="a high value is correct"):
        Results.read([tmp_path / "s.csv"], store)


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
                search.find(Query("red"))
        assert len(search.find(Query())) == COUNT


@pytest.mark.parametrize(("rows", "found"), [("q4,0,0.4,1\nq6,0,0.2,0\n", [4]), ("q4,0,0.6,0\nq6,0,0.7,0\n", [])])
def test_decisions_of_predict_count_as_in_its_file(tmp_path, rows, found):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for k in range(8):
            writer.append(make_trace(k, tokens=3), label=0)
    (tmp_path / "p.csv").write_text(f"question_id,sample,hallucination_score,predicted\n{rows}")
    with tracestore.open(tmp_path / "s.zarr") as store:
        search = TraceSearch(store, Results.read([tmp_path / "p.csv"], store))
        assert search.find(Query(missed="hallucination_score")).tolist() == found
