"""Subsets of a store: selecting, filtering and splitting, as a user would write it."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, make_trace, make_traces, write_pickle, write_store
from tracestore.console import run_command
from tracestore.errors import MissingFieldError, TrainingError, UnknownTraceError, UsageError
from tracestore.evaluation.store_split import make_split
from tracestore.store.read.segment import SegmentReader


@pytest.fixture
def store(store_path):
    """Twelve traces q0, q1, ... with 1 to 5 tokens; scores 0, 0.1, ..., 0.9 and two traces without a score."""
    with tracestore.open(store_path) as store:
        yield store


@pytest.fixture
def sampled(tmp_path):
    """Two samples of each of 40 questions, with scores and with a group for each four questions."""
    traces = [make_trace(k, tokens=2, seed=sample) | {"sample": sample} for k in range(40) for sample in range(2)]
    path = write_store(tmp_path / "s.zarr", traces, score=lambda n: n // 8 % 2, group=lambda n: f"g{n // 8}")
    with tracestore.open(path) as store:
        yield store


def ids(traces):
    return [trace.question_id for trace in traces]


@pytest.mark.parametrize(
    "key,expected",
    [
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, -4), [11, 7, 3]),
        (slice(50, 60), []),
        ([3, 0, 0, -1], [3, 0, 0, 11]),
        (np.array([5, 4], np.uint8), [5, 4]),
        (np.arange(12) % 5 == 1, [1, 6, 11]),
        ([k == 7 for k in range(12)], [7]),
        (["q9", "q2"], [9, 2]),
        (np.array(["q1"]), [1]),
        (range(10, 12), [10, 11]),
        ([], []),
        (np.zeros(12, bool), []),
    ],
)
def test_a_key_selects_a_subset(store, key, expected):
    subset = store[key]
    assert isinstance(subset, tracestore.TraceSubset) and len(subset) == len(expected)
    assert subset.indices.tolist() == expected and subset.indices.dtype == np.int64
    assert ids(subset) == subset.question_ids == [f"q{k}" for k in expected]
    assert store.select(key).indices.tolist() == expected


def test_a_position_or_an_id_is_a_trace(store):
    for key in (4, np.int64(4), -8, "q4"):
        assert isinstance(store[key], tracestore.Trace) and store[key].index == 4
    subset = store[[7, 4, 1]]
    assert subset[1].index == subset[np.int32(-2)].index == subset["q4"].index == 4
    torch = pytest.importorskip("torch")
    assert store[torch.tensor(4)].index == 4
    assert store[torch.tensor([4])].indices.tolist() == store[torch.arange(12) == 4].indices.tolist() == [4]


@pytest.mark.parametrize(
    "key,error,text",
    [
        (12, IndexError, "trace 12 of 12"),
        ([0, -13], IndexError, "trace -13 of 12"),
        ([True, False], IndexError, "mask of 2 values, expected one for each of 12 traces"),
        (np.zeros((2, 2), int), IndexError, "2 dimensions"),
        ("nowhere", KeyError, "nowhere"),
        (["q1", "nowhere"], KeyError, "nowhere"),
        ([0.5], TypeError, "float64"),
        ([1, "q1"], TypeError, "question ids"),
        (None, IndexError, "0 dimensions"),
    ],
)
def test_a_key_that_selects_nothing_is_refused(store, key, error, text):
    with pytest.raises(error, match=text):
        store[key]


def test_a_subset_is_selected_from_like_a_store(store):
    subset = store[2:10][::2]
    assert subset.indices.tolist() == [2, 4, 6, 8]
    assert subset[subset.scores > 0.5].indices.tolist() == [6, 8]
    assert subset[["q8", "q4"]].indices.tolist() == [8, 4]
    assert subset.select(k for k in (3, 0)).indices.tolist() == [8, 2]
    assert subset.store is store and subset[1:].store is store
    assert subset.index_of("q6") == 2 and "q6" in subset and "q5" not in subset
    for absent in ("q5", "nowhere"):
        with pytest.raises(KeyError, match=absent):
            subset.index_of(absent)


def test_columns_are_those_of_the_selected_traces(store):
    subset = store[[11, 3, 8]]
    np.testing.assert_array_equal(subset.scores, [np.nan, 0.3, 0.8])
    np.testing.assert_array_equal(subset.targets(), [np.nan, 1, 0])
    np.testing.assert_array_equal(subset.labels, [np.nan] * 3)
    assert subset.num_tokens.tolist() == [2, 4, 4] and subset.has_nonfinite.tolist() == [False] * 3
    assert (subset.path, subset.num_layers, subset.hidden_dim) == (store.path, 3, 8)
    np.testing.assert_array_equal(subset.features(0), store.features(0)[[11, 3, 8]])
    np.testing.assert_array_equal(store[3:6].features(), store.features()[3:6])
    with pytest.raises(ValueError, match="read-only"):
        subset.indices[0] = 0


def test_a_subset_becomes_a_table(store):
    pytest.importorskip("pandas")
    table = store[[11, 3]].to_pandas(texts=True)
    assert table["question_id"].tolist() == ["q11", "q3"] and table["answer"].tolist() == ["answer 11 ✓", "answer 3 ✓"]
    assert table.equals(store.to_pandas(texts=True).iloc[[11, 3]].reset_index(drop=True))


def test_a_subset_outlives_a_pickle(store):
    copy = pickle.loads(pickle.dumps(store[[5, 1]]))
    assert copy.indices.tolist() == [5, 1] and ids(copy) == ["q5", "q1"]
    np.testing.assert_array_equal(copy[0].hidden_states, store[5].hidden_states)


def test_representations_tell_the_sizes(store, store_path):
    assert repr(store[:3]) == f"TraceSubset(3 of 12 traces of {str(store_path)!r})"


def test_every_sample_of_a_question_is_selected(sampled):
    assert sampled[["q3", "q1"]].indices.tolist() == [6, 7, 2, 3]
    assert sampled.select("q1").indices.tolist() == sampled.filter(question_id="q1").indices.tolist() == [2, 3]
    assert sampled["q1"].sample == 0


def test_a_collection_contains_the_ids_of_its_first_samples(sampled, tmp_path):
    second = write_store(tmp_path / "second.zarr", [make_trace(k) | {"sample": k} for k in range(2)])
    (tmp_path / "other").mkdir()
    joined = tracestore.open([second, write_store(tmp_path / "other" / "s.zarr", make_traces(1))])
    for collection, question_id, expected in (
        (sampled, "q1", True), (sampled[2:3], "q1", True), (sampled[3:4], "q1", False), (sampled[2:3], "q2", False),
        (tracestore.open(second), "q1", False), (tracestore.open(second)[:], "q1", False), (sampled, 1, False),
        (joined, "q1", False), (joined[:], "q1", False), (joined[2:], "q0", True),
    ):  # fmt: skip
        assert (question_id in collection) is expected
        if not expected and isinstance(question_id, str):
            with pytest.raises(KeyError):
                collection[question_id]


def test_filter_by_columns(store):
    assert store.filter(score=0.3).indices.tolist() == [3]
    assert store.filter(score=None).indices.tolist() == [10, 11]
    assert store.filter(y=1).indices.tolist() == [0, 1, 2, 3, 4]
    assert store.filter(question_id={"q3", "q5"}, num_tokens=[1, 4]).indices.tolist() == [3, 5]
    assert store.filter(score=lambda s: s < 0.2, source_position=0, sample=range(2)).indices.tolist() == [0, 1]
    assert store.filter(source=store[6].source[0]).indices.tolist() == [6]
    assert len(store.filter(group="")) == len(store.filter(group=None)) == len(store.filter(has_nonfinite=False)) == 12
    assert store[5:].filter(y=0).filter(num_tokens=4).indices.tolist() == [8]


def test_filter_by_labels_and_named_scores(tmp_path):
    path = write_store(tmp_path / "l.zarr", make_traces(4), label=lambda k: k % 2, score=lambda k: k / 4)
    with tracestore.open(path) as store:
        assert store.filter(label=1).indices.tolist() == [1, 3]
        (name,) = store.score_fields
        assert store.filter(**{f"score_{name}": 0.5}).indices.tolist() == [2]


def test_filter_by_a_function_reads_what_the_function_reads(store, monkeypatch):
    opened = []
    array = SegmentReader.array
    monkeypatch.setattr(SegmentReader, "array", lambda self, name: opened.append(name) or array(self, name))
    assert store.filter(lambda trace: trace.num_tokens > 4).indices.tolist() == [4, 9]
    assert store.filter(lambda trace: "3" in trace.answer, y=1).indices.tolist() == [3]
    assert opened == []
    assert store.filter(lambda trace: trace.hidden_states.shape[1] == 5).indices.tolist() == [4, 9]
    assert set(opened) == {"hidden_states"}


def test_filter_refuses_conditions_without_a_meaning(store):
    with pytest.raises(UsageError, match=r"found column 'labels', expected one of question_id, .* or y"):
        store.filter(labels=1)
    with pytest.raises(MissingFieldError, match="no trace has a label; use y"):
        store.filter(label=1)
    with pytest.raises(UsageError, match="condition on score returned float64"):
        store.filter(score=lambda s: s * 2)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("num_tokens", ["4", ["4"], 4.0 + 1j, slice(3, 4), math.nan, [4, None], b"4", [4, math.nan], object()]),
        ("score", ["0.3", ["0.3"], math.nan, {0.3, None}, np.array([np.nan]), np.datetime64(3, "s")]),
        ("y", ["1", "hallucinated", [None], math.nan]),
        ("has_nonfinite", ["False", "no", [None]]),
        ("question_id", [3, [3, 5], b"q3", math.nan, Path("q3"), ["q3", None], ["q3", 4], {3.0}, np.array([3]), True]),
        ("group", [0, math.nan, ["g", None]]),
        ("source", [Path("append-0000000000"), 0]),
    ],
)
def test_filter_refuses_values_that_no_value_can_equal(store, column, values):
    """They would select no trace, or those that numpy compares as texts."""
    for value in values:
        with pytest.raises(UsageError, match=f"the condition on {column}: found .*, expected (numbers|texts), or None"):
            store.filter(**{column: value})


def test_filter_takes_values_of_any_library(store):
    for four in (4, 4.0, np.int8(4), np.float16(4), np.array(4), [4], (4,), {4}, range(4, 5), np.array([4], "u1"), [4, 4.5],
                 np.array([[4]])):  # fmt: skip
        assert store.filter(num_tokens=four).indices.tolist() == [3, 8]
    for third in ("q3", np.str_("q3"), ["q3"], ("q3", "x"), {"q3"}, np.array(["q3"]), np.array(["q3"], object)):
        assert store.filter(question_id=third).indices.tolist() == [3]
    for nothing in ([], (), set(), np.zeros(0), range(0)):
        assert len(store.filter(num_tokens=nothing)) == len(store.filter(question_id=nothing)) == 0


@pytest.mark.parametrize("by", [None, "question", "group"])
def test_the_split_is_that_of_training(sampled, by):
    for seed in (0, 42):
        expected = make_split(sampled, sampled.targets(), seed).indices
        split = sampled.split(seed=seed, by=by)
        for name in ("train", "val", "test"):
            assert split[name].indices.tolist() == expected[name].tolist()
    train, val, test = sampled.split(by=by)
    assert split.val is split["val"] is split[1] and len(train) + len(val) + len(test) == 80
    assert list(dict(split)) == ["train", "val", "test"]


def test_a_split_by_a_column_keeps_its_values_together(tmp_path):
    traces = [make_trace(k, tokens=1) for k in range(60)]
    path = write_store(tmp_path / "s.zarr", traces, score=lambda k: k % 2, group=lambda k: f"g{k // 10}")
    with tracestore.open(path) as store:
        by_group = [set(part.to_pandas()["group"]) for part in store.split()]
        assert sum(map(len, by_group)) == 6, "six groups"
        by_tokens = store.split(by="question_id", seed=1)
        assert [len(part) for part in by_tokens] == [44, 8, 8]
        with pytest.raises(UsageError, match="found column 'topic'"):
            store.split(by="topic")


def test_a_subset_is_split_by_its_own_traces(sampled):
    part = sampled[10:70]
    split = part.split(seed=3)
    assert sorted(np.concatenate([p.indices for p in split])) == list(range(10, 70))
    assert all(p.store is sampled for p in split)
    again = part[np.random.default_rng(0).permutation(60)].split(seed=3)
    assert [sorted(p.indices) for p in again] == [sorted(p.indices) for p in split], "the order does not matter"


def test_a_store_without_labels_is_not_split(tmp_path):
    with (
        tracestore.open(write_store(tmp_path / "s.zarr", make_traces(3))) as store,
        pytest.raises(TrainingError, match="none of 3 traces has a score or a label"),
    ):
        store.split()


@pytest.mark.parametrize("count", [12, 40, 97])
@pytest.mark.parametrize(
    "fractions",
    [
        {"train": 0.8, "val": 0.1, "test": 0.1},
        {"train": 0.8, "test": 0.2},
        {"train": 0.5, "val": 0.5},
        {"train": 1},
        {"train": 0.7, "val": 0.15, "test": 0.15},
        {"train": 0.01, "val": 0.98, "test": 0.01},
        {"test": 1 / 3, "val": 1 / 3, "train": 1 / 3},
    ],
)
def test_a_split_has_the_given_fractions(tmp_path, fractions, count):
    path = write_store(tmp_path / "s.zarr", make_traces(count, tokens=1), score=lambda k: k % 2)
    with tracestore.open(path) as store:
        split = store.split(7, **fractions)
        assert sorted(np.concatenate([part.indices for part in split])) == list(range(count))
        for name, part in zip(split.keys(), split, strict=True):
            # Each of the two classes is rounded, and gives each part at least one question.
            assert abs(len(part) - fractions.get(name, 0) * count) <= 4
            assert (len(part) > 0) == (name in fractions)
            assert abs(int((part.y == 1).sum()) - len(part) / 2) <= 1
        again = store[::-1].split(7, **fractions)
        assert [sorted(part.indices) for part in again] == [sorted(part.indices) for part in split]


@pytest.mark.parametrize("by,together", [(None, 8), ("question", 8), ("group", 8), ("question_id", 2)])
def test_fractions_keep_together_what_belongs_together(sampled, by, together):
    for split in (sampled.split(train=0.6, val=0.2, test=0.2, by=by), sampled.train_test_split(0.2, by=by)):
        owner = {int(k): name for name, part in zip(split.keys(), split, strict=True) for k in part.indices}
        assert len(owner) == 80
        assert all(len({owner[k] for k in range(first, first + together)}) == 1 for first in range(0, 80, together))


def test_train_and_test_unpack_and_have_names(store):
    split = store.train_test_split(0.2, seed=3)
    train, test = split
    assert split["train"] is split.train is train and split["test"] is split.test is test
    assert list(dict(split)) == ["train", "test"] and len(train) + len(test) == 10
    assert store.train_test_split(0.2).test.indices.tolist() == store.split(train=0.8, test=0.2).test.indices.tolist()


@pytest.mark.parametrize(
    "call,text",
    [
        (lambda store: store.split(0.8, 0.2), "found seed 0.8, expected a whole number; fractions have names"),
        (lambda store: store.split(0.8), "found seed 0.8"),
        (lambda store: store.split(7, 0.2), "found by 0.2, expected the name of a column"),
        (lambda store: store.split(train=0.8), "found train=0.8; expected fractions that add up to 1"),
        (lambda store: store.split(train=0.8, val=0.3, test=0.1), "add up to 1"),
        (lambda store: store.split(train=1.2, test=-0.2), "add up to 1"),
        (lambda store: store.split(val=0.5, test=0.5), "add up to 1"),
        (lambda store: store.split(train=float("nan"), test=0.2), "add up to 1"),
        (lambda store: store.split(train=80, test=20), "add up to 1"),
        (lambda store: store.train_test_split(20), "found test_size 20, expected a fraction"),
        (lambda store: store.train_test_split(0), "found test_size 0, expected a fraction"),
        (lambda store: store.train_test_split(1.0), "found test_size 1.0, expected a fraction"),
        (lambda store: store.train_test_split(0.2, by="topic"), "found column 'topic'"),
    ],
)
def test_an_impossible_split_is_refused(store, call, text):
    with pytest.raises(UsageError, match=text):
        call(store)


def test_y_is_what_batches_hold(tmp_path):
    """Stored labels come first, then the default score with its direction."""
    traces = make_traces(12, tokens=2)
    for k, trace in enumerate(traces):
        trace |= {"hallucination_score": k / 12} if k % 3 < 2 else {}
        trace |= {"label": 1} if k in (2, 6) else {}
    convert(write_pickle(tmp_path / "a.pkl", traces), tmp_path / "s.zarr")
    pytest.importorskip("torch")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert np.isnan(store.labels).sum() == 10 and np.isnan([trace.label for trace in store]).sum() == 10
        expected = [1 if k in (2, 6) else np.nan if k % 3 == 2 else float(k >= 6) for k in range(12)]
        np.testing.assert_array_equal(store.y, expected)
        np.testing.assert_array_equal(store[[6, 5, 2]].y, [1, np.nan, 1])
        (batch,) = tracestore.TraceLoader(store, batch_size=12, shuffle="none")
        np.testing.assert_array_equal(store.y, batch.y.numpy())
        known = store.filter(y=[0, 1])
        assert not np.isnan(known.y).any() and len(known) == 9


def test_traces_with_nan_are_left_out_by_a_filter(tmp_path):
    traces = make_traces(8, tokens=2)
    traces[3]["hidden_states"][1][0, 0] = np.inf
    with tracestore.open(write_store(tmp_path / "s.zarr", traces, score=lambda k: k % 2)) as store:
        assert store.filter(has_nonfinite=False).indices.tolist() == [0, 1, 2, 4, 5, 6, 7]
        assert store.filter(has_nonfinite=True, y=0).indices.tolist() == [3]


def test_an_unknown_id_is_named_with_its_sample(store):
    """The error is a KeyError, and another KeyError of a command is not taken for it."""
    subset = store[3:7]
    for traces, missing in ((store, "q99"), (subset, "q2")):
        for read in (traces.index_of, traces.__getitem__, traces.select, lambda q, t=traces: t.select(["q4", q])):
            with pytest.raises(KeyError) as caught:
                read(missing)
            assert str(caught.value) == f"no such id: {missing}" and caught.value.args == (missing,)
            assert isinstance(caught.value, UsageError)
        with pytest.raises(KeyError, match="no such id: q4, sample 3"):
            traces.index_of("q4", 3)
        with pytest.raises(TypeError):
            traces.index_of("q4", 0.9)


@pytest.mark.parametrize(("error", "text", "code"), [
    (UnknownTraceError("q7"), "no such id: q7", 2), (UnknownTraceError("a b", 2), "no such id: a b, sample 2", 2),
    (UnknownTraceError("q7 "), "no such id: 'q7 '", 2), (UnknownTraceError(""), "no such id: ''", 2),
    (KeyError("model"), "unexpected KeyError: 'model' (TRACESTORE_DEBUG=1 shows where)", 1),
    (KeyError(), "unexpected KeyError: (TRACESTORE_DEBUG=1 shows where)", 1),
])  # fmt: skip
def test_commands_tell_an_unknown_id_from_other_errors(capsys, error, text, code):
    def command():
        raise error

    assert run_command("tracestore view", command) == code
    assert capsys.readouterr().err == f"tracestore view: {text}\n"


def test_a_subset_of_several_stores_finds_each_trace_of_a_key(tmp_path):
    paths = [write_store(tmp_path / f"{k}.zarr", make_traces(3)) for k in range(2)]
    with tracestore.open(paths) as both:
        assert both[3:].index_of("q1") == 1 and both[3:]["q1"].index == 4
        assert both[[4, 2, 1]].index_of("q1") == 0
        for subset, absent in ((both[2:4], ("q1",)), (both, ("q1", 1)), (both[3:], ("q9",))):
            with pytest.raises(UnknownTraceError):
                subset.index_of(*absent)


@pytest.mark.parametrize(
    ("by", "options", "empty"),
    [
        (None, {}, "val and test"),
        ("group", {}, "val and test"),
        ("sample", {}, "val and test"),
        ("group", {"train": 0.5, "test": 0.5}, "test"),
        ("question_id", {}, None),
        ("group", {"train": 1}, None),
    ],
)
def test_a_part_of_a_split_without_traces_is_an_error(tmp_path, by, options, empty):
    path = write_store(tmp_path / "s.zarr", make_traces(12), score=lambda k: k % 2, group="all")
    with tracestore.open(path) as store:
        for traces in (store, store[2:]):
            if empty is None:
                assert sum(map(len, traces.split(by=by, **options))) == len(traces)
                continue
            with pytest.raises(UsageError, match=f"no trace for {empty}: the split keeps"):
                traces.split(by=by, **options)
            with pytest.raises(UsageError, match="no trace for test: the split keeps"):
                traces.train_test_split(by=by)
