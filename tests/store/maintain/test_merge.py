"""The commands merge and subset: fields of traces, duplicates, scores and errors."""

import itertools
import json

import numpy as np
import pytest

import tracestore
from tests.helpers import (
    ROOT,
    command,
    convert,
    make_graphs,
    make_trace,
    make_traces,
    tree_bytes,
    write_pickle,
    write_store,
)
from tracestore.errors import InvalidInputError, UsageError
from tracestore.evaluation.store_split import drop_nonfinite, make_split
from tracestore.store.format import schema
from tracestore.store.maintain.merge import merge_stores
from tracestore.store.maintain.transfer import Transfer
from tracestore.store.maintain.verify import verify_store


def same_value(a, b):
    if isinstance(a, tuple):
        return all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a.view("u1"), b.view("u1"))
    return a == b or (a != a and b != b)


def fields(trace):
    """Return the values of all fields of a trace. A missing field has the class of its error as value."""
    names = "question_id sample score label group num_tokens has_nonfinite hidden_states last_token attention_layout"
    names += " attention_packed tokens tokens_decoded question answer prompt_length extras optional_fields provenance"
    values = {}
    for name in names.split():
        try:
            values[name] = getattr(trace, name)
        except tracestore.TracestoreError as error:
            values[name] = type(error)
    return values | {name: trace.text(name) for name in schema.ANSWER_FIELDS}


def assert_same(store, other):
    for trace in store:
        found = fields(other[other.index_of(trace.question_id, trace.sample)])
        for name, value in fields(trace).items():
            assert same_value(value, found[name]), f"{trace.question_id}: {name}"


