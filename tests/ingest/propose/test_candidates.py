"""Test kinds of folders whose layout is a candidate to paste: each gives the values of the files."""

import json

import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import dump, save, states, table
from tests.ingest.propose.folders import accept, check_candidates, proposal_of, refuse


def stores_of(tmp_path):
    """Return the traces of the store that each candidate gives, by id."""
    pasted = check_candidates(tmp_path, refuse(tmp_path))
    return [{trace.question_id: trace for trace in tracestore.open(path)} for _, path in pasted]


def assert_states(trace, expected):
    np.testing.assert_allclose(trace.hidden_states, expected, rtol=2e-3, atol=1e-3)


# Prompt and answer


@pytest.mark.parametrize("word", ["answer", "response", "completion", "generated", "generation"])
@pytest.mark.parametrize("form", ["prompt_hidden_states", "hidden_states_prompt", "prompt_states"])
@pytest.mark.parametrize("has_ids", [True, False])
def test_a_prompt_and_its_answer(tmp_path, word, form, has_ids):
    parts = [(states(3, 4, 8, seed=k), states(3, 2 + k, 8, seed=9 + k)) for k in range(3)]
    found = []
    for k, (prompt, answer) in enumerate(parts):
        ids = {"prompt_ids": [5, 6, 7, 8 + k], f"{word}_ids": list(range(20, 22 + k))} if has_ids else {}
        found.append({"id": f"q{k}", form: prompt, form.replace("prompt", word): answer, **ids})
    dump(tmp_path / "in/a.pkl", found)
    traces = stores_of(tmp_path)[0]
    for k, pair in enumerate(parts):
        assert_states(traces[f"q{k}"], np.concatenate(pair, axis=1))
        assert traces[f"q{k}"].prompt_length == 4
        assert not has_ids or traces[f"q{k}"].tokens.tolist() == [5, 6, 7, 8 + k, *range(20, 22 + k)]


def test_a_word_of_labels_next_to_a_prompt_and_its_answer(tmp_path):
    found = []
    for k in range(3):
        parts = {"prompt_states": states(3, 4, 8, seed=k), "answer_states": states(3, 2, 8, seed=9 + k)}
        found.append({"id": f"q{k}", **parts, "label": "nope" if k else "correct"})
    dump(tmp_path / "in/a.pkl", found)
    labels = [[traces[f"q{k}"].score for k in range(3)] for traces in stores_of(tmp_path)]
    assert [1, 0, 0] in labels


def test_files_of_a_prompt_and_its_answer(tmp_path):
    for k in range(3):
        save(tmp_path / f"in/q{k}_prompt.npy", states(3, 4, 8, seed=k))
        save(tmp_path / f"in/q{k}_answer.npy", states(3, 2 + k, 8, seed=9 + k))
    expected = np.concatenate([states(3, 4, 8, seed=1), states(3, 3, 8, seed=10)], axis=1)
    assert_states(stores_of(tmp_path)[0]["q1"], expected)


# Flat values, and bits


@pytest.mark.parametrize("name", ["shape", "hidden_shape", "states_shape", "shape_of_states", "hidden_states_shape"])
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)])
def test_flat_states_and_their_shape(tmp_path, name, axes):
    arrays = [states(3, 4 + k, 8, seed=k) for k in range(3)]
    found = []
    for k, array in enumerate(arrays):
        moved = array.transpose(axes)
        found.append({"id": f"q{k}", "hidden_states": moved.ravel(), name: list(moved.shape), "tokens": [5] * (4 + k)})
    dump(tmp_path / "in/a.pkl", found)
    traces = accept(tmp_path)
    for k, array in enumerate(arrays):
        assert_states(traces[f"q{k}", 0], array)


NAMES_OF_AXES = [
    ("n_layers", "seq_len", "d_model"),
    ("num_layers", "n_tokens", "hidden_dim"),
    ("layers", "length", "dim"),
    ("num_blocks", "num_tokens", "hidden_size"),
]


@pytest.mark.parametrize("names", NAMES_OF_AXES)
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("sizes", [(4, 5, 6), (5, 5, 5)])
def test_flat_states_and_the_numbers_of_their_axes(tmp_path, names, axes, sizes):
    arrays = [states(3, size, 8, seed=k) for k, size in enumerate(sizes)]
    found = []
    for k, array in enumerate(arrays):
        moved = array.transpose(axes)
        numbers = dict(zip([names[axis] for axis in axes], moved.shape, strict=True))
        tokens = {"input_ids": list(range(5, 5 + sizes[k]))}
        found.append({"id": f"q{k}", "prompt_n": 2, **numbers, "hidden": moved.ravel().tolist(), **tokens})
    table(tmp_path / "in/a.json", found)
    order = ", ".join(names[axis] for axis in axes)
    (only,) = refuse(tmp_path, f"no word says that the axes lie in the order {order}").candidates
    assert only.layout.to_entries()["shape.hidden_states"] == [f"a.json : [id=id]/{names[axis]}" for axis in axes]
    for traces in stores_of(tmp_path):
        for k, array in enumerate(arrays):
            assert_states(traces[f"q{k}"], array)


