"""Test small folders whose layouts state something else than the files hold: each is refused, or has its only meaning."""

import importlib
import json

import numpy as np
import pytest

from tests.ingest.execute.folders import convert, dump, refuse, states, table

ITEM = "a.pkl : [id=id]/"
STATES = {"hidden_states": f"{ITEM}hs -> L S D"}
IN_ORDER = {"hidden_states": "a.pkl : []/hs -> L S D", "question_id": "a.pkl : []/id"}


def items(tmp_path, count=4, **values):
    """Write dicts with the ids a, b, ..., each with states and one of the values."""
    dump(
        tmp_path / "in/a.pkl",
        [
            {"id": "abcdef"[k], "hs": states(2, 3, 8, seed=k), **{key: found[k] for key, found in values.items()}}
            for k in range(count)
        ],
    )


def one(tmp_path, **values):
    """Write one dict."""
    dump(tmp_path / "in/a.pkl", [{"id": "a", "hs": states(2, 3, 8), **values}])


@pytest.mark.parametrize("text", ["1_0", "0x1", "1/2", "50%", "0,5", "١ ٢", "1e", "inf", "true-ish"])
def test_texts_that_are_no_numbers(tmp_path, text):
    """Python reads 1_0 as 10."""
    one(tmp_path, score=text, length=text)

    refuse(
        tmp_path, STATES | {"correctness.f1": f"{ITEM}score", "ignore": [f"{ITEM}length"]}, "expected a finite number"
    )
    refuse(tmp_path, STATES | {"prompt_length": f"{ITEM}length", "ignore": [f"{ITEM}score"]}, "prompt_length: found")


@pytest.mark.parametrize("shape", [[2.5, 3, 8], [2.0, 3.0, 8.0], [-2, -3, 8], [2, -1, 8], [0, 3, 8], [3, 8], [2, 3, 9]])
def test_shapes_of_flat_numbers(tmp_path, shape):
    one(tmp_path, flat=np.arange(48, dtype="f4"), shape=shape)
    layout = {"hidden_states": f"{ITEM}flat", "shape.hidden_states": f"{ITEM}shape", "ignore": [f"{ITEM}hs"]}

    refuse(tmp_path, layout, "positive integers|expected the shape")


@pytest.mark.parametrize("numbers", [[8.5, 16.2], [8.0, 16.0], [16, 8], [8, 8], [8]])
@pytest.mark.parametrize("is_joined", [True, False])
def test_numbers_of_layers(tmp_path, numbers, is_joined):
    one(tmp_path, layers=numbers)
    layout = STATES | {"L.ids": f"{ITEM}layers"}
    layout |= {"S.padding": "zeros"} if is_joined else {}

    refuse(tmp_path, layout, "L.ids: found|L: found 2 layers|expected numbers")


def test_a_scale_of_floats(tmp_path):
    """It would have no effect."""
    one(tmp_path)

    refuse(
        tmp_path, STATES | {"scale.hidden_states": 0.5}, "scale.hidden_states: found float32 values, expected integers"
    )


@pytest.mark.parametrize("names", [("pt", "at"), ("at", "pt")])
@pytest.mark.parametrize("field", ["tokens", "tokens_decoded"])
def test_parts_of_a_field_belong_to_parts_of_the_states(tmp_path, names, field):
    """Prompt and answer in the other order [ids of the answer in front]."""
    one(tmp_path, more=states(2, 2, 8, seed=1), pt=[1, 2, 3], at=[4, 5])
    if field == "tokens_decoded":
        one(tmp_path, more=states(2, 2, 8, seed=1), pt=["a", "b", "c"], at=["d", "e"])
    layout = {"hidden_states": [f"{ITEM}hs -> L S D", f"{ITEM}more -> L S D"]}
    layout |= {field: [f"{ITEM}{name} -> S" for name in names]}
    if names[0] == "at":
        refuse(tmp_path, layout, f"{field}: found 2 values in the first part, and 3 states")
        return

    trace = convert(tmp_path, layout)["a", 0]

    assert trace.prompt_length == 3
    assert list(getattr(trace, field)) in ([1, 2, 3, 4, 5], list("abcde"))


