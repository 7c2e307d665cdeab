"""Tasks of stated, kept and proposed layouts: they give what a conversion in one process gives, and refuse the same."""

import csv
import json

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_trace, tree_bytes, write_pickle, write_scores
from tests.tasks.test_tasks import files_of
from tracestore.errors import TracestoreError
from tracestore.store.format import paths
from tracestore.tasks import Task, commit_tasks, write_task
from tracestore.tasks.task_files import read_tasks

# Counts that depend on the rows of refused traces, names and times.
OWN = ("num_segments", "bytes_out", "seconds", "store", "refused_file")


def states(k, tokens=4, layers=2):
    return np.stack(make_trace(k, tokens=tokens, layers=layers)["hidden_states"])


def table(folder, rows, name="labels.csv"):
    with open(folder / name, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def arrays(folder):
    for k in range(5):
        np.save(folder / f"q{k}.npy", states(k))
    return ["hidden_states = {id}.npy -> L S D"]


def of_table(folder):
    table(folder, [("qid", "is_correct"), *((f"q{k}", k % 2) for k in range(5)), ("q9", 1)])
    return [*arrays(folder), "is_correct = labels.csv : [id=qid]/is_correct"]


def of_rows_in_order(folder):
    for k in range(3):
        np.save(folder / f"chunk_{k}.npy", np.stack([states(10 * k + i) for i in range(2)]))
    table(folder, [("is_correct", "question"), *((k % 2, f"why {k}?") for k in range(6))], "rows.csv")
    return [
        "hidden_states = chunk_{chunk}.npy -> N L S D",
        "is_correct = rows.csv : []/is_correct",
        "question = rows.csv : []/question",
    ]


def of_layers(folder):
    for k in range(4):
        (folder / f"q{k}").mkdir()
        for layer, values in enumerate(states(k, layers=11)):
            np.save(folder / f"q{k}" / f"layer_{layer}.npy", values)
    return ["hidden_states = {id}/layer_{layer}.npy -> S D"]


def of_items(folder):
    for k in range(4):
        items = [{"hs": states(10 * k + i), "name": f"n{10 * k + i}", "ok": i % 2} for i in range(3)]
        write_pickle(folder / f"b{k}.pkl", items)
    return ["hidden_states = *.pkl : []/hs -> L S D", "question_id = *.pkl : []/name", "is_correct = *.pkl : []/ok"]


def of_scores(folder):
    write_scores(folder / "scores.csv", {f"n{10 * k + i}": 0.5 + i / 10 for k in range(4) for i in range(3)})
    return [*of_items(folder)[:2], "ignore = *.pkl : []/ok", "--scores", folder / "scores.csv"]


def of_labels_twice(folder):
    """Refuse traces: some judgments of the scores file differ from the labels of the layout."""
    ids = [f"n{10 * k + i}" for k in range(4) for i in range(3)]
    write_scores(folder / "scores.csv", {q: k % 2 for k, q in enumerate(ids)}, "is_correct")
    lines = of_items(folder)
    return [*lines[:2], lines[2].replace("is_correct", "label"), "--scores", folder / "scores.csv", "--skip-bad"]


def of_skipped(folder):
    of_table(folder)
    np.save(folder / "q2.npy", np.zeros((2, 4, 9), "f2"))
    np.save(folder / "q3.npy", np.full((2, 4, 4), "x"))
    return ["hidden_states = {id}.npy -> L S D", "is_correct = labels.csv : [id=qid]/is_correct", "--skip-bad"]


def of_copies(folder):
    lines = of_table(folder)
    np.save(folder / "r1.npy", states(1))
    table(folder, [("qid", "is_correct"), *((f"{q}", 1) for q in ("q0", "q1", "q2", "q3", "q4", "r1"))])
    return [*lines, 'duplicates = "keep"']


def of_kept(folder):
    """Leave out all traces of some files."""
    for k in range(5):
        np.save(folder / f"{'bad' if k in (1, 2) else 'ok'}_q{k}.npy", states(k))
    return ["hidden_states = {status}_{id}.npy -> L S D", "keep.status = ok"]


def of_proposal(folder):
    for k in range(5):
        np.savez(folder / f"q{k}.npz", hidden_states=states(k, tokens=5 + k, layers=3), input_ids=np.arange(5 + k))
    table(folder, [("id", "is_correct"), *((f"q{k}", k % 2) for k in range(5))])
    return []


CASES = [
    of_table, of_rows_in_order, of_layers, of_items, of_scores, of_labels_twice, of_skipped, of_copies, of_kept, of_proposal
]  # fmt: skip


def words_of(lines):
    words = []
    for k, line in enumerate(lines):
        is_word = str(line).startswith("--") or (k and lines[k - 1] == "--scores")
        words += [line] if is_word else ["--field", line]
    return words


def run(folder, store, plan, words):
    """Convert by tasks, each in a process that knows only its line of the plan; return the report."""
    convert(folder, store, "--plan", plan, *words)
    tasks = [Task.from_json(task.to_json()) for task in read_tasks(plan)]
    for task in reversed(tasks):
        write_task(task)
    return tasks


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_tasks_give_what_convert_gives(tmp_path, case):
    folder = tmp_path / "data"
    folder.mkdir()
    words = words_of(case(folder))
    one, store = tmp_path / "one.zarr", tmp_path / "s.zarr"
    expected = json.loads(convert(folder, one, "--json", *words).stdout)
    tasks = run(folder, store, tmp_path / "plan.json", words)
    assert (len(tasks) > 1) == (case in (of_layers, of_items, of_scores, of_labels_twice, of_kept))
    found = vars(commit_tasks(tasks))
    assert {n: v for n, v in found.items() if n not in OWN} == {n: v for n, v in expected.items() if n not in OWN}
    if case is of_labels_twice:  # The rows of refused traces stay in the segments of tasks.
        assert found["num_traces_refused"] > 0 and values_of(store) == values_of(one)
    else:
        assert files_of(store) == files_of(one)


def values_of(path):
    with tracestore.open(path) as store:
        arrays = [[trace.hidden_states.tobytes(), trace.question_id, trace.source] for trace in store]
        return arrays, store.labels.tolist(), store.scores.tolist(), store.internals.attributes.to_json()


def wrong_ids(folder):
    lines = arrays(folder)
    table(folder, [("qid", "is_correct"), *((f"q0{k}", k % 2) for k in range(5))])
    return [*lines, "is_correct = labels.csv : [id=qid]/is_correct"]


def missing_row(folder):
    lines = of_rows_in_order(folder)
    table(folder, [("is_correct", "question"), *((k % 2, f"why {k}?") for k in range(5))], "rows.csv")
    return lines


def misspelled(folder):
    return [*of_items(folder), "question = *.pkl : []/qestion"]  # codespell:ignore qestion


def without_effect(folder):
    return [*of_items(folder), 'ignore = "*.pkl : []/nothing"']


def equal_states(folder):
    lines = of_table(folder)
    np.save(folder / "q1 (1).npy", states(1))
    return lines


def other_layers(folder):
    lines = of_layers(folder)
    np.save(folder / "q3" / "layer_12.npy", states(3)[0])
    return lines


REFUSED = [wrong_ids, missing_row, misspelled, without_effect, equal_states, other_layers]


@pytest.mark.parametrize("case", REFUSED, ids=lambda f: f.__name__)
def test_tasks_refuse_what_convert_refuses(tmp_path, case):
    folder = tmp_path / "data"
    folder.mkdir()
    words = words_of(case(folder))
    expected = error_of("convert", folder, tmp_path / "one.zarr", *words, code=3)
    tasks = run(folder, tmp_path / "s.zarr", tmp_path / "plan.json", words)
    with pytest.raises(TracestoreError) as found:
        commit_tasks(tasks)
    assert str(found.value) in expected and found.value.exit_code == 3


def test_the_score_of_the_first_line_is_the_default_one_of_a_task(tmp_path, monkeypatch):
    """The first source has the score z alone, the second one a, whose line is the first; both are in one receipt."""
    monkeypatch.undo()
    (tmp_path / "data").mkdir()
    for number in range(2):
        items = [
            {"hs": states(10 * number + k), "name": f"n{10 * number + k}", "z" if number == 0 else "a": k / 8}
            for k in range(3)
        ]
        write_pickle(tmp_path / "data" / f"b{number}.pkl", [{"z": None, "a": None} | item for item in items])
    lines = ["hidden_states = *.pkl : []/hs -> L S D", "question_id = *.pkl : []/name"]
    lines += ["correctness.a = *.pkl : []/a", "correctness.z = *.pkl : []/z"]
    words = words_of(lines)
    convert(tmp_path / "data", tmp_path / "one.zarr", *words)
    (task,) = run(tmp_path / "data", tmp_path / "s.zarr", tmp_path / "plan.json", words)
    commit_tasks([task])
    assert files_of(tmp_path / "s.zarr") == files_of(tmp_path / "one.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.internals.attributes.default_score == "a"


def test_files_that_are_added_are_read_by_the_layout_that_the_store_keeps(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    words = words_of(of_table(folder))
    for store in ("one", "s"):
        convert(folder, tmp_path / f"{store}.zarr", *words)
    np.save(folder / "q9.npy", states(9))
    convert(folder, tmp_path / "one.zarr")
    commit_tasks(run(folder, tmp_path / "s.zarr", tmp_path / "plan.json", []))
    assert files_of(tmp_path / "s.zarr") == files_of(tmp_path / "one.zarr")
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_plan_belongs_to_its_layout(tmp_path):
    folder, plan = tmp_path / "data", tmp_path / "plan.json"
    folder.mkdir()
    lines = of_items(folder)
    convert(folder, tmp_path / "s.zarr", "--plan", plan, *words_of(lines))
    convert(folder, tmp_path / "s.zarr", "--plan", plan, *words_of(lines))
    (tmp_path / "layout.toml").write_text("".join(f'{a} = "{b}"\n' for a, b in (x.split(" = ") for x in lines)))
    convert(folder, tmp_path / "s.zarr", "--plan", plan, "--layout", tmp_path / "layout.toml")
    assert len(list((tmp_path / "s.zarr" / paths.RECEIPTS).iterdir())) == 1


def test_a_damaged_plan_stops_no_other_command(data, tmp_path):
    store, plan = tmp_path / "s.zarr", tmp_path / "plan.json"
    convert(data, store, "--plan", plan)
    tasks = read_tasks(plan)
    damaged = store / paths.plan("0" * 32)
    for content in (b"", b"{}", b"\xff", (store / paths.plan(tasks[0].plan)).read_bytes()[:-9]):
        damaged.write_bytes(content)
        convert(data, store, "--plan", plan)
        command("status", plan, check=0)
        command("clean", store, "--dry-run", check=0)
    command("work", plan, check=0)
    command("commit", plan, check=0)
    assert len(tracestore.open(store)) == 24
    assert [name for name in tree_bytes(store) if name.startswith(paths.RECEIPTS) and name.endswith(".json")] == [
        paths.plan("0" * 32)
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["tracestore_export.json", "store.json"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_an_export_that_changes_after_the_plan_is_refused(data, tmp_path, name, is_gone):
    (data / "provenance.json").write_text(json.dumps({"model": "one"}))
    convert(data, tmp_path / "a.zarr")
    command("export", tmp_path / "a.zarr", tmp_path / "export", "--format", "safetensors", check=0)
    convert(tmp_path / "export", tmp_path / "one.zarr")
    tasks = run(tmp_path / "export", tmp_path / "s.zarr", tmp_path / "plan.json", [])
    path = tmp_path / "export" / name
    text = path.read_text()
    path.unlink()
    if not is_gone:
        path.write_text(text.replace('"one"', '"two"') + "\n")
    for name in ("work", "commit", "status"):
        assert "since the plan" in error_of(name, tmp_path / "plan.json", code=3)
    path.write_text(text)
    commit_tasks(tasks)
    assert files_of(tmp_path / "s.zarr") == files_of(tmp_path / "one.zarr")


@pytest.mark.long
def test_sources_that_share_a_table_are_said_to_be_one_task(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for k in range(3):
        np.save(data / f"q{k}.npy", states(k))
    table(data, [("qid", "ok"), ("q0", 1), ("q1", 0), ("q2", 1)])
    layout = tmp_path / "layout.toml"
    layout.write_text('hidden_states = "{id}.npy -> L S D"\nis_correct = "labels.csv : [id=qid]/ok"\n')
    for store, flags in (("one.zarr", ("--workers", 2)), ("plan.zarr", ("--plan", tmp_path / "tasks.json"))):
        said = convert(data, tmp_path / store, "--layout", layout, *flags).stdout
        assert "all files share rows of labels.csv: one task instead of 3; " in said
        assert 'ignore = ["labels.csv"]' in said

    # The way that the note names gives several tasks and the same labels.
    layout.write_text('hidden_states = "{id}.npy -> L S D"\nignore = ["labels.csv"]\n')
    free = tmp_path / "free.zarr"
    assert "one task" not in convert(data, free, "--layout", layout, "--workers", 2).stdout
    names = ["--id-column", "qid", "--score-column", "ok", "--score-direction", "correct"]
    command("score", free, "--scores", data / "labels.csv", *names)
    assert tracestore.open(free).targets().tolist() == tracestore.open(tmp_path / "one.zarr").targets().tolist()
    assert "attention_layout  none\nattention_dtype   none\n" in command("info", free).stdout
