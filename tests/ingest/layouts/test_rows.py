"""Traces in several rows of a table, and in several files or folders."""

import json

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, make_trace, write_pickle
from tests.ingest.containers.layouts import base, check

NONE = ("--attention", "none")
TRACES = [base(k, tokens=2 + k, attention=False) for k in range(3)]
LAST = np.stack([t["hidden_states"][:, -1] for t in TRACES])


def stored(tmp_path, source):
    convert(source, tmp_path / "s.zarr", *NONE)
    return tracestore.open(tmp_path / "s.zarr")


def write_lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_per_layer(tmp_path):
    rows = [
        {"id": f"q{k}", "layer": 8 * n, "acts": layer.tolist(), "tokens": t["tokens"].tolist()}
        for k, t in enumerate(TRACES)
        for n, layer in enumerate(t["hidden_states"])
    ]
    write_lines(tmp_path / "a.jsonl", rows)

    check(stored(tmp_path, tmp_path / "a.jsonl"), TRACES)


@pytest.mark.parametrize("layers", ["columns", "rows"])
def test_a_row_per_token(tmp_path, layers):
    rows = []
    for k, trace in enumerate(TRACES):
        for s, token in enumerate(trace["tokens"].tolist()):
            states = trace["hidden_states"][:, s].tolist()
            row = {"question_id": f"q{k}", "position": s, "token_id": token, "token": f"t{s}"}
            if layers == "columns":
                rows.append(row | {f"layer_{n}": state for n, state in enumerate(states)})
            else:
                rows += [row | {"layer": n, "hidden_state": state} for n, state in enumerate(states)]
    write_lines(tmp_path / "a.jsonl", rows)

    store = stored(tmp_path, tmp_path / "a.jsonl")

    check(store, TRACES)
    assert store[0].tokens_decoded == ["t0", "t1"]


@pytest.mark.parametrize(
    ("positions", "reason"),
    [([0, 0], "two values for layer 0 and token 0"), ([0, 2], "found tokens 0, 2, expected numbers without gaps")],
)
def test_rows_with_missing_or_repeated_tokens_are_refused(tmp_path, positions, reason):
    write_lines(
        tmp_path / "a.jsonl", [{"id": "q", "position": p, "hidden_state": [0.5, 0.25, 0.125]} for p in positions]
    )

    message = error_of("convert", tmp_path / "a.jsonl", tmp_path / "s.zarr", *NONE, code=3)

    assert reason in message


@pytest.mark.parametrize("form", ["npz", "csv", "npy", "folders"])
def test_a_file_or_folder_per_layer(tmp_path, form):
    folder = tmp_path / "in"
    folder.mkdir()
    ids = ["a", "b", "c"]
    for n, last in enumerate(LAST.transpose(1, 0, 2)):
        if form == "npz":
            np.savez(folder / f"layer_{n}.npz", hidden_states=last, question_ids=ids)
        elif form == "npy":
            np.save(folder / f"layer_{n}.npy", last)
        elif form == "csv":
            lines = [f"{i},{','.join(map(str, row))}" for i, row in zip(ids, last.tolist(), strict=True)]
            header = ",".join(["id", *(f"v{d}" for d in range(last.shape[1]))])
            (folder / f"layer_{n}.csv").write_text("\n".join([header, *lines]) + "\n")
        else:
            (folder / f"layer_{n}").mkdir()
            np.savez(folder / f"layer_{n}" / "x.npz", hidden_states=last, question_ids=ids)
    if form == "npy":
        (folder / "ids.json").write_text(json.dumps(ids))

    store = stored(tmp_path, folder)

    assert store.question_ids == ids
    np.testing.assert_array_equal([t.last_token for t in store], LAST)


def test_layers_of_the_same_traces_in_another_order_are_joined(tmp_path):
    for n, order in enumerate(([0, 1, 2], [0, 2, 1])):
        np.savez(tmp_path / f"layer_{n}.npz", hidden_states=LAST[order, n], question_ids=[f"q{k}" for k in order])

    convert(tmp_path, tmp_path / "s.zarr", *NONE)

    for k, trace in enumerate(tracestore.open(tmp_path / "s.zarr")):
        assert trace.question_id == f"q{k}"
        np.testing.assert_array_equal(trace.last_token, LAST[k, :2])


