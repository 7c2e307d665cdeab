"""Test proposals for traces behind each other, whose rows a table or arrays say in any order."""

import json

import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import save, states, table
from tests.ingest.propose.folders import check_candidates, proposal_of

LENGTHS = (3, 5, 4)
BEGINS = (0, 3, 8)
ENDS = (3, 8, 12)
ORDERS = [(0, 1, 2), (1, 0, 2), (2, 0, 1)]
STARTS = ("start", "offset", "begin", "row_start", "ptr", "starts", "offsets")


def write(tmp_path, form, order, columns):
    """Write states of three traces, and their rows as a table or as arrays."""
    folder = tmp_path / "in"
    columns = {"uid": ["q0", "q1", "q2"], "is_correct": [0, 1, 1], **columns}
    found = {name: [values[k] for k in order] for name, values in columns.items()}
    folder.mkdir()
    if form == "npz":
        np.savez(folder / "a.npz", hidden_states=states(12, 2, 8), **{n: np.array(v) for n, v in found.items()})
        return
    save(folder / "hidden_states.npy", states(12, 2, 8))
    rows = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    if form == "columns":
        (folder / "t.json").write_text(json.dumps(found))
    elif form == "jsonl":
        (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table(folder / "t.csv", rows)


def check(tmp_path, *, is_found):
    """Assert that candidates give each trace its rows, if they can be read; none gives others."""
    proposal = proposal_of(tmp_path)
    stores = check_candidates(tmp_path, proposal)
    for _, path in stores:
        found = {trace.question_id: trace for trace in tracestore.open(path)}
        if not found.keys() <= {"q0", "q1", "q2"}:
            assert proposal.layout is None
            continue
        for name, trace in found.items():
            k = int(name[1])
            np.testing.assert_allclose(
                trace.hidden_states, states(12, 2, 8)[BEGINS[k] : ENDS[k]].swapaxes(0, 1), rtol=2e-3, atol=1e-3
            )
    assert bool(stores) == is_found, proposal.message()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["npz", "columns", "jsonl", "csv"])
@pytest.mark.parametrize("others", [{"length": LENGTHS}, {"end": ENDS}, {"n_tokens": LENGTHS, "stop": ENDS}])
def test_where_rows_begin_next_to_what_says_their_end(tmp_path, form, others, order):
    name = STARTS[(ORDERS.index(order) + len(others) + len(form)) % len(STARTS)]
    write(tmp_path, form, order, {name: BEGINS, **others})
    check(tmp_path, is_found=True)


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("form", ["npz", "jsonl"])
def test_every_name_of_first_rows(tmp_path, form, name):
    write(tmp_path, form, (2, 0, 1), {name: BEGINS, "length": LENGTHS})
    check(tmp_path, is_found=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["npz", "columns", "jsonl", "csv"])
@pytest.mark.parametrize("name", ["end", "stop", "row_end"])
def test_where_rows_end_next_to_lengths(tmp_path, form, order, name):
    write(tmp_path, form, order, {name: ENDS, "length": LENGTHS})
    check(tmp_path, is_found=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["npz", "columns", "jsonl", "csv"])
@pytest.mark.parametrize("name", ["offsets", "cu_seqlens", "offset", "first_row", "at"])
@pytest.mark.parametrize("values", [BEGINS, ENDS, (0, 4, 8)], ids=["first", "last", "others"])
def test_no_candidate_takes_lengths_alone_next_to_other_rows(tmp_path, form, order, name, values):
    """Whatever the column is called, and whether its values are where rows begin, where they end, or neither."""
    write(tmp_path, form, order, {name: values, "length": LENGTHS})
    proposal = proposal_of(tmp_path)
    for _, path in check_candidates(tmp_path, proposal):
        found = {trace.question_id: trace for trace in tracestore.open(path)}
        if found.keys() <= {"q0", "q1", "q2"} and values != (0, 4, 8):
            for question_id, trace in found.items():
                assert trace.num_tokens == LENGTHS[int(question_id[1])]
                first = states(12, 2, 8)[BEGINS[int(question_id[1])]]
                np.testing.assert_allclose(np.asarray(trace.hidden_states)[:, 0], first, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["npz", "columns"])
def test_one_more_offset_than_lengths_is_the_end(tmp_path, form):
    write(tmp_path, form, (0, 1, 2), {"length": LENGTHS})
    if form == "npz":
        np.savez(tmp_path / "in/a.npz", **np.load(tmp_path / "in/a.npz"), offsets=np.array([0, 3, 8, 12]))
    else:
        rows = json.loads((tmp_path / "in/t.json").read_text())
        (tmp_path / "in/t.json").write_text(json.dumps(rows | {"offsets": [0, 3, 8, 12]}))
    check(tmp_path, is_found=True)
