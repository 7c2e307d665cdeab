"""Test tables whose files share a name with those of the states, and serve several of them: their rows are accounted."""

import json

import numpy as np
import pytest

from tests.helpers import convert as command
from tests.ingest.execute.folders import convert, refuse, save, states, table

ANSWERS = [("train", "q0", 0), ("train", "q0", 1), ("train", "q1", 0), ("test", "q0", 0), ("test", "q0", 1)]
# Files of one row a question, by what they share with those of the states: the name of each, its text, and the line.
ROWS = "q,ok,text\nq0,1,A\nq1,0,B\n"
TABLES = {
    "{split}": ("{split}.csv", lambda _: ROWS, "{split}.csv : [id=q]/{key}"),
    "*": ("{split}.csv", lambda _: ROWS, "*.csv : [id=q]/{key}"),
    "{split} and {id}": (
        "{split}_{id}.json",
        lambda k: json.dumps({"ok": int(ANSWERS[k][1] == "q0"), "text": "AB"[ANSWERS[k][1] == "q1"]}),
        "{split}_{id}.json : {key}",
    ),
    "{split} and a list": (
        "{split}.json",
        lambda _: json.dumps({"q0": {"ok": 1, "text": "A"}, "q1": {"ok": 0, "text": "B"}}),
        "{split}.json : {id}/{key}",
    ),
}


def layout_of(tmp_path, kind, field, key):
    """Write a file per answer, and those of a kind of table; return the layout with a line for a key of it."""
    name, text, line = TABLES[kind]
    answers = [("train", "q0", 0), ("train", "q0", 1), ("test", "q1", 0), ("test", "q1", 1)]
    for k, (split, question, sample) in enumerate(answers if kind == "*" else ANSWERS):
        save(tmp_path / f"in/{split}/{question}_{sample}.npy", states(2, 3, 8, seed=k))
        (tmp_path / "in" / name.format(split=split, id=question)).write_text(text(k))
    folder, made = ("*", {}) if kind == "*" else ("{split}", {"question_id": "={split}_{id}"})
    layout = made | {"hidden_states": f"{folder}/{{id}}_{{sample}}.npy -> L S D", field: line.replace("{key}", key)}
    return layout | {"ignore": [line.replace("{key}", "text" if key == "ok" else "ok")]}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(("field", "key"), [("is_correct", "ok"), ("generated_answer", "text")])
def test_a_row_that_serves_several_answers(tmp_path, kind, field, key):
    layout = layout_of(tmp_path, kind, field, key)
    refuse(tmp_path, layout, "serves several traces")

    traces = convert(tmp_path, layout | {f"share.{field}": ["sample"]})
    found = {question[-2:]: trace.score if key == "ok" else trace.answer for (question, _), trace in traces.items()}
    assert len(traces) == (4 if kind == "*" else 5)
    assert found == ({"q0": 1, "q1": 0} if key == "ok" else {"q0": "A", "q1": "B"})


def test_ids_of_tokens_serve_one_answer(tmp_path):
    for k in range(4):
        save(tmp_path / f"in/q{k // 2}_{k % 2}.npy", states(2, 3, 8, seed=k))
        save(tmp_path / f"in/q{k // 2}_ids.npy", np.arange(3) + k)
    layout = {"hidden_states": "{id}_{sample:d}.npy -> L S D", "tokens": "{id}_ids.npy -> S"}
    refuse(tmp_path, layout, "one value of {id}_ids.npy -> S serves several traces")


def test_labels_in_order_serve_one_model(tmp_path):
    for k, model in enumerate("ab"):
        save(tmp_path / f"in/emb_tqa_{model}.npy", states(4, 2, 8, seed=k))
    layout = {"last_token": "emb_{dataset}_{model}.npy -> N L D", "is_correct": "lab_{dataset}.npy -> N"}
    save(tmp_path / "in/lab_tqa.npy", np.array([1, 0, 0, 1]))
    refuse(tmp_path, layout, "serves several traces")
    save(tmp_path / "in/lab_tqa.npy", np.array([1, 0, 0, 1, 1]))
    refuse(tmp_path, layout, "5 rows belong to 4 traces|serves several traces")


def test_a_file_of_one_source_is_its_own(tmp_path):
    """[labels of each data set, in order]"""
    for k, name in enumerate("ab"):
        save(tmp_path / f"in/emb_{name}_m.npy", states(2, 2, 8, seed=k))
        save(tmp_path / f"in/lab_{name}.npy", np.array([k, 1]))
    layout = {"last_token": "emb_{dataset}_{model}.npy -> N L D", "is_correct": "lab_{dataset}.npy -> N"}
    traces = convert(tmp_path, layout | {"question_id": "={dataset}_{N}"})
    assert {question: trace.score for (question, _), trace in traces.items()} == {
        "a_0": 0,
        "a_1": 1,
        "b_0": 1,
        "b_1": 1,
    }


OF_SPLITS = {
    "hidden_states": "{split}/{id}.npy -> L S D",
    "is_correct": "{split}.csv : [id=q]/ok",
    "question_id": "={split}_{id}",
}