def test_layers_of_different_traces_are_refused(tmp_path):
    for n, ids in enumerate((["a", "b", "c"], ["a", "c", "d"])):
        np.savez(tmp_path / f"layer_{n}.npz", hidden_states=LAST[:, n], question_ids=ids)

    message = error_of("convert", tmp_path, tmp_path / "s.zarr", *NONE, code=3)

    assert "question_ids differs between files" in message and "in another order" in message


@pytest.mark.parametrize("form", ["{id}", "{layer}/{id}", "set/{id}"])
def test_arrays_that_are_named_by_ids(tmp_path, form):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for k, trace in enumerate(TRACES):
            if "{layer}" in form:
                for n, layer in enumerate(trace["hidden_states"]):
                    file[form.format(layer=f"layer_{n}", id=f"q{k}")] = layer
            else:
                file[form.format(id=f"q{k}")] = trace["hidden_states"]

    store = stored(tmp_path, tmp_path / "a.h5")

    assert store.question_ids == [f"{'set/' if 'set' in form else ''}q{k}" for k in range(3)]
    for trace, expected in zip(store, TRACES, strict=True):
        np.testing.assert_array_equal(trace.hidden_states, expected["hidden_states"])


def test_stacks_in_groups_of_data_sets_have_different_ids(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("one", "two"):
            file[f"{name}/hidden_states"], file[f"{name}/labels"] = LAST, [0, 1, 1]

    store = stored(tmp_path, tmp_path / "a.h5")

    assert store.question_ids == ["one/0", "one/1", "one/2", "two/0", "two/1", "two/2"]
    assert [t.label for t in store] == [0, 1, 1] * 2


def test_arrays_with_other_names_are_proposed_and_not_guessed(tmp_path):
    np.savez(tmp_path / "a.npz", mlp=np.ones((2, 3, 8), "f4"), mixed=np.zeros((2, 3, 8), "f4"))

    message = error_of("convert", tmp_path / "a.npz", tmp_path / "s.zarr", *NONE, code=3)

    assert "--map hidden_states=mlp or --map hidden_states=mixed" in message


def test_a_lone_array_of_layers_or_traces_needs_a_flag(tmp_path):
    np.savez(tmp_path / "a.npz", hidden_states=LAST)

    message = error_of("convert", tmp_path / "a.npz", tmp_path / "s.zarr", *NONE, code=3)
    convert(tmp_path / "a.npz", tmp_path / "n.zarr", "--map", "last_token=hidden_states")
    convert(tmp_path / "a.npz", tmp_path / "1.zarr", *NONE, "--map", "hidden_states=hidden_states")

    assert "--map last_token=hidden_states" in message
    np.testing.assert_array_equal([t.last_token for t in tracestore.open(tmp_path / "n.zarr")], LAST)
    np.testing.assert_array_equal(tracestore.open(tmp_path / "1.zarr")[0].hidden_states, LAST)


def test_a_table_above_names_the_files_of_a_folder(tmp_path):
    folder = tmp_path / "in"
    (folder / "states").mkdir(parents=True)
    for k, trace in enumerate(TRACES):
        np.save(folder / "states" / f"x{k}.npy", trace["hidden_states"])
    rows = [{"question_id": f"q{k}", "path": f"states/x{k}.npy", "answer": f"{k}!"} for k in (2, 0, 1)]
    write_lines(folder / "requests.jsonl", rows)

    store = stored(tmp_path, folder)

    assert store.question_ids == ["q0", "q1", "q2"] and [t.answer for t in store] == ["0!", "1!", "2!"]


def test_files_of_masks_ids_and_scores_belong_to_the_stack_next_to_them(tmp_path):
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    np.save(folder / "deep" / "tqa_2_layer_wise.npy", LAST)
    np.save(folder / "ml_tqa_bleurt_score.npy", np.array([0.25, 0.5, 1], "f4"))
    padded = tmp_path / "padded"
    padded.mkdir()
    widths = [4 - len(t["tokens"]) for t in TRACES]
    stack = [np.pad(t["hidden_states"], [(0, 0), (0, w), (0, 0)]) for t, w in zip(TRACES, widths, strict=True)]
    np.save(padded / "hidden_states.npy", np.stack(stack))
    np.save(padded / "attention_mask.npy", np.stack([np.arange(4) < 4 - w for w in widths]))
    (padded / "question_ids.txt").write_text("a\nb\nc\n")

    convert(folder, tmp_path / "scores.zarr")
    convert(padded, tmp_path / "padded.zarr", *NONE)

    scored, masked = tracestore.open(tmp_path / "scores.zarr"), tracestore.open(tmp_path / "padded.zarr")
    assert scored.scores.tolist() == [0.25, 0.5, 1] and masked.question_ids == ["a", "b", "c"]
    assert [t.num_tokens for t in masked] == [2, 3, 4]


@pytest.mark.parametrize(
    ("name", "advice"), [("a.tar.gz", "extract"), ("a.mat", "scipy.io.loadmat"), ("x.db", "sqlite3")]
)
def test_other_containers_end_with_advice(tmp_path, name, advice):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"data")

    message = error_of("convert", tmp_path / "in", tmp_path / "s.zarr", code=2)

    assert name in message and advice in message


