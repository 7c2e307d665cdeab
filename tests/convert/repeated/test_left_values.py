"""Stored values that the files of a later conversion do not give: refused, or named by the summary."""

import shutil
from unittest import mock

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, field_flags, make_trace, write_pickle, write_store
from tracestore.convert import cutting
from tracestore.convert.runner import Conversion

ABSENT = "1 stored trace with a score, label, group or text that the files lack, and that earlier ones may"
LOST = "stored trace such as q0 have a score, label or group that the sources no longer have"
STATED = field_flags(
    "hidden_states = {file}.npz : hs -> L S D", "question_id = {file}.npz : id", "is_correct = t.csv : [id=id]/ok"
)
STATED += ["--attention", "none"]


@pytest.fixture
def data(tmp_path):
    """An empty folder for sources."""
    (tmp_path / "in/data").mkdir(parents=True)
    return tmp_path / "in/data"


def write_inside(folder, name="a", **left_out):
    """Write two traces into a pickle, the first one without some of its values."""
    values = {"is_correct": 1, "group": "g", "question": "why?"}
    traces = [make_trace(k, tokens=4) | values for k in range(2)]
    traces[0] = {key: value for key, value in traces[0].items() if key not in left_out}
    write_pickle(folder / f"{name}.pkl", traces)


def write_table(folder, name="a", ok="1"):
    states = np.random.default_rng(0).standard_normal((2, 4, 8)).astype("f2")
    np.savez(folder / f"{name}.npz", hs=states, id=np.array("q0"))
    np.savez(folder / "z.npz", hs=states + 1, id=np.array("q1"))
    (folder / "t.csv").write_text(f"id,ok\nq0,{ok}\nq1,0\n")


def first(store):
    trace = tracestore.open(store)[0]
    return trace.scores, trace.group, trace.question


@pytest.mark.parametrize("way", ["file", "folder", "copy", "twice"])
@pytest.mark.parametrize("name", ["is_correct", "group", "question"])
def test_a_value_that_a_renamed_file_loses_is_refused(tmp_path, data, name, way):
    store, source, new = tmp_path / "s.zarr", data, "b"
    write_inside(data)
    convert(data, store)
    if way == "copy":
        write_inside(data, "b")
        convert(data, store)
    if way == "folder":
        source, new = data.parent, "a"
    else:
        (data / "a.pkl").rename(data / "b.pkl")
    convert(source, store)
    if way == "twice":
        (data / "b.pkl").rename(data / "c.pkl")
        convert(source, store)
        new = "c"
    write_inside(data, new, **{name: None})
    for _ in range(2):
        message = error_of("convert", source, store, code=3)
        assert ("different content (question)" if name == "question" else LOST) in message
    convert(source, store, "--on-conflict", "keep-last")
    convert(source, tmp_path / "new.zarr")
    assert first(store) == first(tmp_path / "new.zarr")


@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_value_that_a_table_loses_when_a_file_is_renamed_is_refused(tmp_path, data, is_at_once):
    write_table(data)
    convert(data, tmp_path / "s.zarr", *STATED)
    (data / "a.npz").rename(data / "b.npz")
    if not is_at_once:
        convert(data, tmp_path / "s.zarr", *STATED)
    write_table(data, "b", "")
    assert LOST in error_of("convert", data, tmp_path / "s.zarr", *STATED, code=3)


@pytest.mark.parametrize("name", ["is_correct", "group", "question"])
def test_the_summary_counts_values_that_files_which_are_not_there_may_have(tmp_path, data, name):
    write_inside(data)
    convert(data, tmp_path / "s.zarr")
    before = first(tmp_path / "s.zarr")
    (data / "a.pkl").unlink()
    write_inside(data, "other", **{name: None})
    assert ABSENT in convert(data, tmp_path / "s.zarr").stdout
    assert first(tmp_path / "s.zarr") == before
    write_inside(data, "other")
    assert ABSENT not in convert(data, tmp_path / "s.zarr").stdout


def test_the_summary_counts_texts_that_are_lost_when_a_trace_moves_to_another_file(tmp_path, data):
    first, second = (make_trace(k, tokens=4) | {"question": "why?"} for k in range(2))
    write_pickle(data / "a.pkl", [first, second])
    write_pickle(data / "b.pkl", [make_trace(2, tokens=4)])
    convert(data, tmp_path / "s.zarr")
    write_pickle(data / "c.pkl", [make_trace(0, tokens=4)])
    assert ABSENT not in convert(data, tmp_path / "s.zarr").stdout  # a.pkl still has the question
    (data / "c.pkl").unlink()
    write_pickle(data / "a.pkl", [second])
    write_pickle(data / "b.pkl", [make_trace(2, tokens=4), make_trace(0, tokens=4)])
    assert ABSENT in convert(data, tmp_path / "s.zarr").stdout