@pytest.mark.parametrize(
    "numbers",
    [
        {"n_layers": 3, "seq_len": 4},
        {"n_layers": 3, "seq_len": 4, "d_model": 9},
        {"n_layers": 3, "answers": 4, "d_model": 8},
        {"d_model": 8, "n_layers": 3, "seq_len": 4},
        {"n_layers": 3, "seq_len": 4.0, "d_model": 8},
    ],
)
def test_numbers_that_are_no_extents(tmp_path, numbers):
    found = [{"id": f"q{k}", **numbers, "hidden": states(96, seed=k).tolist()} for k in range(3)]
    table(tmp_path / "in/a.json", found)
    assert not any("shape" in str(one.layout.to_entries()) for one in refuse(tmp_path).candidates)


@pytest.mark.parametrize("shape", [[3, 4], [3, 4, 9], [4, 3, 8, 2], [], [96, 2]])
def test_a_shape_of_something_else(tmp_path, shape):
    found = [{"id": f"q{k}", "hidden_states": states(96, seed=k), "shape": shape, "tokens": [5] * 4} for k in range(3)]
    dump(tmp_path / "in/a.pkl", found)
    assert not any(
        "shape" in str(one.layout.to_entries()) for one in refuse(tmp_path).candidates if one.layout.settings
    )


@pytest.mark.parametrize(
    "name", ["hidden_bf16", "bf16_hidden_states", "hidden_states_bfloat16", "acts_bf16", "resid_bf16"]
)
def test_bits_of_bfloat16_by_their_name(tmp_path, name):
    arrays = [states(3, 4 + k, 8, seed=k) for k in range(3)]
    bits = [(array.view("u4") >> 16).astype("u2") for array in arrays]
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}", name: one, "tokens": [5] * (4 + k)} for k, one in enumerate(bits)])
    traces = stores_of(tmp_path)[0]
    for k, one in enumerate(bits):
        assert_states(traces[f"q{k}"], (one.astype("u4") << 16).view("f4"))


# Ids


@pytest.mark.parametrize("width", [2, 3, 5])
def test_numbers_of_files_with_zeros_in_front(tmp_path, width):
    for k in range(3):
        save(tmp_path / f"in/hidden_states/{k:0{width}d}.npy", states(3, 4 + k, 8, seed=k))
    table(tmp_path / "in/labels.csv", [{"id": k, "is_correct": k % 2} for k in range(3)])
    traces = stores_of(tmp_path)[0]
    assert [traces[str(k)].score for k in range(3)] == [0, 1, 0]
    assert_states(traces["2"], states(3, 6, 8, seed=2))


def test_columns_of_unknown_words_bind_no_second_id(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"qid": f"q{k}", "hidden_states": states(2, 3 + k, 8)} for k in range(3)])
    table(tmp_path / "in/t.csv", [{"qid": f"q{k}", "ok": k % 2, "bad": 1 - k % 2, "quest": "x"} for k in range(3)])

    proposal = refuse(tmp_path)

    assert proposal.candidates and not any("bound twice" in text for text in proposal.refusals)


# Traces behind each other, whose rows a table or arrays say in any order


LENGTHS = (3, 5, 4)
BEGINS = (0, 3, 8)
ENDS = (3, 8, 12)
ORDERS = [(0, 1, 2), (1, 0, 2), (2, 0, 1)]
STARTS = ("start", "offset", "begin", "row_start", "ptr", "starts", "offsets")


def write_ranges(tmp_path, form, order, columns):
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


def check_ranges(tmp_path, *, is_found):
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
    write_ranges(tmp_path, form, order, {name: BEGINS, **others})
    check_ranges(tmp_path, is_found=True)


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("form", ["npz", "jsonl"])
def test_every_name_of_first_rows(tmp_path, form, name):
    write_ranges(tmp_path, form, (2, 0, 1), {name: BEGINS, "length": LENGTHS})
    check_ranges(tmp_path, is_found=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["npz", "columns", "jsonl", "csv"])
@pytest.mark.parametrize("name", ["end", "stop", "row_end"])
def test_where_rows_end_next_to_lengths(tmp_path, form, order, name):
    write_ranges(tmp_path, form, order, {name: ENDS, "length": LENGTHS})
    check_ranges(tmp_path, is_found=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["npz", "columns", "jsonl", "csv"])
@pytest.mark.parametrize("name", ["offsets", "cu_seqlens", "offset", "first_row", "at"])
@pytest.mark.parametrize("values", [BEGINS, ENDS, (0, 4, 8)], ids=["first", "last", "others"])
def test_no_candidate_takes_lengths_alone_next_to_other_rows(tmp_path, form, order, name, values):
    """Whatever the column is called, and whether its values are where rows begin, where they end, or neither."""
    write_ranges(tmp_path, form, order, {name: values, "length": LENGTHS})
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
    write_ranges(tmp_path, form, (0, 1, 2), {"length": LENGTHS})
    if form == "npz":
        np.savez(tmp_path / "in/a.npz", **np.load(tmp_path / "in/a.npz"), offsets=np.array([0, 3, 8, 12]))
    else:
        rows = json.loads((tmp_path / "in/t.json").read_text())
        (tmp_path / "in/t.json").write_text(json.dumps(rows | {"offsets": [0, 3, 8, 12]}))
    check_ranges(tmp_path, is_found=True)