@pytest.mark.parametrize(
    "arrays",
    [
        {"prompt": np.ones((2, 3, 8), "f4"), "answer": np.ones((2, 4, 8), "f4")},
        {"mlp_0": np.ones((2, 3, 8), "f4"), "mlp_1": np.ones((2, 3, 8), "f4")},
    ],
)
def test_arrays_that_may_be_parts_of_one_trace_are_not_traces(tmp_path, arrays):
    np.savez(tmp_path / "a.npz", **arrays)

    message = error_of("convert", tmp_path / "a.npz", tmp_path / "s.zarr", *NONE, code=3)

    assert "hidden_states: missing key" in message


@pytest.mark.parametrize("name", ["layer_ids", "layer_idx"])
def test_values_per_layer_do_not_count_traces(tmp_path, name):
    hidden = TRACES[1]["hidden_states"]
    for k in range(2):
        np.savez(tmp_path / f"q{k}.npz", hidden_states=hidden, **{name: np.arange(len(hidden))})

    store = stored(tmp_path, tmp_path)

    assert store.question_ids == ["q0", "q1"]
    np.testing.assert_array_equal(store[0].hidden_states, hidden)


def test_bin_files_are_read_where_nothing_else_is(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_pickle(folder / "traces.bin", [make_trace(0), make_trace(1)])

    convert(folder, tmp_path / "s.zarr")
    write_pickle(folder / "b.pkl", [make_trace(2)])
    (folder / "traces.bin").write_bytes(b"weights of a model")
    convert(folder, tmp_path / "t.zarr")

    assert len(tracestore.open(tmp_path / "s.zarr")) == 2 and len(tracestore.open(tmp_path / "t.zarr")) == 1


def rows_of_cells(traces):
    """Return a row per layer and token, the layers outside."""
    return [
        {"sample_idx": k, "layer": n, "token_idx": s, "vec": t["hidden_states"][n, s].tolist()}
        for n in range(len(traces[0]["hidden_states"]))
        for k, t in enumerate(traces)
        for s in range(t["hidden_states"].shape[1])
    ]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_of_a_trace_that_do_not_follow_each_other(tmp_path, form):
    rows = rows_of_cells(TRACES)
    if form == "jsonl":
        write_lines(tmp_path / "a.jsonl", rows)
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=5)

    store = stored(tmp_path, tmp_path / f"a.{form}")

    assert store.question_ids == ["0", "1", "2"]
    for trace, expected in zip(store, TRACES, strict=True):
        np.testing.assert_array_equal(trace.hidden_states, expected["hidden_states"])


def test_a_table_with_a_missing_cell_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl", rows_of_cells(TRACES)[:-1])

    message = error_of("convert", tmp_path / "a.jsonl", tmp_path / "s.zarr", *NONE, code=3)

    assert "expected each token of each layer" in message


