"""Test that tables are joined by the id that a layout makes, or by the one of names, and never by both."""

import numpy as np
import pytest

from tests.ingest.execute.folders import convert, dump, refuse, save, states, table

NUMBERS = (3, 12, 27)
FILES = {"hidden_states": "h_{n:d}.npy -> L S D", "question_id": "=triviaqa/dev/{n}"}
OF_IDS = {"hidden_states": "Q{id:d}.npy -> L S D", "question_id": "=Frage {id}"}


def write(tmp_path, pattern, rows):
    """Write the states of each number, and a table."""
    for k in NUMBERS:
        save(tmp_path / "in" / pattern.format(k), states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.json", rows)


def check(traces, ids):
    """Assert that each trace has its own states, label and question."""
    assert {question_id for question_id, _ in traces} == set(ids)
    for k, name in zip(NUMBERS, ids, strict=True):
        trace = traces[name, 0]
        np.testing.assert_allclose(trace.hidden_states, states(2, 4, 8, seed=k), rtol=2e-3, atol=1e-3)
        assert trace.scores["is_correct"] == k % 2 and trace.question == f"question {k}"


def rows_of(name):
    """Return rows in another order, with the ids that a function gives numbers."""
    return [{"example": name(k), "ok": k % 2, "q": f"question {k}"} for k in reversed(NUMBERS)]


def lines(key="example"):
    return {"is_correct": f"t.json : [id={key}]/ok", "question": f"t.json : [id={key}]/q"}


def test_a_table_of_made_ids(tmp_path):
    write(tmp_path, "h_{:04d}.npy", rows_of("triviaqa/dev/{}".format))

    check(convert(tmp_path, FILES | lines()), [f"triviaqa/dev/{k}" for k in NUMBERS])


@pytest.mark.parametrize("name", ["Frage {}", "{}"])
def test_a_table_of_made_ids_or_of_those_in_names(tmp_path, name):
    write(tmp_path, "Q{:04d}.npy", rows_of(name.format))

    check(convert(tmp_path, OF_IDS | lines()), [f"Frage {k}" for k in NUMBERS])


def test_two_tables_each_with_other_ids(tmp_path):
    write(tmp_path, "Q{:04d}.npy", rows_of(str))
    table(tmp_path / "in/u.json", rows_of("Frage {}".format))
    layout = OF_IDS | lines() | {"question": "u.json : [id=example]/q", "ignore": ["t.json : []/q", "u.json : []/ok"]}

    check(convert(tmp_path, layout), [f"Frage {k}" for k in NUMBERS])


def test_a_row_that_is_missing(tmp_path):
    write(tmp_path, "Q{:04d}.npy", rows_of("Frage {}".format)[1:])

    traces = convert(tmp_path, OF_IDS | lines())

    assert np.isnan(traces["Frage 27", 0].scores.get("is_correct", np.nan))
    assert [traces[f"Frage {k}", 0].scores["is_correct"] for k in (3, 12)] == [1, 0]


WRONG = {
    "rows of both": ([*rows_of(str), *rows_of("Frage {}".format)], "found rows of 3 as in names and of Frage 3"),
    "some rows of each": ([*rows_of(str)[:1], *rows_of("Frage {}".format)[1:]], "found rows of 27 as in names|of both"),
    "ids of neither": (rows_of("no {}".format), "no id of it is that of a trace"),
    "another spelling": (rows_of("frage {}".format), "differ in spelling"),
}


@pytest.mark.parametrize(("rows", "words"), WRONG.values(), ids=WRONG)
def test_rows_that_may_be_those_of_others(tmp_path, rows, words):
    write(tmp_path, "Q{:04d}.npy", rows)

    refuse(tmp_path, OF_IDS | lines(), words)


def test_made_ids_of_another_trace(tmp_path):
    """The row 12 is that of the trace 12 by its name, and of the trace 2 by its made id."""
    for k in (2, 12):
        save(tmp_path / f"in/Q{k}.npy", states(2, 4, 8, seed=k))
    layout = {"hidden_states": "Q{id:d}.npy -> L S D", "question_id": "=1{id}"} | lines()
    for ids in ((12,), (2, 12), (12, 112)):
        table(tmp_path / "in/t.json", [{"example": str(k), "ok": 1, "q": f"question {k}"} for k in ids])
        refuse(tmp_path, layout, "found rows of|serves several")


def test_made_ids_that_collide(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"n": 1, "m": m, "hs": states(2, 4, 8, seed=m)} for m in (1, 2)])
    table(tmp_path / "in/t.json", [{"example": "1", "ok": 1, "q": "x"}])
    layout = {"hidden_states": "a.pkl : [a=n, b=m]/hs -> L S D", "question_id": "={a}"} | lines()

    refuse(tmp_path, layout, "serves several")
    refuse(tmp_path, layout | {f"share.{name}": ["b"] for name in ("is_correct", "question")}, "occurs twice")


def test_attention_of_a_made_id(tmp_path):
    attention = np.tril(np.ones((3, 2, 1, 4, 4), "f4")) * np.array([1.0, 1, 1], "f4")[:, None, None, None, None]
    attention /= attention.sum(-1, keepdims=True)
    write(tmp_path, "Q{:04d}.npy", rows_of("Frage {}".format))
    dump(tmp_path / "in/at.pkl", {f"Frage {k}": a for k, a in zip(NUMBERS, attention, strict=True)})

    traces = convert(tmp_path, OF_IDS | lines() | {"attentions": "at.pkl : {id} -> L H S S"})

    check(traces, [f"Frage {k}" for k in NUMBERS])
    assert all(trace.attention is not None for trace in traces.values())


def test_ids_of_a_line_next_to_those_of_names(tmp_path):
    """Labels join by one of both ids, and not where the ids of names are those of other traces."""
    ids, layout = {"a": "b", "b": "c", "c": "a"}, {"hidden_states": "{id}.pkl : hs -> L S D"}
    for k, name in enumerate(ids):
        dump(tmp_path / f"in/{name}.pkl", {"hs": states(2, 4, 8, seed=k), "qid": ids[name]})
    table(tmp_path / "in/t.json", [{"qid": name, "ok": int(name == "a")} for name in ids])
    layout |= {"question_id": "{id}.pkl : qid", "is_correct": "t.json : [id=qid]/ok"}

    refuse(tmp_path, layout, "found rows of a as in names and of b as question_id says")
    layout |= {"hidden_states": "{n}.pkl : hs -> L S D", "question_id": "{n}.pkl : qid"}
    assert {name: trace.score for (name, _), trace in convert(tmp_path, layout).items()} == {"a": 1, "b": 0, "c": 0}


def test_a_table_of_the_ids_that_another_table_gives_to_names(tmp_path):
    for k in range(3):
        save(tmp_path / f"in/f{k}.npy", states(2, 4, 8, seed=k))
    table(tmp_path / "in/m.json", [{"file": f"f{k}", "qid": f"q{(k + 1) % 3}"} for k in range(3)])
    table(tmp_path / "in/t.json", [{"qid": f"q{k}", "ok": int(k == 1)} for k in range(3)])
    layout = {"hidden_states": "{id}.npy -> L S D", "question_id": "m.json : [id=file]/qid"}

    traces = convert(tmp_path, layout | {"is_correct": "t.json : [id=qid]/ok"})
    assert {name: trace.score for (name, _), trace in traces.items()} == {"q0": 0, "q1": 1, "q2": 0}
    np.testing.assert_allclose(traces["q1", 0].hidden_states, states(2, 4, 8, seed=0), rtol=2e-3, atol=1e-3)