@pytest.mark.parametrize("name", ["v1_bfloat16", "v1_edges", "v1_heads"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_every_field_is_kept(tmp_path, name, codec):
    source = ROOT / "tests" / "golden" / f"{name}.zarr"
    report = merge_stores([source], tmp_path / "m.zarr", codec=codec)
    store, merged = tracestore.open(source), tracestore.open(tmp_path / "m.zarr")
    assert report.num_traces_new == len(store) == len(merged) and report.num_duplicates == 0
    assert_same(store, merged)
    assert merged.info()["fields"] == store.info()["fields"] and merged.num_heads == store.num_heads
    assert [t.source[1] for t in merged] == [t.source[1] for t in store]
    assert verify_store(tmp_path / "m.zarr").damaged == {}


def make_store(path, count, **options):
    """Write a store of traces in two groups; every third trace has no score."""
    return write_store(
        path, make_traces(count), score=lambda k: k / 10 if k % 3 else None, group=lambda k: f"g{k % 2}", **options
    )


def test_duplicates_add_missing_scores(tmp_path):
    one = make_store(tmp_path / "one.zarr", 6)
    write_store(tmp_path / "two.zarr", make_traces(9)[3:], score=0.75)
    report = merge_stores([one, tmp_path / "two.zarr"], tmp_path / "m.zarr")
    merged = tracestore.open(tmp_path / "m.zarr")
    assert merged.question_ids == [f"q{k}" for k in range(9)]
    np.testing.assert_array_equal(merged.scores, [np.nan, 0.1, 0.2, 0.75, 0.4, 0.5, 0.75, 0.75, 0.75])
    assert (report.num_traces_new, report.num_duplicates) == (9, 3)
    assert (report.num_scores_filled, report.num_scores_differing) == (1, 2)
    before = tree_bytes(tmp_path / "m.zarr")
    again = merge_stores([one], tmp_path / "m.zarr")
    assert again.num_traces_new == 0 and again.num_duplicates == 6
    segments = {k: v for k, v in before.items() if k.startswith("segments/")}
    assert segments == {k: v for k, v in tree_bytes(tmp_path / "m.zarr").items() if k.startswith("segments/")}


@pytest.mark.parametrize("scores", list(itertools.product((None, 0.25), (None, 0.25, 0.75))))
@pytest.mark.parametrize("groups", list(itertools.product(("", "a"), ("", "a", "b"))))
def test_duplicates_keep_their_group_and_add_a_missing_one(tmp_path, scores, groups):
    """Whatever their scores are: a group keeps questions of one split together."""
    for k in range(2):
        write_store(tmp_path / f"{k}.zarr", make_traces(2), score=scores[k], group=groups[k])
    done = command("merge", tmp_path / "0.zarr", tmp_path / "1.zarr", tmp_path / "m.zarr", check=0)
    with tracestore.open(tmp_path / "m.zarr") as merged:
        assert [trace.group for trace in merged] == [groups[0] or groups[1]] * 2
        score = scores[0] if scores[0] is not None else scores[1]
        assert [trace.scores for trace in merged] == [{} if score is None else {"score": score}] * 2
    is_other = groups == ("a", "b")
    assert ("2 duplicates with a different group" in done.stdout) == is_other
    assert ("2 duplicates with a different score" in done.stdout) == (scores == (0.25, 0.75))


def test_incompatible_stores_and_conflicting_traces_are_refused(tmp_path):
    one, heads = make_store(tmp_path / "one.zarr", 4), make_store(tmp_path / "h.zarr", 1, attention="heads")
    with pytest.raises(UsageError, match="--attention heads"):
        merge_stores([one, heads], tmp_path / "m.zarr")
    with pytest.raises(UsageError, match="destination"):
        merge_stores([one], one)
    with pytest.raises(UsageError, match="no such store"):
        merge_stores([tmp_path / "nowhere"], tmp_path / "m.zarr")
    write_store(
        tmp_path / "other.zarr", [make_trace(0, tokens=3) | {"question_id": "q8"}, make_trace(2, tokens=9, seed=5)]
    )
    with pytest.raises(InvalidInputError, match="different content"):
        merge_stores([one, tmp_path / "other.zarr"], tmp_path / "m.zarr")
    # The traces before the refused source stay; the refused source adds none.
    assert tracestore.open(tmp_path / "m.zarr").question_ids == ["q0", "q1", "q2", "q3", "q8"]
    assert verify_store(tmp_path / "m.zarr").damaged == {}


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_answers_to_another_question_are_not_merged(tmp_path, codec):
    questions = ["Who?", "who?", "Where?"]
    stores = [
        write_store(tmp_path / f"{k}.zarr", [make_trace(0, seed=k) | {"sample": k, "question": question}], codec=codec)
        for k, question in enumerate(questions)
    ]
    with pytest.raises(InvalidInputError, match=r"2.zarr.*, question: found 'Where\?', expected that of sample 0 of"):
        merge_stores(stores, tmp_path / "m.zarr")
    assert [t.question for t in tracestore.open(tmp_path / "m.zarr")] == ["Who?", "who?"]


def cli(*args, check=0):
    return command(*args, check=check)


@pytest.fixture
def store(tmp_path):
    """A store of three files of five traces, one segment each. The last file has a second sample of q4."""
    data = tmp_path / "data"
    data.mkdir()
    traces = make_traces(15, tokens=3)
    traces[12] |= {"question_id": "q4", "sample": 1}
    for k in range(3):
        write_pickle(data / f"{k}.pkl", traces[5 * k : 5 * k + 5])
        convert(data, tmp_path / "s.zarr")
    scores = "".join(f"q{k},{k / 20}\n" for k in range(15))
    (tmp_path / "scores.csv").write_text(f"question_id,score\n{scores}")
    cli("score", tmp_path / "s.zarr", "--scores", tmp_path / "scores.csv")
    return tmp_path / "s.zarr"


@pytest.mark.long
def test_a_subset_keeps_bytes_scores_order_and_sources(store, tmp_path):
    (tmp_path / "ids.txt").write_text("q14\nq4\r\n\nq0\n")
    done = cli("subset", store, tmp_path / "some.zarr", "--ids", tmp_path / "ids.txt", "--json")
    assert json.loads(done.stdout)["num_traces"] == 4 and "of 4 traces" not in done.stderr
    whole, some = tracestore.open(store), tracestore.open(tmp_path / "some.zarr")
    assert [(t.question_id, t.sample) for t in some] == [("q0", 0), ("q4", 0), ("q4", 1), ("q14", 0)]
    assert_same(some, whole)
    assert [t.source for t in some] == [("0.pkl", 0), ("0.pkl", 4), ("2.pkl", 2), ("2.pkl", 4)]
    assert verify_store(tmp_path / "some.zarr").damaged == {}
    # The subset does not count as a complete copy of its sources: their other traces can be added later.
    cli("merge", store, tmp_path / "some.zarr")
    assert sorted(tracestore.open(tmp_path / "some.zarr").question_ids) == sorted(whole.question_ids)
    convert(tmp_path / "data", tmp_path / "some.zarr")
    assert_same(whole, tracestore.open(tmp_path / "some.zarr"))


def test_a_line_of_blanks_is_an_id(tmp_path):
    ids = ["  ", "\u2028", "a"]
    store = write_store(tmp_path / "s.zarr", [make_trace(k) | {"question_id": ids[k]} for k in range(3)])
    (tmp_path / "ids").write_text("\u2028\n\n  \r\n")
    cli("subset", store, tmp_path / "some.zarr", "--ids", tmp_path / "ids")
    assert list(tracestore.open(tmp_path / "some.zarr").question_ids) == ids[:2]
    (tmp_path / "ids").write_text("a\n \n")
    assert "no such id" in cli("subset", store, tmp_path / "x.zarr", "--ids", tmp_path / "ids", check=2).stderr


def test_a_subset_by_split_has_the_split_of_training_without_nonfinite_traces(tmp_path):
    traces = [make_trace(k) for k in range(24)]
    traces[3]["hidden_states"][0][0, 0] = np.nan
    store = write_store(tmp_path / "s.zarr", traces, label=lambda k: k % 2)
    text = cli("subset", store, tmp_path / "test.zarr", "--split", "test", check=2).stderr
    assert "the trace of question 'q3' holds NaN" in text and "--drop-nonfinite leaves them out" in text
    done = cli("subset", store, tmp_path / "test.zarr", "--split", "test", "--drop-nonfinite")
    assert "--drop-nonfinite: 1 trace with NaN or infinite values left out: q3" in done.stdout
    opened = tracestore.open(store)
    targets, _ = drop_nonfinite(opened, opened.targets(0.5))
    expected = make_split(opened, targets, 42).question_ids["test"]
    assert sorted(tracestore.open(tmp_path / "test.zarr").question_ids) == sorted(expected)
    wrong = cli("subset", store, tmp_path / "x.zarr", "--segments", "0", "--drop-nonfinite", check=2).stderr
    assert "--drop-nonfinite is an option of --split" in wrong


@pytest.mark.long
def test_subsets_by_segment_and_by_split(store, tmp_path):
    # The traces of each source are in their own segment; the second sample of q4 does not change that.
    cli("subset", store, tmp_path / "two.zarr", "--segments", "0,2")
    assert [t.source[0] for t in tracestore.open(tmp_path / "two.zarr")] == ["0.pkl"] * 5 + ["2.pkl"] * 5
    assert "expected 0 to 2" in cli("subset", store, tmp_path / "x.zarr", "--segments", "1-3", check=2).stderr
    splits = {}
    for split in ("train", "val", "test"):
        cli("subset", store, tmp_path / f"{split}.zarr", "--split", split)
        splits[split] = tracestore.open(tmp_path / f"{split}.zarr")
        assert_same(splits[split], tracestore.open(store))
    ids = {split: set(opened.question_ids) for split, opened in splits.items()}
    assert sum(map(len, splits.values())) == 15
    assert not (ids["train"] & ids["val"] or ids["train"] & ids["test"] or ids["val"] & ids["test"])
    mixed = cli("subset", store, tmp_path / "test.zarr", "--split", "val", check=2).stderr
    assert "of another split, such as" in mixed and mixed.count("\n") == 1
    assert "0 traces added" in cli("subset", store, tmp_path / "val.zarr", "--split", "val").stdout
    cli("subset", store, tmp_path / "val.zarr", "--split", "test", "--overwrite")
    assert set(tracestore.open(tmp_path / "val.zarr").question_ids) == ids["test"]


@pytest.mark.long
def test_a_subset_of_all_traces_equals_a_merge(store, tmp_path):
    merge_stores([store], tmp_path / "a.zarr", chosen=[np.arange(15)])
    merge_stores([store], tmp_path / "b.zarr")
    assert tree_bytes(tmp_path / "a.zarr") == tree_bytes(tmp_path / "b.zarr")
    with pytest.raises(IndexError, match="of 15"):
        merge_stores([store], tmp_path / "c.zarr", chosen=[np.array([3, 15])])


def test_wrong_usage_is_one_line(store, tmp_path):
    (tmp_path / "ids.txt").write_text("q1\nq99\n")
    (tmp_path / "none.txt").write_text("\n")
    for args, message in (
        (("subset", store, tmp_path / "x.zarr", "--ids", tmp_path / "ids.txt"), "no such id: q99"),
        (("subset", store, tmp_path / "x.zarr", "--ids", tmp_path / "none.txt"), "no question id"),
        (("subset", store, tmp_path / "x.zarr", "--ids", tmp_path / "nowhere.txt"), "No such file"),
        (("subset", store, tmp_path / "x.zarr"), "required"),
        (("subset", store, store, "--segments", "0"), "is a source and the destination"),
        (("merge", tmp_path / "nowhere.zarr", tmp_path / "x.zarr"), "no such store"),
        (("merge", store, tmp_path / "nowhere" / "x.zarr"), "does not exist"),
    ):
        done = cli(*args, check=2)
        assert message in done.stderr and done.stderr.count("\n") == 1 and done.stdout == "", args
    assert not (tmp_path / "x.zarr").exists()


def two_families(folder, traces):
    """Write the same traces to a file of sequences, without the last trace, and to a file of graphs."""
    import torch

    folder.mkdir()
    ids = [t["question_id"] for t in traces]
    labels = torch.tensor([float(k % 2) for k in range(len(traces))])
    sequences = torch.from_numpy(np.stack([[h[-1] for h in t["hidden_states"]] for t in traces]))
    torch.save({"sequences": sequences[:-1], "labels": labels[:-1], "question_ids": ids[:-1]}, folder / "a.pt")
    graphs = [make_graphs(t) for t in traces]
    torch.save({"graphs": graphs, "labels": labels, "question_ids": ids}, folder / "b.pt")
    return folder


def test_arrays_that_another_source_added_are_merged(tmp_path):
    data = two_families(tmp_path / "data", make_traces(4, tokens=3))
    convert(data, tmp_path / "both.zarr")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.pt").write_bytes((data / "a.pt").read_bytes())
    convert(tmp_path / "one", tmp_path / "m.zarr")
    for _ in range(2):
        cli("merge", tmp_path / "both.zarr", tmp_path / "m.zarr")
        merged = tracestore.open(tmp_path / "m.zarr")
        assert_same(tracestore.open(tmp_path / "both.zarr"), merged)
        # a.pt counts twice: the second time for the arrays that b.pt added to its traces.
        assert merged.info()["num_sources"] == 3


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("is_earlier", [False, True], ids=["into a new store", "into one with the first file"])
def test_last_tokens_that_replaced_others_are_merged(tmp_path, codec, is_earlier):
    """The texts of their file are not those of the trace, and are not compared with them."""
    trace = make_trace(0)
    graph = {name: trace[name] for name in ("question_id", "hidden_states", "attentions", "tokens")}
    write_pickle(tmp_path / "data" / "a.pkl", [graph])
    convert(tmp_path / "data", tmp_path / "m.zarr", "--codec", codec)
    last = np.stack(trace["hidden_states"])[:, -1] + 1
    write_pickle(tmp_path / "data" / "b.pkl", [{"question_id": "q0", "last_token": last, "question": "why"}])
    convert(tmp_path / "data", tmp_path / "s.zarr", "--on-conflict", "keep-last")
    if is_earlier:
        with pytest.raises(InvalidInputError, match="different content"):
            merge_stores([tmp_path / "s.zarr"], tmp_path / "m.zarr")
        return
    for _ in range(2):
        merge_stores([tmp_path / "s.zarr"], tmp_path / "new.zarr", codec=codec)
        assert_same(tracestore.open(tmp_path / "s.zarr"), tracestore.open(tmp_path / "new.zarr"))


def test_a_subset_does_not_contain_its_sources_completely(tmp_path):
    data = two_families(tmp_path / "data", make_traces(4, tokens=3))
    convert(data, tmp_path / "both.zarr")
    (tmp_path / "ids.txt").write_text("q3\n")  # Only b.pt contains it.
    cli("subset", tmp_path / "both.zarr", tmp_path / "some.zarr", "--ids", tmp_path / "ids.txt")
    convert(data, tmp_path / "some.zarr")
    assert_same(tracestore.open(tmp_path / "both.zarr"), tracestore.open(tmp_path / "some.zarr"))


def test_an_empty_subset_replaces_nothing(tmp_path):
    one, two = make_store(tmp_path / "one.zarr", 4), make_store(tmp_path / "two.zarr", 2)
    with pytest.raises(UsageError, match="no trace is chosen"):
        merge_stores([one], two, chosen=[np.zeros(0, np.int64)], overwrite=True)
    assert len(tracestore.open(two)) == 2


def test_a_known_file_whose_trace_was_replaced_is_compared(tmp_path):
    write_pickle(tmp_path / "data" / "a.pkl", make_traces(2))
    convert(tmp_path / "data", tmp_path / "one.zarr")
    write_pickle(tmp_path / "data" / "b.pkl", [make_trace(0, seed=5)])
    convert(tmp_path / "data", tmp_path / "m.zarr", "--on-conflict", "keep-last")
    before = tree_bytes(tmp_path / "m.zarr")
    with pytest.raises(InvalidInputError, match="different content"):
        merge_stores([tmp_path / "one.zarr"], tmp_path / "m.zarr")
    assert tree_bytes(tmp_path / "m.zarr") == before


def test_a_repeated_merge_compares_only_traces_in_other_segments(tmp_path, monkeypatch):
    write_pickle(tmp_path / "data" / "a.pkl", make_traces(3))
    convert(tmp_path / "data", tmp_path / "s.zarr")
    write_store(tmp_path / "other.zarr", [make_trace(9)])
    compared, append = [], Transfer.append
    monkeypatch.setattr(Transfer, "append", lambda self, index: compared.append(index) or append(self, index))

    def merge():
        compared.clear()
        report = merge_stores([tmp_path / "other.zarr", tmp_path / "s.zarr"], tmp_path / "m.zarr")
        return report.num_traces_new, report.num_duplicates, len(compared)

    assert [merge(), merge()] == [(4, 0, 4), (0, 4, 0)]
    with tracestore.create(tmp_path / "s.zarr", append=True) as writer:
        writer.append(make_trace(1), label=1)
    assert [merge(), merge()] == [(0, 4, 3), (0, 4, 0)]
    assert np.nansum(tracestore.open(tmp_path / "m.zarr").labels) == 1
    write_pickle(tmp_path / "data" / "a.pkl", [make_trace(2, seed=5)])
    convert(tmp_path / "data", tmp_path / "m.zarr", "--on-conflict", "keep-last")
    with pytest.raises(InvalidInputError, match="different content"):
        merge()


@pytest.mark.long
def test_a_merge_lists_the_newest_source_of_a_name_last(tmp_path):
    """A file was changed, and the change was taken back."""
    versions = [make_traces(1), make_traces(2)]
    for k in (0, 1, 0):
        path = write_pickle(tmp_path / "a.pkl", versions[k])
        convert(path, tmp_path / "s.zarr")
        merge_stores([tmp_path / "s.zarr"], tmp_path / "m.zarr")
    listed = [
        [(source.size, source.fingerprint) for source in tracestore.open(tmp_path / name).internals.index.sources()]
        for name in ("s.zarr", "m.zarr")
    ]
    assert len(listed[0]) == 3 and listed[0] == listed[1]
    merge_stores([tmp_path / "s.zarr"], tmp_path / "m.zarr")
    assert len(list(tracestore.open(tmp_path / "m.zarr").internals.index.sources())) == 3


def test_a_label_of_a_copy_that_replaces_that_of_a_score_is_counted(tmp_path):
    traces = make_traces(3)
    scored = write_store(tmp_path / "a.zarr", traces, score=lambda k: [0.9, 0.1, 0.8][k])
    labeled = write_store(tmp_path / "b.zarr", traces, label=1)
    out = command("merge", scored, labeled, tmp_path / "m.zarr", check=0).stdout
    assert f"{scored}: 2 traces with another label in {tmp_path / 'm.zarr'}" in out and f"{labeled}:" not in out
    out = command("merge", labeled, scored, check=0).stdout
    assert f"{scored}: 2 traces with another label in {scored}" in out
    assert "another label" not in command("merge", labeled, scored, check=0).stdout


def test_scores_on_another_scale_give_no_other_labels(tmp_path):
    a = write_store(tmp_path / "a.zarr", make_traces(4), score=lambda k: k % 2)
    with tracestore.create(tmp_path / "b.zarr") as writer:
        writer.define_score("percent")
        for k in range(4, 8):
            writer.append(make_trace(k), scores={"percent": 90.0 if k % 2 else 10.0, "score": k % 2})
    with tracestore.open(tmp_path / "b.zarr") as b:
        assert b.score_name == "percent"
    assert "another label" not in command("merge", a, tmp_path / "b.zarr", tmp_path / "m.zarr", check=0).stdout