def test_flat_states_whose_sizes_leave_the_axes_open_are_refused(tmp_path):
    hidden = TRACES[1]["hidden_states"]
    sizes = {"num_tokens": hidden.shape[1], "num_layers": hidden.shape[0], "hidden_size": hidden.shape[2]}
    write_lines(tmp_path / "a.jsonl", [{"id": "q", **sizes, "hidden_states": hidden.ravel().tolist()}])

    message = error_of("convert", tmp_path / "a.jsonl", tmp_path / "s.zarr", *NONE, code=3)

    assert "add a key hidden_states_shape, such as [L, S, D]" in message


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_answers_of_two_files_are_found_by_id(tmp_path, form):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "in"
    folder.mkdir()
    for k, t in enumerate(TRACES):
        row = {"uid": f"q{k}", "hidden_states": t["hidden_states"].tolist()}
        pq.write_table(pa.Table.from_pylist([row]), folder / f"part-{k}.parquet")
    answers = [{"uid": f"q{k}", "answer": f"a{k}"} for k in (3, 2, 0, 4)]
    if form == "jsonl":
        write_lines(folder / "answers.jsonl", answers)
    else:
        pq.write_table(pa.Table.from_pylist(answers), folder / "answers.parquet")

    store = stored(tmp_path, folder)

    assert [t.answer for t in store] == ["a0", None, "a2"]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "q0", "steps": [{"token_id": 5 + s, "hidden_states": [[s + 0.5] * 8, [s + 1.5] * 8]} for s in range(3)]},
        {
            "outer": 1,
            "samples": [
                {
                    "id": "q0",
                    "tokens": [
                        {"id": 5 + s, "layers": [{"index": n, "values": [s + n + 0.5] * 8} for n in range(2)]}
                        for s in range(3)
                    ],
                }
            ],
        },
    ],
    ids=["steps", "tokens of layers"],
)
def test_nested_objects_of_tokens_and_layers(tmp_path, row):
    (tmp_path / "a.json").write_text(json.dumps(row))

    store = stored(tmp_path, tmp_path / "a.json")

    assert store.question_ids == ["q0"] and store[0].tokens.tolist() == [5, 6, 7]
    assert np.asarray(store[0].hidden_states)[:, :, 0].tolist() == [[0.5, 1.5, 2.5], [1.5, 2.5, 3.5]]


def test_a_row_per_answer_is_no_row_per_token(tmp_path):
    rows = [
        {"question_id": f"q{k // 2}", "generation_idx": k % 2, "response": f"answer {k}", "last_token": layers.tolist()}
        for k, layers in enumerate([*LAST, LAST[0] + 1])
    ]
    write_lines(tmp_path / "a.jsonl", rows)

    store = stored(tmp_path, tmp_path / "a.jsonl")

    assert [(t.question_id, t.sample, t.answer) for t in store] == [
        (f"q{k // 2}", k % 2, f"answer {k}") for k in range(4)
    ]


@pytest.mark.parametrize("place", ["output", "top"])
def test_texts_in_nested_objects(tmp_path, place):
    rows = []
    for k, trace in enumerate(TRACES):
        states = {"hidden_states": trace["hidden_states"].tolist()}
        row = {"id": f"q{k}", "input": {"question": f"fact {k}?"}, "output": {"text": f"answer {k}"}}
        row["tokens"] = trace["tokens"].tolist()
        row |= {"output": row["output"] | states} if place == "output" else states
        rows.append(row | {"evaluation": {"correct": k == 1}})
    write_lines(tmp_path / "a.jsonl", rows)

    store = stored(tmp_path, tmp_path / "a.jsonl")

    check(store, TRACES)
    assert [(t.question, t.answer, t.score) for t in store] == [
        (f"fact {k}?", f"answer {k}", float(k == 1)) for k in range(3)
    ]


def test_a_step_next_to_whole_traces_is_that_of_a_training(tmp_path):
    states = np.random.default_rng(0).random((4, 3, 5, 8), np.float32)
    rows = [{"step": 10, "prompt": f"Q{k // 2}", "hidden_states": states[k].tolist()} for k in range(4)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(tmp_path / "a.jsonl", tmp_path / "s.zarr", "--attention", "none")
    store = tracestore.open(tmp_path / "s.zarr")
    assert [trace.question for trace in store] == ["Q0", "Q0", "Q1", "Q1"]
    np.testing.assert_allclose(store[3].hidden_states, states[3], atol=1e-3)