def stays(done):
    """Return what the summary reports of values that may be of earlier files."""
    start, end = "stored values that may be of earlier files stay: ", "; --overwrite begins without them"
    return next((line[len(start) : -len(end)] for line in done.stdout.splitlines() if line.startswith(start)), None)


def scores_file(folder, columns, name="scores.csv"):
    rows = [
        [f"q{k}", *("0.25" if c in ("score", "f1") else "g" if c == "group" else "1" for c in columns)]
        for k in range(2)
    ]
    (folder / name).write_text("\n".join(map(",".join, [["question_id", *columns], *rows])) + "\n")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (["score", "group"], ["score"], "group of 2 traces"),
        (["score"], ["f1"], "score (scores.csv, column score) of 2 traces"),
        (["score", "group"], None, "score (scores.csv, column score) of 2 traces, group of 2 traces"),
        (["score", "label"], None, "score (scores.csv, column score) of 2 traces, label of 2 traces"),
        (["score", "group"], ["score", "group"], None),
    ],
)
def test_the_summary_names_what_a_scores_file_no_longer_gives(tmp_path, data, before, after, expected):
    write_pickle(data / "a.pkl", [make_trace(k, tokens=4) for k in range(2)])
    scores_file(data, before)
    assert stays(convert(data, tmp_path / "s.zarr")) is None
    (data / "scores.csv").unlink()
    if after is not None:
        scores_file(data, after, "new_scores.csv")
    for _ in range(2):
        assert stays(convert(data, tmp_path / "s.zarr")) == expected
    assert stays(convert(data, tmp_path / "s.zarr", "--overwrite")) is None


def test_the_summary_names_what_the_lines_no_longer_give(tmp_path, data):
    write_table(data)
    (data / "t.csv").write_text("id,ok,f1,g\nq0,1,0.5,a\nq1,0,1,b\n")
    lines = ["correctness.f1 = t.csv : [id=id]/f1", "group = t.csv : [id=id]/g"]
    assert stays(convert(data, tmp_path / "s.zarr", *STATED, *field_flags(*lines))) is None
    ignored = field_flags('ignore = ["t.csv : []/f1", "t.csv : []/g"]')
    expected = "f1 (correctness.f1 of the layout) of 2 traces, group of 2 traces"
    assert stays(convert(data, tmp_path / "s.zarr", *STATED, *ignored)) == expected
    assert stays(convert(data, tmp_path / "s.zarr")) == expected
    assert stays(convert(data, tmp_path / "s.zarr", *STATED, *field_flags(*lines))) is None


def test_values_of_traces_of_other_files_are_not_named(tmp_path, data):
    (data.parent / "more").mkdir()
    write_inside(data)
    convert(data, tmp_path / "s.zarr")
    write_pickle(data.parent / "more/b.pkl", [make_trace(5, tokens=4)])
    (tmp_path / "t.csv").write_text("question_id,f1\nq5,0.5\n")
    done = convert(data.parent / "more", tmp_path / "s.zarr", "--scores", tmp_path / "t.csv")
    assert stays(done) is None
    assert stays(convert(data.parent / "more", tmp_path / "s.zarr")) == "f1 (t.csv, column f1) of 1 trace"


@pytest.mark.parametrize("value", ["0", ""])
def test_an_emptied_label_of_a_scores_file_is_refused(tmp_path, data, value):
    write_table(data)
    flags = [*STATED[:4], *field_flags("ignore = t.csv"), "--scores", tmp_path / "o.csv"]
    (tmp_path / "o.csv").write_text("question_id,score,label\nq0,0.5,1\nq1,0.5,0\n")
    convert(data, tmp_path / "s.zarr", *flags)
    (tmp_path / "o.csv").write_text(f"question_id,score,label\nq0,0.5,{value}\nq1,0.5,0\n")
    if value:
        convert(data, tmp_path / "s.zarr", *flags)
    else:
        assert LOST in error_of("convert", data, tmp_path / "s.zarr", *flags, code=3)
        convert(data, tmp_path / "s.zarr", *flags, "--on-conflict", "keep-last")
    np.testing.assert_equal(tracestore.open(tmp_path / "s.zarr").labels, [float(value or "nan"), 0])