def write_splits(tmp_path, rows):
    """Write two traces of each split; `rows` are those of the second one."""
    for k, split in enumerate(("test", "train")):
        for n in range(2):
            save(tmp_path / f"in/{split}/q{n}.npy", states(2, 3, 8, seed=10 * k + n))
        table(tmp_path / f"in/{split}.csv", [{"q": q, "ok": 1} for q in (rows if k else ("q0", "q1"))])


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        (("q0", "q1"), ""),
        (("q0", "q1", "q7"), ", 1 without a trace"),
        (("q0",), ", 1 trace without a row"),
        (("q1", "q7"), ", 1 without a trace, 1 trace without a row"),
    ],
)
def test_rows_are_counted(tmp_path, rows, counts):
    write_splits(tmp_path, rows)
    words = [word for name, line in OF_SPLITS.items() for word in ("--field", f"{name} = {line}")]
    done = command(tmp_path / "in", tmp_path / "s.zarr", *words, "--attention", "none")
    used = 2 + len({"q0", "q1"} & {*rows})
    assert f"is_correct: {used} rows of {{split}}.csv : [id=q]/ok joined by id, split{counts}\n" in done.stdout


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("Q0", "q1"), "train.csv, is_correct: the row 'Q0, train' and the trace 'q0, train' differ in spelling only"),
        (("q1", "q2"), "train.csv, is_correct: the row 'q2, train' and the trace 'q0, train' are left over: numbered"),
        (("x0", "x1"), "train.csv, is_correct: no id, split of it is that of a trace: its first is 'x0, train'"),
    ],
)
def test_each_file_is_checked(tmp_path, rows, words):
    """Rules 12b and 12c name the file, and a file that fits excuses no other one."""
    write_splits(tmp_path, rows)
    refuse(tmp_path, OF_SPLITS, words)


def test_files_without_states_or_rows(tmp_path):
    write_splits(tmp_path, ("q0", "q1"))
    table(tmp_path / "in/dev.csv", [{"q": "q0", "ok": 1}])
    refuse(tmp_path, OF_SPLITS, "dev.csv: files that belong to no states")
    (tmp_path / "in/dev.csv").unlink()
    (tmp_path / "in/train.csv").unlink()
    assert sorted(t.score for t in convert(tmp_path, OF_SPLITS).values())[:2] == [1, 1]


@pytest.mark.parametrize("count", [1, 3])
def test_rows_by_position_are_as_many_as_the_files(tmp_path, count):
    for k, run in enumerate("ab"):
        for n in range(2):
            save(tmp_path / f"in/{run}/q{n}.npy", states(2, 3, 8, seed=10 * k + n))
        save(tmp_path / f"in/{run}/y.npy", np.ones(count if k else 2))
    layout = {"hidden_states": "{run}/q{n:d}.npy -> L S D", "is_correct": "{run}/y.npy : [n=#]"}
    refuse(tmp_path, layout | {"question_id": "={run}_{n}"}, f"b/y.npy.*{count} rows in order belong to 2 traces")


@pytest.mark.parametrize(
    ("sizes", "rows", "words"),
    [
        ({"train_0": 2, "train_1": 3}, {"train": 5}, None),
        ({"train_0": 2, "train_1": 3}, {"train": 6}, "6 rows belong to 5 traces"),
        ({"train_0": 2}, {"train": 6}, "6 rows belong to 2 traces"),
        ({"train_0": 2, "test_1": 3}, {"train": 2, "test": 3}, "found chunk 1, expected 0"),
    ],
)
def test_rows_that_run_on_over_chunks(tmp_path, sizes, rows, words):
    for k, (name, size) in enumerate(sizes.items()):
        save(tmp_path / f"in/{name}.npy", states(size, 2, 8, seed=k))
    for name, count in rows.items():
        table(tmp_path / f"in/{name}.csv", [{"ok": k % 2} for k in range(count)])
    layout = {"last_token": "{split}_{chunk}.npy -> N L D", "is_correct": "{split}.csv : []/ok"}
    if words is not None:
        refuse(tmp_path, layout, words)
        return
    assert [trace.score for trace in convert(tmp_path, layout).values()] == [0, 1, 0, 1, 0]


def test_questions_and_answers_of_rows_in_order(tmp_path):
    """Rule 13b: rows of files that several sources share are those of the traces."""
    for k, model in enumerate("ab"):
        save(tmp_path / f"in/emb_tqa_{model}.npy", states(3, 2, 8, seed=k))
        table(tmp_path / f"in/out_tqa_{model}.json", [{"question": f"Who is {c}?"} for c in "xyz"])
    layout = {
        "last_token": "emb_{dataset}_{model}.npy -> N L D",
        "question": "out_{dataset}_{model}.json : []/question",
        "group": "groups_{dataset}.json : []/group",
        "question_id": "={model}_{dataset}_{N}",
    }
    rows = [{"question": f"Who is {c}?", "group": c} for c in "xyz"]
    table(tmp_path / "in/groups_tqa.json", rows[::-1])
    refuse(tmp_path, layout, "rows in another order")
    table(tmp_path / "in/groups_tqa.json", rows)
    assert [trace.group for trace in convert(tmp_path, layout).values()] == [*"xyz", *"xyz"]
