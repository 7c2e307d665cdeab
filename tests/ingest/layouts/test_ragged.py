"""Several traces behind each other in one array."""

import json

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of
from tests.ingest.containers.layouts import base, check

NONE = ("--attention", "none")


def traces_of(count=3):
    return [base(k, tokens=2 + k, attention=False) for k in range(count)]


def flat(traces, axis):
    """Return hidden states (T, L, D) or (L, T, D), and tokens (T,), of all traces."""
    hidden = np.concatenate([t["hidden_states"] for t in traces], axis=1)
    tokens = np.concatenate([t["tokens"] for t in traces])
    return {"hidden_states": hidden.transpose(1, 0, 2) if axis == 0 else hidden, "input_ids": tokens}


def stored(tmp_path, source):
    convert(source, tmp_path / "s.zarr", *NONE)
    return tracestore.open(tmp_path / "s.zarr")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("name", ["offsets", "cu_seqlens", "seq_lens"])
def test_offsets_and_lengths_take_an_array_apart(tmp_path, save, axis, name):
    traces = traces_of()
    lengths = [len(t["tokens"]) for t in traces]
    bounds = lengths if name == "seq_lens" else np.cumsum([0, *lengths])
    save(tmp_path / "a.npz", **flat(traces, axis), **{name: bounds}, question_ids=["a", "b", "c"])

    store = stored(tmp_path, tmp_path / "a.npz")

    check(store, traces)
    assert store.question_ids == ["a", "b", "c"] and store[1].extras == {}


def test_hdf5_is_read_by_ranges_of_rows(tmp_path):
    h5py = pytest.importorskip("h5py")
    traces = traces_of()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value in flat(traces, 1).items():
            file.create_dataset(name, data=value, chunks=True, compression="gzip")
        file["offsets"] = np.cumsum([0, *[len(t["tokens"]) for t in traces]])

    check(stored(tmp_path, tmp_path / "a.h5"), traces)


def test_rows_of_a_table_give_the_range_of_each_trace(tmp_path):
    traces = [t | {"hidden_states": t["hidden_states"][:1]} for t in traces_of(4)]
    folder, rows = tmp_path / "in", []
    folder.mkdir()
    for k, part in enumerate((traces[:2], traces[2:])):
        np.savez(folder / f"{k}.npz", acts=flat(part, 1)["hidden_states"][0], tokens=flat(part, 1)["input_ids"])
        ends = np.cumsum([0, *[len(t["tokens"]) for t in part]]).tolist()
        rows += [
            {"id": f"q{len(rows) + n}", "shard": f"{k}.npz", "row_start": ends[n], "row_end": ends[n + 1]}
            for n in range(2)
        ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    store = stored(tmp_path, folder)

    check(store, traces)
    assert store.question_ids == ["q0", "q1", "q2", "q3"]


@pytest.mark.parametrize("offsets", [[0, 2, 5, 8], [0, 5, 2, 9], [1, 2, 5, 9]])
def test_offsets_that_do_not_fit_are_refused(tmp_path, offsets):
    np.savez(tmp_path / "a.npz", **flat(traces_of(), 0), offsets=offsets)

    message = error_of("convert", tmp_path / "a.npz", tmp_path / "s.zarr", *NONE, code=3)

    assert "a.npz, trace 0, offsets: found offsets from" in message


def test_a_range_that_is_not_of_rows_does_not_cut_the_states(tmp_path):
    trace = base(tokens=4, attention=False)
    np.savez(tmp_path / "a.npz", **trace)
    (tmp_path / "a.json").write_text(json.dumps({"start": 0, "end": 1, "question": "Who?"}))

    check(stored(tmp_path, tmp_path / "a.npz"), [trace])


def test_attention_behind_each_other_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **flat(traces_of(), 0), offsets=[0, 2, 5, 9], attentions=np.ones((29, 2)))

    message = error_of("convert", tmp_path / "a.npz", tmp_path / "s.zarr", *NONE, code=3)

    assert "attentions: found attention of several traces in one array" in message


@pytest.mark.parametrize(("axis", "name"), [(0, "example_ids"), (1, "example_ids"), (0, "prompt_ids")])
def test_an_id_for_each_token_takes_an_array_apart(tmp_path, axis, name):
    traces = traces_of()
    ids = np.repeat([1, 0, 2], [len(t["tokens"]) for t in traces])
    np.savez(tmp_path / "a.npz", **flat(traces, axis), **{name: ids})
    rows = [{"question_id": f"q{k}", "question": f"why {k}?"} for k in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    store = stored(tmp_path, tmp_path)

    assert store.question_ids == ["q1", "q0", "q2"]
    assert [t.question for t in store] == ["why 1?", "why 0?", "why 2?"]
    check(store, traces)


def test_ids_that_return_do_not_take_an_array_apart(tmp_path):
    (trace,) = traces_of(1)
    hidden = np.concatenate([trace["hidden_states"]] * 2, axis=1)
    np.savez(tmp_path / "a.npz", hidden_states=hidden, input_ids=np.arange(4), seq_ids=[0, 1, 0, 0])
    assert len(stored(tmp_path, tmp_path / "a.npz")) == 1