@pytest.mark.parametrize(
    "column", ["name", "title", "uid", "uuid", "sample_id", "prompt_id", "original_index", "data_idx"]
)
@pytest.mark.parametrize("is_other_order", [True, False])
def test_rule_13_a_column_holds_the_ids_of_other_rows(tmp_path, column, is_other_order):
    """Rows in another order, and no name that says id [a label of another trace]."""
    items(tmp_path)
    ids = "dcba" if is_other_order else "abcd"
    table(tmp_path / "in/t.csv", [{column: name, "ok": k % 2} for k, name in enumerate(ids)])
    layout = IN_ORDER | {"is_correct": "t.csv : []/ok"}
    if is_other_order or column not in ("name", "title"):
        refuse(tmp_path, layout, "rows in another order|this column of ids is left out")
        layout["ignore"] = [f"t.csv : []/{column}"]

    assert [trace.score for trace in convert(tmp_path, layout).values()] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("numbers", "is_read"), [((0, 1, 2, 3), True), ((0, 2, 5, 9), True), ((3, 2, 1, 0), False), ((0, 2, 2, 3), False)]
)
@pytest.mark.parametrize("column", ["", "Unnamed: 0"])
def test_rule_13_the_index_of_a_table_increases(tmp_path, numbers, is_read, column):
    items(tmp_path)
    table(tmp_path / "in/t.csv", [{column: number, "ok": k % 2} for k, number in enumerate(numbers)])
    layout = IN_ORDER | {"is_correct": "t.csv : []/ok"}
    if not is_read:
        refuse(tmp_path, layout, "is behind .: rows in another order")
        return

    assert [trace.score for trace in convert(tmp_path, layout).values()] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (["01", "02", "03"], ["1", "2", "3"]),
        (["1.0", "2.0", "x"], ["1", "2", "x"]),
        (["Q1", "q2", "q3"], ["q1", "q2", "q3"]),
        (["a\u00a0b", "b", "c"], ["a b", "b", "c"]),
        (["\uff11", "b", "c"], ["1", "b", "c"]),
        ([1, "1", "b"], ["1", "b", "c"]),
        ([0, 1, 2], ["1", "2", "3"]),
        (["q 1", "q2", "q3"], ["q1", "q2", "q3"]),
    ],
)
def test_rule_12b_ids_in_another_spelling(tmp_path, ids, rows):
    dump(tmp_path / "in/a.pkl", [{"id": i, "hs": states(2, 3, 8, seed=k)} for k, i in enumerate(ids)])
    table(tmp_path / "in/t.csv", [{"id": name, "ok": k % 2} for k, name in enumerate(rows)])

    refuse(
        tmp_path,
        STATES | {"is_correct": "t.csv : [id=id]/ok"},
        "spelling|no id of it|two values|twice|numbered from|serves several",
    )


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([1, 2, 3], ["1", "2", "3"]),
        ([1.0, 2.0, 3.0], ["1", "2", "3"]),
        ([" 1", "2 ", "3"], ["1", "2", "3"]),
        (["e\u0301", "b", "c"], ["\u00e9", "b", "c"]),
        ([-1, -2, -3], ["-1", "-2", "-3"]),
        ([2**60, "b", "c"], [str(2**60), "b", "c"]),
    ],
)
def test_ids_that_are_equal(tmp_path, ids, rows):
    dump(tmp_path / "in/a.pkl", [{"id": i, "hs": states(2, 3, 8, seed=k)} for k, i in enumerate(ids)])
    table(tmp_path / "in/t.csv", [{"id": name, "ok": k % 2} for k, name in reversed(list(enumerate(rows)))])

    traces = convert(tmp_path, STATES | {"is_correct": "t.csv : [id=id]/ok"})

    for k, trace in enumerate(traces.values()):
        assert trace.score == k % 2
        np.testing.assert_allclose(trace.hidden_states[0], states(2, 3, 8, seed=k)[0], atol=2e-3)


@pytest.mark.parametrize("text", ['{"a": {"ok": 1}, "a": {"ok": 0}}', '{"a": {"ok": 1, "ok": 0}}'])
def test_a_refusal_names_the_table(tmp_path, text):
    """Not the file of the states, which is read at the same time."""
    one(tmp_path)
    (tmp_path / "in/t.json").write_text(text)

    refuse(tmp_path, STATES | {"is_correct": "t.json : {id}/ok"}, "^t.json: not JSON: the name .* appears twice")


@pytest.mark.parametrize("name", ["README.txt", "readme.txt", "LICENSE.txt", "requirements.txt", "notes.md", "run.log"])
def test_files_without_data_need_no_entry(tmp_path, name):
    one(tmp_path)
    (tmp_path / "in" / name).write_text("made by run.py\n")

    assert len(convert(tmp_path, STATES)) == 1


@pytest.mark.parametrize("compress", ["gzip", "bz2", "lzma"])
@pytest.mark.parametrize("rows", ["table", "dict of lists", "words"])
def test_tables_of_docs(tmp_path, compress, rows):
    """Compressed JSON, lists in a dict, and rows that say a word of the names of files."""
    module, suffix = importlib.import_module(compress), {"gzip": "gz", "bz2": "bz2", "lzma": "xz"}[compress]
    for split in ("train", "test"):
        dump(tmp_path / f"in/{split}.pkl", [{"id": k, "hs": states(2, 3, 8, seed=k)} for k in range(2)])
    table = [{"part": s, "qid": k, "ok": int(s == "test")} for s in ("train", "test") for k in range(2)]
    if rows == "dict of lists":
        table = {key: [row[key] for row in table] for key in table[0]}
    (tmp_path / f"in/t.json.{suffix}").write_bytes(module.compress(json.dumps(table).encode()))
    layout = {"hidden_states": "{split}.pkl : [id=id]/hs -> L S D", "id": "={split}/{id}"}
    layout |= {"is_correct": f"t.json.{suffix} : [split=part, id=qid]/ok"}

    traces = convert(tmp_path, layout)

    assert {key[0]: trace.score for key, trace in traces.items()} == {
        "train/0": 0,
        "train/1": 0,
        "test/0": 1,
        "test/1": 1,
    }
