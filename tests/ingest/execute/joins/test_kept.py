"""Test keep.NAME: rows and traces that say another value are left out, are counted, and give no label."""

from unittest import TestCase

import numpy as np
import pytest

from tests.helpers import convert as command
from tests.ingest.execute.folders import convert, dump, refuse, save, states, table
from tracestore.errors import UsageError
from tracestore.ingest.layout.language import parse_layout, read_layout

# The second attempt of q1 and q2 counts; q3 has none.
TRIES = [
    {"qid": "q0", "n": 1, "status": "ok", "ok": True},
    {"qid": "q1", "n": 1, "status": "timeout", "ok": True},
    {"qid": "q2", "n": 1, "status": "error", "ok": True},
    {"qid": "q1", "n": 2, "status": "ok", "ok": False},
    {"qid": "q2", "n": 2, "status": "ok", "ok": True},
    {"qid": "q3", "n": 1, "status": "timeout", "ok": False},
]
FILES = {"hidden_states": "h/{id}_{n:d}.npy -> L S D"}
OF_FILES = FILES | {"key.status": "t.json : [id=qid, n=n]/status", "is_correct": "t.json : [id=qid, n=n]/ok"}
ROWS = {"hidden_states": "a.pkl : [id=qid, status=status]/hs -> L S D", "ignore": ["a.pkl : []/n"]}
OF_ROWS = ROWS | {"is_correct": "a.pkl : [id=qid, status=status]/ok"}
WANTED = {"q0": (0, 1.0), "q1": (3, 0.0), "q2": (4, 1.0)}


