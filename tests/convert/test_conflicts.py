"""A key that occurs twice, with the same or different content, and files that change."""

import contextlib
import itertools
import json
import os

import numpy as np
import pytest

import tracestore
from tests.helpers import (
    command,
    convert,
    make_graphs,
    make_optional,
    make_trace,
    make_traces,
    write_pickle,
    write_scores,
)
from tracestore.cli import main
from tracestore.errors import InvalidInputError, MissingFieldError
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.writer import StoreWriter


@pytest.fixture
def data(tmp_path):
    """An empty folder for sources."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def changed(trace):
    """Return the trace with another answer and other hidden states."""
    return {**trace, "hidden_states": [h + 1 for h in trace["hidden_states"]], "generated_answer_clean": "another"}


@pytest.mark.parametrize("together", [True, False], ids=["one run", "two runs"])
@pytest.mark.parametrize("choice", ["error", "keep-first", "keep-last"])
def test_on_conflict(tmp_path, data, choice, together):
    traces = make_traces(5)
    second = [traces[0], changed(traces[1]), changed(changed(traces[1])), make_trace(9), changed(make_trace(9))]
    if choice == "error":
        second = second[:2]
    store = tmp_path / "s.zarr"
    write_pickle(data / "a.pkl", traces)
    if not together:
        convert(data, store)
    write_pickle(data / "b.pkl", second)
    done = convert(data, store, "--json", "--on-conflict", choice, check=3 if choice == "error" else 0)
    if choice == "error":
        assert "b.pkl, trace 1" in done.stderr and "'q1'" in done.stderr and "--on-conflict" in done.stderr
        assert tracestore.open(store).question_ids == [f"q{k}" for k in range(5)]
        return
    summary = json.loads(done.stdout)
    assert summary["num_conflicts"] == 3 and summary["num_traces"] == 6
    assert summary["num_duplicates"] == (4 if choice == "keep-first" else 1)
    opened = tracestore.open(store)
    trace = opened[opened.index_of("q1")]
    expected = traces[1] if choice == "keep-first" else changed(changed(traces[1]))
    np.testing.assert_array_equal(trace.hidden_states, np.stack(expected["hidden_states"]))
    np.testing.assert_array_equal(trace.last_token, np.stack(expected["hidden_states"])[:, -1])
    assert trace.answer == expected["generated_answer_clean"]
    assert opened.info()["num_tokens"] == sum(t.num_tokens for t in opened)
    assert verify_store(store).damaged == {}
    # Nothing is new in a second conversion.
    again = json.loads(convert(data, store, "--json", "--on-conflict", choice).stdout)
    assert again["num_sources_skipped_existing"] == 2 and again["num_traces_new"] == 0
    # Later commits merge the index and must keep the choice.
    for k in range(3):
        write_pickle(data / f"c{k}.pkl", [make_trace(20 + k)])
        convert(data, store)
    opened = tracestore.open(store)
    np.testing.assert_array_equal(opened[1].hidden_states, np.stack(expected["hidden_states"]))


def test_a_changed_file_under_a_committed_name_is_reported(tmp_path, data):
    write_pickle(data / "a.pkl", make_traces(3))
    convert(data, tmp_path / "s.zarr")
    write_pickle(data / "a.pkl", make_traces(4))
    done = convert(data, tmp_path / "s.zarr", "--json")
    assert "a.pkl: the file or its time has changed since it was committed" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["num_sources_modified"] == 1 and summary["num_duplicates"] == 3 and summary["num_traces_new"] == 1
    write_pickle(data / "a.pkl", [changed(make_trace(0))])
    assert "different content" in convert(data, tmp_path / "s.zarr", check=3).stderr.splitlines()[-1]
    command("verify", tmp_path / "s.zarr", check=0)


def test_on_conflict_applies_to_labels(tmp_path):
    value = {"sequences": np.ones((2, 3, 4), "f2"), "labels": [0.0, 1.0], "question_ids": ["a", "b"]}
    write_pickle(tmp_path / "one.pkl", value)
    write_pickle(tmp_path / "two.pkl", value | {"labels": [1.0, 1.0]})
    for choice, label in (("keep-first", 0.0), ("keep-last", 1.0)):
        store = tmp_path / f"{choice}.zarr"
        convert(tmp_path / "one.pkl", store)
        done = convert(tmp_path / "two.pkl", store, "--on-conflict", choice)
        assert tracestore.open(store).labels.tolist() == [label, 1.0]
        assert "different content under a question id and sample of the store: 1 trace" in done.stdout
        other = {"sequences": np.zeros((2, 3, 4), "f2"), "labels": [1.0 - label, 1.0], "question_ids": ["a", "b"]}
        write_pickle(tmp_path / "three.pkl", other)
        done = convert(tmp_path / "three.pkl", store, "--on-conflict", choice, "--json")
        assert json.loads(done.stdout)["num_conflicts"] == 2, "a trace with another label and other arrays counts once"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_skipped_trace_gives_no_label(tmp_path, data, workers):
    write_pickle(data / "a.pkl", [make_trace(0), make_trace(1)])
    convert(data, tmp_path / "s.zarr")
    write_pickle(data / "b.pkl", [changed(make_trace(0)) | {"label": 1}, make_trace(1) | {"label": 0}])
    for _ in range(2):
        convert(data, tmp_path / "s.zarr", "--on-conflict", "keep-first", "--workers", workers)
        np.testing.assert_equal(tracestore.open(tmp_path / "s.zarr").labels, [np.nan, 0])


def found_values(store):
    """Return the first state, scores, label and group of each trace by key."""
    return {
        (t.question_id, t.sample): (
            t.hidden_states[0, 0, 0],
            t.scores,
            None if t.label != t.label else t.label,
            t.group,
        )
        for t in tracestore.open(store)
    }


VALUES = {
    "built-in layout": (),
    "stated layout": ("is_correct = *.pkl : [id=question_id]/is_correct", "group = *.pkl : [id=question_id]/group"),
    "table": ("is_correct = t.csv : [id=id]/ok", "group = t.csv : [id=id]/group"),
}
VALUES = {name: [word for line in lines for word in ("--field", line)] for name, lines in VALUES.items()}
OF_STATES = ["--field", "hidden_states = *.pkl : [id=question_id]/hidden_states -> L S D", "--attention", "none"]
OF_STATES += ["--field", "generated_answer = *.pkl : [id=question_id]/generated_answer_clean"]


def write_values(folder, form, value, trace=None, name="a.pkl"):
    """Write a file of one trace, with a score and a group unless the value is None."""
    values = {} if value is None else {"is_correct": value, "group": "gh"[value]}
    trace = trace or make_trace(0)
    if form != "built-in layout":
        trace = {name: trace[name] for name in ("hidden_states", "question_id")}
    trace["generated_answer_clean"] = "an answer"
    if form == "stated layout":
        trace |= {"is_correct": np.nan, "group": ""}
    write_pickle(folder / name, [trace | (values if form != "table" else {})])
    if form == "table":
        ok, group = ("", "") if value is None else (value, values["group"])
        (folder / "t.csv").write_text(f"id,ok,group\nq0,{ok},{group}\nq1,1,g\n")
    if form == "table" and trace["question_id"] == "q0":
        write_values(folder, form, value, make_trace(1), "z.pkl")


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("together", [True, False], ids=["one run", "two runs"])
@pytest.mark.parametrize("form", VALUES)
@pytest.mark.parametrize("value", [None, 0])
def test_a_skipped_trace_gives_no_value(tmp_path, data, form, together, workers, value):
    flags = [*(OF_STATES if form != "built-in layout" else []), *VALUES[form]]
    if together and form == "table":
        pytest.skip("one table gives the values of both")
    write_values(data, form, value)
    if not together:
        convert(data, tmp_path / "s.zarr", *flags)
    write_values(data, form, 1, changed(make_trace(0)), "b.pkl" if together else "a.pkl")
    for _ in range(2):
        done = convert(data, tmp_path / "s.zarr", *flags, "--on-conflict", "keep-first", "--workers", workers)
        stored = make_trace(0)["hidden_states"][0][0, 0], {} if value is None else {"is_correct": value}, None
        assert found_values(tmp_path / "s.zarr")["q0", 0] == (*stored, "" if value is None else "g")
        assert "have changed and were replaced" not in done.stdout


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("covered", [2, 1])
def test_a_scores_file_that_is_added_later_replaces_labels_only_if_the_user_chooses(tmp_path, data, workers, covered):
    value = {"sequences": np.ones((2, 3, 4), "f2"), "labels": [0.0, 1.0], "question_ids": ["a", "b"]}
    write_pickle(data / "a.pkl", value)
    convert(data, tmp_path / "s.zarr")
    (data / "scores.csv").write_text("question_id,score\na,0.25\nb,0.75\n"[: -7 if covered == 1 else None])
    convert(data, tmp_path / "new.zarr")

    done = convert(data, tmp_path / "s.zarr", "--workers", workers, check=3)
    assert "2 stored traces such as a have a score, label or group that the sources no longer have" in done.stderr
    assert tracestore.open(tmp_path / "s.zarr").labels.tolist() == [0, 1]
    convert(data, tmp_path / "s.zarr", "--workers", workers, "--on-conflict", "keep-last")
    with tracestore.open(tmp_path / "s.zarr") as store, tracestore.open(tmp_path / "new.zarr") as new:
        np.testing.assert_equal(store.labels, new.labels)
        np.testing.assert_equal(store.scores, new.scores)
        np.testing.assert_equal(store.targets(), new.targets())


@pytest.mark.parametrize("change", ["appended", "touched", "removed"])
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, capsys, change):
    path = write_pickle(tmp_path / "a.pkl", make_traces(3))
    original = StoreWriter.append_packed

    def append(self, *args, **options):
        if change == "removed":
            path.unlink(missing_ok=True)
        else:
            with path.open("ab") as file:
                file.write(b"x" if change == "appended" else b"")
            os.utime(path)
        return original(self, *args, **options)

    monkeypatch.setattr(StoreWriter, "append_packed", append)
    assert main(["convert", str(path), str(tmp_path / "s.zarr")]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a.pkl: another program modified the file" in error
    assert not (tmp_path / "s.zarr").exists()


# A score inside of a trace file, by a built-in layout and by a stated one.
BUILTIN = ("--score-column", "quality", "--score-direction", "correct")
FIELDS = {
    "hidden_states": "[]/hidden_states -> L S D",
    "attentions": "[]/attentions -> L H S S",
    "question_id": "[]/question_id",
    "correctness.quality": "[]/quality",
}
STATED = [word for name, path in FIELDS.items() for word in ("--field", f"{name} = *.pkl : {path}")]
STATED += ["--field", 'records = ["*.pkl : []"]']
CHOICES = ("error", "keep-first", "keep-last")


def write_scored(folder, score, answer="an answer", name="a.pkl"):
    traces = [{**trace, "quality": 0.75, "generated_answer_clean": answer} for trace in make_traces(3)]
    if score is None:
        del traces[0]["quality"]
    else:
        traces[0]["quality"] = score
    write_pickle(folder / name, traces)


@pytest.mark.parametrize(("score", "choice"), list(itertools.product([0.125, None], CHOICES)))
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("flags", [BUILTIN, STATED], ids=["built-in layout", "stated layout"])
def test_a_changed_score_replaces_the_stored_one(tmp_path, flags, workers, score, choice):
    (folder := tmp_path / "data").mkdir()
    write_scored(folder, score)
    convert(folder, tmp_path / "s.zarr", *flags)

    write_scored(folder, 0.875)
    done = convert(folder, tmp_path / "s.zarr", *flags, "--on-conflict", choice, "--workers", workers)

    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0.875, 0.75, 0.75]
    assert ("scores, labels or groups of 1 stored trace have changed and were replaced" in done.stdout) == (
        score is not None
    )


@pytest.mark.parametrize("flags", [BUILTIN, STATED], ids=["built-in layout", "stated layout"])
def test_a_replaced_trace_has_the_score_of_its_file(tmp_path, flags):
    (folder := tmp_path / "data").mkdir()
    write_scored(folder, 0.125)
    convert(folder, tmp_path / "s.zarr", *flags)

    write_scored(folder, 0.875, answer="another answer")
    convert(folder, tmp_path / "s.zarr", *flags, "--on-conflict", "keep-last")

    store = tracestore.open(tmp_path / "s.zarr")
    assert store[0].answer == "another answer" and store.scores.tolist() == [0.875, 0.75, 0.75]


@pytest.mark.parametrize("flags", [BUILTIN, STATED], ids=["built-in layout", "stated layout"])
def test_copies_of_one_run_with_two_scores_are_refused(tmp_path, flags):
    (folder := tmp_path / "data").mkdir()
    write_scored(folder, 0.125)
    write_scored(folder, 0.875, name="b.pkl")

    done = convert(folder, tmp_path / "s.zarr", *flags, check=3)

    assert "found 0.125 and 0.875 for q0, sample 0: copies of a trace have one label" in done.stderr


NEW_FIELDS = make_optional(4) | {"question": "why", "prompt_length": 2, "note": "an extra", "answer_span": (1, 2)}


def stored_fields(path):
    """Return the fields of the first trace of a store that NEW_FIELDS names."""
    (trace, *_) = tracestore.open(path)
    return trace.optional_fields | {"question": trace.question, "prompt_length": trace.prompt_length} | trace.extras


@pytest.mark.parametrize("name", NEW_FIELDS)
@pytest.mark.parametrize("is_removed", [False, True], ids=["added", "removed"])
def test_a_field_that_a_file_gets_or_loses_is_not_ignored(tmp_path, data, name, is_removed):
    """The arrays are the same. Of another file with the trace, the fields that are not stored count."""
    short = make_trace(0, tokens=4)
    whole = short | {name: NEW_FIELDS[name]}
    before, after = (whole, short) if is_removed else (short, whole)
    write_pickle(data / "a.pkl", [before])
    convert(data, tmp_path / "s.zarr")
    expected = stored_fields(tmp_path / "s.zarr")
    write_pickle(data / "b.pkl", [after])
    convert(data, tmp_path / "s.zarr", check=0 if is_removed else 3)
    (data / "b.pkl").rename(data / "a.pkl")
    refused = convert(data, tmp_path / "s.zarr", check=3).stderr
    assert f"different content ({'extras' if name == 'note' else name})" in refused
    np.testing.assert_equal(stored_fields(tmp_path / "s.zarr"), expected)
    convert(data, tmp_path / "s.zarr", "--on-conflict", "keep-last")
    convert(data, tmp_path / "new.zarr")
    np.testing.assert_equal(stored_fields(tmp_path / "s.zarr"), stored_fields(tmp_path / "new.zarr"))


@pytest.mark.parametrize("first", ["states", "last token"])
@pytest.mark.parametrize("with_text", ["states", "last token"])
def test_files_that_complete_a_trace_lose_no_text(tmp_path, first, with_text):
    """Its texts are those of the file with the states of all tokens."""
    whole = make_trace(0, tokens=4)
    states = {name: whole[name] for name in ("hidden_states", "attentions", "question_id")}
    traces = {"states": states, "last token": {"last_token": np.stack([h[-1] for h in whole["hidden_states"]])}}
    traces["last token"]["question_id"] = "q0"
    traces[with_text]["question"] = "why"
    with tracestore.create(tmp_path / "s.zarr", attention="mean") as writer:
        for name in sorted(traces, key=lambda name: name != first):
            if with_text == "last token" and name != first:
                with pytest.raises(InvalidInputError, match=r"different content \(question\)"):
                    writer.append(traces[name])
            else:
                writer.append(traces[name])


@pytest.mark.parametrize("change", [{"generated_answer_clean": "new"}, {"label": 0}, {"score": None}, {"group": None}])
def test_another_choice_counts_after_keep_first(tmp_path, data, change):
    fields = {"is_correct": "[]/score", "group": "[]/group"} if {"score", "group"} & {*change} else {}
    flags = [
        w
        for n, path in (FIELDS | fields).items()
        if n != "correctness.quality"
        for w in ("--field", f"{n} = *.pkl : {path}")
    ]
    flags = [*flags, "--field", 'records = ["*.pkl : []"]'] if fields else []
    before = {"generated_answer_clean": "old"} | ({"score": 1.0, "group": "a"} if fields else {"label": 1})
    store, traces = tmp_path / "s.zarr", [make_trace(k) | before for k in range(2)]
    write_pickle(data / "a.pkl", traces)
    convert(data, store, *flags)
    write_pickle(data / "a.pkl", [traces[0] | change, traces[1]])

    def found():
        return [(t.answer, t.label, t.group, tuple(t.scores.items())) for t in tracestore.open(store)]

    first = found()
    for _ in range(2):
        convert(data, store, *flags, "--on-conflict", "keep-first")
        np.testing.assert_equal(found(), first)
    convert(data, store, *flags)  # the choice stays
    np.testing.assert_equal(found(), first)
    for _ in range(2):
        convert(data, store, *flags, "--on-conflict", "keep-last")
        last = found()
        convert(data, tmp_path / "new.zarr", *flags, "--overwrite")
        with tracestore.open(tmp_path / "new.zarr") as new:
            np.testing.assert_equal(last, [(t.answer, t.label, t.group, tuple(t.scores.items())) for t in new])
    assert last != first


@pytest.mark.parametrize("first", [0, 1])
def test_files_that_complete_each_other_are_read_again(tmp_path, data, first):
    """The texts of the traces are those of the file with graphs."""
    torch = pytest.importorskip("torch")
    traces = make_traces(3, tokens=3)
    last = torch.stack([torch.tensor(np.stack([h[-1] for h in t["hidden_states"]])) for t in traces])
    labels, ids = torch.tensor([0.0, 1.0, 0.0]), [t["question_id"] for t in traces]
    sequences = {"sequences": last, "labels": labels, "question_ids": ids}
    graphs = {"graphs": [make_graphs(t) for t in traces], "labels": labels, "question_ids": ids}
    paths = [data / "a.pt", data / "b.pt"]
    for path, value in zip(paths, (sequences, graphs)[:: 1 - 2 * first], strict=True):
        torch.save(value, path)
    convert(data, tmp_path / "s.zarr")
    for path in paths:
        torch.save(torch.load(path, weights_only=False) | {"labels": labels.double()}, path)
        assert "3 duplicates" in convert(data, tmp_path / "s.zarr").stdout


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("together", [True, False], ids=["one run", "two runs"])
@pytest.mark.parametrize("form", VALUES)
@pytest.mark.parametrize("value", [None, 1])
def test_a_trace_that_replaces_another_one_has_its_own_values(tmp_path, data, form, together, workers, value):
    flags = [*(OF_STATES if form != "built-in layout" else []), *VALUES[form]]
    if together and form == "table":
        pytest.skip("one table gives the values of both")
    write_values(data, form, 0)
    if not together:
        convert(data, tmp_path / "s.zarr", *flags)
        write_scores(tmp_path / "f1.csv", {"q0": 0.5}, column="f1")
        command("score", tmp_path / "s.zarr", "--scores", tmp_path / "f1.csv", "--name", "f1", check=0)
    write_values(data, form, value, changed(make_trace(0)), "b.pkl" if together else "a.pkl")
    for _ in range(2):
        convert(data, tmp_path / "s.zarr", *flags, "--on-conflict", "keep-last", "--workers", workers)
        stored = changed(make_trace(0))["hidden_states"][0][0, 0], {} if value is None else {"is_correct": value}, None
        assert found_values(tmp_path / "s.zarr")["q0", 0] == (*stored, "" if value is None else "h")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_replaced_trace_that_is_read_again_keeps_what_was_added(tmp_path, data, workers):
    """Read two files with a trace again: the second one replaces it every time."""
    flags = ("--on-conflict", "keep-last", "--workers", workers)
    write_pickle(data / "a.pkl", [make_trace(0) | {"label": 1}])
    write_pickle(data / "b.pkl", [changed(make_trace(0)) | {"label": 0}])
    convert(data, tmp_path / "s.zarr", *flags)
    write_scores(tmp_path / "f1.csv", {"q0": 0.5}, column="f1")
    command("score", tmp_path / "s.zarr", "--scores", tmp_path / "f1.csv", check=0)
    expected = found_values(tmp_path / "s.zarr")
    assert expected["q0", 0][1:] == ({"f1": 0.5}, 0, "")
    write_pickle(data / "a.pkl", [make_trace(0) | {"label": 1}, make_trace(1)])
    convert(data, tmp_path / "s.zarr", *flags)
    assert len(found := found_values(tmp_path / "s.zarr")) == 2 and found["q0", 0] == expected["q0", 0]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("change", [{}, {"is_correct": None}, {"is_correct": np.nan}, {"group": None}, {"group": ""}])
def test_a_value_that_a_file_of_a_built_in_layout_loses_is_a_conflict(tmp_path, data, change, workers):
    store, values = tmp_path / "s.zarr", {"is_correct": 1, "group": "g", "label": 0}
    write_pickle(data / "a.pkl", [make_trace(0) | values, make_trace(1)])
    convert(data, store)
    before = found_values(store)
    lost = change.keys() or {"is_correct", "group"}
    now = {name: value for name, value in values.items() if name not in lost} | change
    write_pickle(data / "a.pkl", [make_trace(0) | now, make_trace(1)])
    assert "no longer have" in convert(data, store, "--workers", workers, check=3).stderr
    assert found_values(store) == before
    done = convert(data, store, "--workers", workers, "--on-conflict", "keep-first")
    assert "that the sources no longer have: it stays" in done.stdout and found_values(store) == before
    done = convert(data, store, "--workers", workers, "--on-conflict", "keep-last")
    assert "a value of 1 trace was removed" in done.stdout
    (state, scores, label, group) = before["q0", 0]
    kept = {} if "is_correct" in lost else scores
    assert found_values(store)["q0", 0] == (state, kept, label, "" if "group" in lost else group)


def only_last(trace, **values):
    """Return a trace with the states of its last token alone."""
    last = np.stack(trace["hidden_states"])[:, -1]
    return {"question_id": trace["question_id"], "last_token": last, **values}


JUDGED = {"is_correct": 1, "group": "g"}


@pytest.mark.parametrize("together", [True, False], ids=["one run", "two runs"])
@pytest.mark.parametrize("first", ["states", "last token"])
@pytest.mark.parametrize("choice", ["error", "keep-last"])
def test_a_file_that_completes_a_trace_takes_no_value_away(tmp_path, data, choice, first, together):
    """Whichever file has the values, and whichever is read first."""
    trace = make_trace(0)
    files = [trace | JUDGED, only_last(trace)] if first == "states" else [only_last(trace), trace | JUDGED]
    for k, found in enumerate(files):
        write_pickle(data / f"{k}.pkl", [found])
        if k == 0 and not together:
            convert(data, tmp_path / "s.zarr", "--attention", "mean")

    convert(data, tmp_path / "s.zarr", "--attention", "mean", "--on-conflict", choice)

    stored = tracestore.open(tmp_path / "s.zarr")
    assert stored[0].scores == {"is_correct": 1.0} and stored[0].group == "g"


def test_a_conflict_of_labels_alone_replaces_no_trace(tmp_path, data):
    trace = make_trace(0)
    write_pickle(data / "1.pkl", [only_last(trace, label=1, group="g")])
    convert(data, tmp_path / "s.zarr", "--attention", "mean")
    write_pickle(data / "2.pkl", [trace | {"label": 0}])

    convert(data, tmp_path / "s.zarr", "--attention", "mean", "--on-conflict", "keep-last")

    (stored,) = tracestore.open(tmp_path / "s.zarr")
    assert (stored.label, stored.group) == (0, "g")


@pytest.mark.parametrize("judged", [False, True])
def test_states_that_keep_first_adds_bring_their_group_and_no_contradiction(tmp_path, data, judged):
    """The label of the first file stays; a judgment that agrees with the label of the second one contradicts it."""
    trace = make_trace(0)
    write_pickle(data / "1.pkl", [only_last(trace, label=1)])
    convert(data, tmp_path / "s.zarr", "--attention", "mean")
    write_pickle(data / "2.pkl", [trace | {"label": 0, "group": "g"} | ({"is_correct": 1} if judged else {})])

    words = data, tmp_path / "s.zarr", "--attention", "mean", "--on-conflict", "keep-first"
    done = convert(*words, check=3 if judged else 0)

    (stored,) = tracestore.open(tmp_path / "s.zarr")
    assert stored.label == 1 and stored.scores == {}
    assert "expected that they agree" in done.stderr if judged else stored.group == "g"


def test_groups_of_the_command_score_stay_when_a_file_grows(tmp_path, data):
    write_pickle(data / "a.pkl", [make_trace(0) | {"label": 1}])
    convert(data, tmp_path / "s.zarr")
    (tmp_path / "s.csv").write_text("question_id,score,group\nq0,0.3,g\n")
    command("score", tmp_path / "s.zarr", "--scores", tmp_path / "s.csv", check=0)
    write_pickle(data / "a.pkl", [make_trace(0) | {"label": 1}, make_trace(1) | {"label": 0}])

    convert(data, tmp_path / "s.zarr")

    assert [trace.group for trace in tracestore.open(tmp_path / "s.zarr")] == ["g", ""]


@pytest.mark.parametrize("form", VALUES)
def test_groups_of_traces_and_a_scores_file(tmp_path, data, form):
    """It replaces groups inside of built-in layouts alone, and removes none silently."""
    write_values(data, form, 0)
    words = [*(OF_STATES if form != "built-in layout" else []), *VALUES[form], "--scores", tmp_path / "scores.csv"]

    def group(*cells, conflict="error", check=0, overwrite=True):
        (tmp_path / "scores.csv").write_text(
            "question_id,score" + ",group" * len(cells) + "\nq0,0.5" + ",".join(["", *cells])
        )
        more = ["--overwrite"] * overwrite
        done = convert(data, tmp_path / "s.zarr", *words, "--on-conflict", conflict, *more, check=check)
        return done.stderr if check else found_values(tmp_path / "s.zarr")["q0", 0][-1]

    assert group() == group("g") == "g"
    assert "found the group 'g', and '' in scores.csv; --on-conflict keep-last" in group("", check=3)
    assert group("", conflict="keep-first") == "g" and group("", conflict="keep-last") == ""
    if form == "built-in layout":
        assert group("x") == "x"
        return
    assert "found the group 'g', and 'x' in scores.csv; --group-column" in group("x", check=3)
    group()
    write_values(data, form, 1)
    assert group(overwrite=False) == "h"


@pytest.mark.parametrize("is_last_token_first", [True, False])
def test_a_replaced_trace_keeps_no_states_of_the_one_before(tmp_path, is_last_token_first):
    """[keep-last] last tokens of one trace next to hidden states of another"""
    torch = pytest.importorskip("torch")
    last = np.random.default_rng(0).standard_normal((2, 3, 8)).astype("f2")
    sequences = {"sequences": torch.from_numpy(last), "labels": torch.tensor([1.0, 0.0]), "question_ids": ["q0", "q1"]}
    write_pickle(tmp_path / "states/t.pkl", make_traces(3))
    (tmp_path / "last").mkdir()
    torch.save(sequences, tmp_path / "last/preprocessed_a.pt")
    for name in ("last", "states")[:: 1 if is_last_token_first else -1]:
        convert(tmp_path / name, tmp_path / "s.zarr", "--on-conflict", "keep-last")
    own = [np.stack([layer[-1] for layer in make_traces(3)[k]["hidden_states"]]) for k in range(2)]
    with tracestore.open(tmp_path / "s.zarr") as store:
        for k in range(2):
            np.testing.assert_array_equal(store[k].last_token, own[k] if is_last_token_first else last[k])
            with contextlib.nullcontext() if is_last_token_first else pytest.raises(MissingFieldError):
                np.testing.assert_array_equal(store[k].hidden_states[:, -1], store[k].last_token)
        assert len(store) == 3
    assert verify_store(tmp_path / "s.zarr").damaged == {}


def test_of_two_traces_of_one_row_the_first_is_stored(tmp_path):
    """[--skip-bad] which of two files was read first"""
    for k in range(2):
        states = np.random.default_rng(k).standard_normal((2, 4, 3)).astype("f2")
        write_pickle(tmp_path / f"data/f{k}.pkl", [{"qid": "q", "hs": states}, {"qid": f"x{k}", "hs": states + 1}])
    (tmp_path / "data/labels.csv").write_text("qid,ok\nq,1\nx0,0\nx1,1\n")
    lines = ("hidden_states = *.pkl : [id=qid]/hs -> L S D", "is_correct = labels.csv : [id=qid]/ok")
    words = [word for line in lines for word in ("--field", line)]
    for _ in range(8):
        convert(tmp_path / "data", tmp_path / "s.zarr", *words, "--skip-bad", "--overwrite")
        with tracestore.open(tmp_path / "s.zarr") as store:
            assert store["q"].source == ("f0.pkl", 0)


@pytest.mark.parametrize("flags", [(), ("--skip-bad",), ("--on-conflict", "keep-last")])
def test_traces_of_unchanged_files_get_no_second_id(tmp_path, flags):
    """[question_id] the line that a note proposes, added to a store of ids made of file names"""
    for k in range(3):
        (tmp_path / "d").mkdir(exist_ok=True)
        np.savez(tmp_path / f"d/q{k}.npz", hs=np.random.default_rng(k).normal(size=(3, 5, 8)).astype("f2"))
    words = ["--field", "hidden_states = {n}.npz : hs -> L S D"]
    convert(tmp_path / "d", tmp_path / "s.zarr", *words)
    words += ["--field", "question_id = ={n}"]
    is_left_out = "--skip-bad" in flags
    done = command("convert", tmp_path / "d", tmp_path / "s.zarr", *words, *flags, check=0 if is_left_out else 3)
    assert "the store has this trace under another id; --overwrite" in done.stdout + done.stderr
    assert ("q0.npz, trace 0: its file" in done.stderr) != is_left_out
    assert len(tracestore.open(tmp_path / "s.zarr")) == 3
    convert(tmp_path / "d", tmp_path / "s.zarr", *words, "--overwrite")
    assert list(tracestore.open(tmp_path / "s.zarr").question_ids) == ["q0", "q1", "q2"]


def test_a_second_layout_reads_other_traces_of_a_file(tmp_path):
    """[question_id] the greedy answers of a file after its samples: not the same traces under other ids"""
    answers = np.random.default_rng(0).standard_normal((4, 3, 2, 4, 8)).astype("f2")
    write_pickle(
        tmp_path / "d/a.pkl", [{"id": f"q{k}", "greedy": a[0], "samples": a[1:]} for k, a in enumerate(answers)]
    )
    states = {"samples": "K L S D", "greedy": "L S D"}
    for name, axes in states.items():
        words = ["--field", f"hidden_states = a.pkl : [id=id]/{name} -> {axes}"]
        words += ["--field", 'ignore = ["a.pkl : [id=id]/' + ({*states} - {name}).pop() + '"]']
        words += ["--field", "sample = =9"] if name == "greedy" else []
        convert(tmp_path / "d", tmp_path / "s.zarr", *words)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(store) == 12 and sorted({trace.sample for trace in store}) == [0, 1, 9]
