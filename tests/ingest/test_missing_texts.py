"""A question or an answer that is NaN, as pandas has it for None, is missing and no text."""

import json

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, field_flags, make_traces, write_pickle

NAN = float("nan")
LINES = "hidden_states = {0} : {1}hs -> L S D", "question = {2} : {1}q", "generated_answer = {2} : {1}a"


def write_items(folder, rows, states):
    write_pickle(folder / "a.pkl", [row | {"hs": hs} for row, hs in zip(rows, states, strict=True)])
    return [line.format("a.pkl", "[id=id]/", "a.pkl") for line in LINES]


def write_table(folder, rows, states):
    write_items(folder, [{"id": row["id"]} for row in rows], states)
    (folder / "t.json").write_text(json.dumps(rows))
    return [line.format("a.pkl", "[id=id]/", "t.json") for line in LINES]


def write_arrays(folder, rows, states):
    folder.mkdir()
    for row, hs in zip(rows, states, strict=True):
        np.savez(folder / f"{row['id']}.npz", hs=hs, q=row["q"], a=row["a"])
    return [line.format("{id}.npz", "", "{id}.npz") for line in LINES]


@pytest.mark.parametrize("write", [write_items, write_table, write_arrays])
@pytest.mark.parametrize("missing", ["q", "a", "qa"])
def test_of_a_stated_line(tmp_path, write, missing):
    rows = [{"id": f"q{k}", "q": f"why {k}", "a": f"because {k}"} for k in range(3)]
    rows[1] |= dict.fromkeys(missing, NAN)
    lines = write(tmp_path / "in", rows, [np.ones((2, 3 + k, 4), "f4") for k in range(3)])
    convert(tmp_path / "in", tmp_path / "s.zarr", *field_flags(*lines))
    with tracestore.open(tmp_path / "s.zarr") as store:
        found = {trace.question_id: (trace.question, trace.answer) for trace in store}
    expected = {row["id"]: tuple(None if row[k] != row[k] else row[k] for k in "qa") for row in rows}
    assert found == expected


@pytest.mark.parametrize("name", ["question", "generated_answer_clean", "generated_answer", "generated_text"])
@pytest.mark.parametrize("value", [NAN, np.float64("nan"), np.float32("nan")])
def test_of_a_built_in_layout(tmp_path, name, value):
    values = ["text 0", value, "nan"]
    names = "question", "generated_answer_clean", "generated_answer", "generated_text"
    traces = [
        {key: old for key, old in trace.items() if key not in names} | {name: new}
        for trace, new in zip(make_traces(3), values, strict=True)
    ]
    convert(write_pickle(tmp_path / "a.pkl", traces), tmp_path / "s.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store:
        found = [trace.question if name == "question" else trace.answer for trace in store]
    assert found == ["text 0", None, "nan"]