def write_files(tmp_path, tries=TRIES):
    """Write a file for each attempt, and a table of all."""
    for k, row in enumerate(tries):
        save(tmp_path / f"in/h/{row['qid']}_{row['n']}.npy", states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.json", tries)


def write_rows(tmp_path, tries=TRIES):
    """Write a record for each attempt."""
    dump(tmp_path / "in/a.pkl", [row | {"hs": states(2, 4, 8, seed=k)} for k, row in enumerate(tries)])


def logged(tmp_path, layout):
    """Convert; return the traces by their ids, and the summary."""
    with TestCase().assertLogs("tracestore") as found:
        traces = convert(tmp_path, layout)
    return {question_id: trace for (question_id, _), trace in traces.items()}, "\n".join(found.output)


def check(traces, wanted):
    """Assert that the traces are those of attempts, with their labels."""
    assert traces.keys() == wanted.keys()
    for name, (seed, label) in wanted.items():
        np.testing.assert_allclose(traces[name].hidden_states, states(2, 4, 8, seed=seed), rtol=2e-3, atol=1e-3)
        assert traces[name].scores["is_correct"] == label


@pytest.mark.parametrize("kept", ["ok", ["ok"], ["ok", "ok"]])
def test_files_by_a_table(tmp_path, kept):
    write_files(tmp_path)

    traces, text = logged(tmp_path, OF_FILES | {"keep.status": kept})

    check(traces, WANTED)
    assert "keep.status: 3 traces left out" in text
    assert "is_correct: 3 rows of t.json joined by id, n, 3 of traces that are left out" in text


def test_rows_of_the_states(tmp_path):
    write_rows(tmp_path)

    traces, text = logged(tmp_path, OF_ROWS | {"keep.status": "ok"})

    check(traces, WANTED)
    assert "keep.status: 3 rows of a.pkl : [id=qid, status=status] left out" in text


BY_ROWS = {
    "hidden_states": "h/{id}.npy -> L S D",
    "is_correct": "t.json : [id=qid, status=status]/ok",
    "keep.status": "ok",
}


def test_rows_of_a_table_alone(tmp_path):
    """Rows of other attempts serve no label."""
    for k in range(3):
        save(tmp_path / f"in/h/q{k}.npy", states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.json", TRIES)

    traces, text = logged(tmp_path, BY_ROWS)

    assert {name: trace.scores["is_correct"] for name, trace in traces.items()} == {"q0": 1.0, "q1": 0.0, "q2": 1.0}
    assert "3 rows of t.json : [id=qid, status=status] left out" in text


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trace_whose_rows_are_all_left_out_is_not_stored_without_a_label(tmp_path, workers):
    for k in range(4):
        save(tmp_path / f"in/h/q{k}.npy", states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.json", TRIES)

    refuse(tmp_path, BY_ROWS, "'q3' are left out; instead of status in .., a line key.status", workers=workers)
    table(tmp_path / "in/t.json", [row for row in TRIES if row["qid"] == "q3" or row["n"] == 2 or row["qid"] == "q0"])
    named = {"is_correct": "t.json : [id=qid]/ok", "key.status": "t.json : [id=qid]/status"}
    traces, text = logged(tmp_path, BY_ROWS | named)

    assert traces.keys() == {"q0", "q1", "q2"}
    assert "keep.status: 1 trace" in text


def test_a_kept_row_without_an_optional_value_keeps_its_trace(tmp_path):
    for k in range(2):
        save(tmp_path / f"in/h/q{k}.npy", states(2, 4, 8, seed=k))
    rows = [("q0", "ok", 1, "why"), ("q1", "ok", 0, None), ("q1", "error", 1, "why")]
    table(tmp_path / "in/t.json", [dict(zip(("qid", "status", "ok", "why"), row, strict=True)) for row in rows])

    traces, _ = logged(tmp_path, BY_ROWS | {"question": "t.json : [id=qid, status=status]/why"})

    assert {name: trace.scores["is_correct"] for name, trace in traces.items()} == {"q0": 1.0, "q1": 0.0}


def test_names_of_files(tmp_path):
    for k, row in enumerate(TRIES):
        save(tmp_path / f"in/{row['status']}/{row['qid']}_{row['n']}.npy", states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.json", TRIES)
    layout = {
        "hidden_states": "{status}/{id}_{n:d}.npy -> L S D",
        "is_correct": "t.json : [id=qid, n=n, status=status]/ok",
    }

    traces, text = logged(tmp_path, layout | {"keep.status": "ok"})

    check(traces, WANTED)
    assert "3 traces left out" in text


def test_rows_in_order_keep_their_places(tmp_path):
    save(tmp_path / "in/a.npy", states(6, 2, 4, 8))
    table(tmp_path / "in/t.json", [row | {"qid": f"q{k}"} for k, row in enumerate(TRIES)])
    layout = {
        "hidden_states": "a.npy -> N L S D",
        "S.padding": "none",
        "question_id": "t.json : []/qid",
        "is_correct": "t.json : []/ok",
        "key.status": "t.json : []/status",
        "ignore": "t.json : []/n",
        "keep.status": "ok",
    }

    traces, _ = logged(tmp_path, layout)

    assert {name: trace.scores["is_correct"] for name, trace in traces.items()} == {"q0": 1.0, "q3": 0.0, "q4": 1.0}
    for name, trace in traces.items():
        np.testing.assert_allclose(trace.hidden_states, states(6, 2, 4, 8)[int(name[1])], rtol=2e-3, atol=1e-3)
    table(tmp_path / "in/t.json", [row | {"qid": f"q{k}"} for k, row in enumerate(TRIES[:5])])
    refuse(tmp_path, layout, "no id where the layout says", overwrite=True)


def test_a_key_that_the_id_joins(tmp_path):
    save(tmp_path / "in/a.npy", states(3, 2, 4, 8))
    table(tmp_path / "in/i.json", [{"id": f"q{k}"} for k in range(3)])
    table(tmp_path / "in/t.json", [{"id": f"q{k}", "status": "ok" if k else "bad"} for k in (2, 0, 1)])
    layout = {
        "hidden_states": "a.npy -> N L S D",
        "S.padding": "none",
        "question_id": "i.json : []/id",
        "key.status": "t.json : [id=id]/status",
        "keep.status": "ok",
    }

    assert logged(tmp_path, layout)[0].keys() == {"q1", "q2"}


@pytest.mark.parametrize("values", [(1, 0), (True, False), ("1", "0"), (1.0, 0.0)])
@pytest.mark.parametrize("as_text", [True, False])
def test_values_are_compared_as_texts(tmp_path, values, as_text):
    write_rows(tmp_path, [row | {"status": values[row["status"] != "ok"]} for row in TRIES])
    kept = values[0] if not isinstance(values[0], float) else 1

    traces, _ = logged(tmp_path, OF_ROWS | {"keep.status": str(kept) if as_text else kept})

    check(traces, WANTED)


WRONG = {
    "a value of no row": ({"keep.status": "OK"}, lambda rows: rows, "'OK' occurs nowhere, found error, ok, timeout"),
    "one of the values": ({"keep.status": ["ok", "done"]}, lambda rows: rows, "'done' occurs nowhere"),
    "a row without a value": (
        {"keep.status": "ok"},
        lambda rows: [rows[0] | {"status": None}, *rows[1:]],
        "has no status",
    ),
    "a row without the key": (
        {"keep.status": "ok"},
        lambda rows: [*rows[:-1], {k: v for k, v in rows[-1].items() if k != "status"}],
        "has no status",
    ),
    "two attempts that count": (
        {"keep.status": ["ok", "timeout"]},
        lambda rows: rows,
        "occurs twice|a second trace",
    ),
}


@pytest.mark.parametrize(("entries", "change", "words"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("is_of_files", [True, False])
def test_what_may_mean_something_else(tmp_path, entries, change, words, is_of_files):
    tries = change(TRIES)
    (write_files if is_of_files else write_rows)(tmp_path, tries)

    refuse(tmp_path, (OF_FILES if is_of_files else OF_ROWS) | entries, words)


def test_an_attempt_that_the_table_lacks(tmp_path):
    write_files(tmp_path)
    table(tmp_path / "in/t.json", TRIES[:-1])

    refuse(tmp_path, OF_FILES | {"keep.status": "ok"}, "has no status, which decides")


def test_two_kept_rows_of_one_trace(tmp_path):
    save(tmp_path / "in/h/q1.npy", states(2, 4, 8))
    table(tmp_path / "in/t.json", [*TRIES, {"qid": "q1", "n": 3, "status": "ok", "ok": True}])
    layout = {"hidden_states": "h/{id}.npy -> L S D", "is_correct": "t.json : [id=qid, status=status]/ok"}

    refuse(tmp_path, layout | {"keep.status": "ok"}, "found two values of id q1")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"keep.layer": 3}, "keep.NAME"),
        ({"keep.status": []}, "keep.NAME|expected"),
        ({"keep.status": [["ok"]]}, "keep.NAME"),
        ({"keep.status": 1.5}, "expected keep.NAME"),
        ({"keep.": "ok"}, "expected keep.NAME"),
        ({"keep.state": "ok"}, "no effect without a line that binds the name"),
    ],
)
def test_entries_that_say_nothing(tmp_path, entries, words):
    write_rows(tmp_path)
    with pytest.raises(UsageError, match=words):
        convert(tmp_path, OF_ROWS | entries)


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_of_the_command(tmp_path, workers):
    write_files(tmp_path)
    lines = [f"{name} = {text}" for name, text in OF_FILES.items()] + ["keep.status = ok"]
    words = [word for line in lines for word in ("--field", line)]

    text = command(tmp_path / "in", tmp_path / "s.zarr", *words, "--workers", str(workers)).stdout
    again = command(tmp_path / "in", tmp_path / "s.zarr").stdout

    assert "keep.status: 3 traces left out" in text and "3 traces" in again
    assert "keep.status: 3 traces left out" in command(tmp_path / "in", tmp_path / "t.zarr", *words, "--dry-run").stdout
    assert parse_layout(read_layout(None, lines).to_entries()) == read_layout(None, lines)
    (tmp_path / "l.toml").write_text(read_layout(None, lines).to_toml())
    assert read_layout(tmp_path / "l.toml") == read_layout(None, lines)


@pytest.mark.parametrize("labels", ["[id=qid]", "[id=qid, sample=#]"])
def test_rows_of_left_out_traces_have_made_ids(tmp_path, labels):
    """Neither refused as shifted or too many, nor counted as rows without a trace."""
    for k in range(4):
        save(tmp_path / f"in/h/r{k}.npy" if labels == "[id=qid]" else tmp_path / f"in/h/a_{k}.npy", states(2, 4, 8))
    names = [f"r{k}" for k in range(4)] if labels == "[id=qid]" else ["a"] * 4
    table(
        tmp_path / "in/m.csv",
        [{"rid": name, "n": k, "state": "bad" if not k else "ok"} for k, name in enumerate(names)],
    )
    table(tmp_path / "in/t.csv", [{"qid": f"tqa_{name}", "ok": k % 2} for k, name in enumerate(names)])
    files, joined = ("{id}", "[id=rid]") if labels == "[id=qid]" else ("{id}_{sample}", "[id=rid, sample=n]")
    layout = {"hidden_states": f"h/{files}.npy -> L S D", "question_id": "=tqa_{id}", "keep.status": "ok"}
    layout |= {"key.status": f"m.csv : {joined}/state", "is_correct": f"t.csv : {labels}/ok"}
    if labels == "[id=qid]":
        layout["ignore"] = ["m.csv : [id=rid]/n"]

    with TestCase().assertLogs("tracestore") as found:
        traces = convert(tmp_path, layout)

    assert [trace.score for trace in traces.values()] == [1, 0, 1]
    assert any("1 of traces that are left out" in line for line in found.output)