@pytest.mark.parametrize("change", ["none", "cell", "group", "label", "column", "no file", "direction"])
def test_a_continued_overwrite_has_the_values_of_the_scores_file_as_it_is(tmp_path, data, monkeypatch, change):
    """The interrupted one has committed traces with the values of before."""
    monkeypatch.setattr(cutting, "MIN_BYTES", 1)
    for k in range(9):
        write_pickle(data / f"{k}.pkl", [make_trace(k, tokens=4)])

    def write(columns, empty=()):
        cells = {"question_id": "q{}", "score": "0.{}", "f1": "0.{}", "group": "g{}", "label": "1"}
        rows = [["" if (k, c) in empty else cells[c].format(k) for c in ("question_id", *columns)] for k in range(9)]
        (data / "scores.csv").write_text("\n".join(map(",".join, [["question_id", *columns], *rows])) + "\n")

    columns, flags = ["score", "group", "label"], ["--overwrite"]
    write(columns)
    convert(data, tmp_path / "s.zarr")
    left = [5]

    def check(self):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with mock.patch.object(Conversion, "_check_interrupt", check):
        convert(data, tmp_path / "s.zarr", "--overwrite", check=130)
    new = {
        "cell": (columns, [(0, "score"), (0, "label")]),
        "group": (["score", "label"],),
        "label": (["score", "group"],),
    }
    new |= {"column": (["f1", "group", "label"],)}
    if change in new:
        write(*new[change])
    elif change == "no file":
        (data / "scores.csv").unlink()
    elif change == "direction":
        flags += ["--score-direction", "hallucination"]
    done = convert(data, tmp_path / "s.zarr", *flags)
    assert ("already in the store" in done.stdout) and ("(0 files already" in done.stdout) == (change != "none")
    convert(data, tmp_path / "new.zarr", *flags[1:])
    with tracestore.open(tmp_path / "s.zarr") as store, tracestore.open(tmp_path / "new.zarr") as expected:
        assert store.score_fields == expected.score_fields and store.score_name == expected.score_name
        np.testing.assert_equal(store.labels, expected.labels)
        np.testing.assert_equal(store.scores, expected.scores)
        assert [trace.group for trace in store] == [trace.group for trace in expected]


GONE = "stored, but not from the present files: {}; --overwrite begins without them"


def test_the_summary_counts_traces_that_the_files_do_not_have(tmp_path, data):
    for name in "ab":
        write_pickle(data / f"{name}.pkl", [make_trace(ord(name) + k, tokens=4) for k in (0, 10)])
    assert "stored, but" not in convert(data, tmp_path / "s.zarr").stdout
    assert "stored, but" not in convert(data, tmp_path / "s.zarr").stdout
    write_pickle(data / "a.pkl", [make_trace(ord("a"), tokens=4)])
    assert GONE.format("1 trace") in convert(data, tmp_path / "s.zarr").stdout
    (data / "b.pkl").rename(data / "c.pkl")
    assert "stored, but" not in convert(data, tmp_path / "s.zarr").stdout
    (data / "c.pkl").unlink()
    assert GONE.format("2 traces") in convert(data, tmp_path / "s.zarr").stdout
    write_pickle(data / "c.pkl", [make_trace(ord("b"), tokens=4) | {"question": "why?"}])
    assert GONE.format("1 trace") in convert(data, tmp_path / "s.zarr", "--on-conflict", "keep-last").stdout
    write_pickle(tmp_path / "d.pkl", [make_trace(0)])
    assert "stored, but" not in convert(tmp_path / "d.pkl", tmp_path / "s.zarr").stdout
    assert len(tracestore.open(tmp_path / "s.zarr")) == 5


@pytest.mark.parametrize("name", ["score", "label", "group"])
def test_a_value_that_an_export_no_longer_has_is_refused_or_named(tmp_path, name):
    def export(left_out=()):
        values = {"score": 0.5, "label": 1, "group": "g"}
        values |= {key: None if key != "group" else "" for key in left_out}
        write_store(tmp_path / "src.zarr", [make_trace(k, tokens=4) for k in range(2)], overwrite=True, **values)
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)
        command("export", tmp_path / "src.zarr", tmp_path / "exported", check=0)

    export()
    convert(tmp_path / "exported", tmp_path / "s.zarr")
    export([name])
    if name == "score":  # the export has no column for it
        assert "score (unknown) of 2 traces" in stays(convert(tmp_path / "exported", tmp_path / "s.zarr"))
        return
    assert "that the sources no longer have" in error_of("convert", tmp_path / "exported", tmp_path / "s.zarr", code=3)
    convert(tmp_path / "exported", tmp_path / "s.zarr", "--on-conflict", "keep-last")
    store = tracestore.open(tmp_path / "s.zarr")
    assert np.isnan(store.labels).all() if name == "label" else [trace.group for trace in store] == ["", ""]


def test_a_row_that_gave_a_group_and_is_gone_is_counted_also_if_the_score_has_another_name(tmp_path, data):
    write_pickle(data / "a.pkl", [make_trace(k, tokens=4) for k in range(2)])
    (data / "scores.csv").write_text("question_id,bleurt_score,group\nq0,0.2,g\nq1,0.9,h\n")
    command("convert", data, tmp_path / "s.zarr", check=0)
    (data / "scores.csv").write_text("question_id,rouge_l,group\nq0,0.2,g\n")
    done = command("convert", data, tmp_path / "s.zarr", check=0)
    assert "1 stored trace without a row in scores.csv: the score rouge_l or the group stays unchanged" in done.stdout
