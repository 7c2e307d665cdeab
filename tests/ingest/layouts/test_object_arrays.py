"""Arrays of Python objects and of records in .npy and .npz files."""

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of
from tests.ingest.containers.layouts import base, check

NONE = ("--attention", "none")
TRACES = [base(k, tokens=2 + k, attention=False) for k in range(3)]


def objects(values):
    array = np.empty(len(values), object)
    array[:] = values
    return array


def stored(tmp_path, source):
    convert(source, tmp_path / "s.zarr", *NONE)
    return tracestore.open(tmp_path / "s.zarr")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_and_texts_as_objects_are_columns(tmp_path, save):
    hidden, tokens = (objects([t[name] for t in TRACES]) for name in ("hidden_states", "tokens"))
    save(tmp_path / "a.npz", hidden_states=hidden, tokens=tokens, ids=objects(["a", "b", "c"]), meta={"model": "m"})

    store = stored(tmp_path, tmp_path / "a.npz")

    check(store, TRACES)
    assert store.question_ids == ["a", "b", "c"] and store[2].extras == {"meta": {"model": "m"}}


@pytest.mark.parametrize("form", ["list", "dict by id", "npz"])
def test_dicts_as_objects_are_traces(tmp_path, form):
    rows = [{"question_id": f"q{k}"} | trace for k, trace in enumerate(TRACES)]
    if form == "npz":
        np.savez_compressed(tmp_path / "a.npz", data=objects(rows))
    else:
        by_id = {row["question_id"]: {n: v for n, v in row.items() if n != "question_id"} for row in rows}
        np.save(tmp_path / "a.npy", objects(rows) if form == "list" else by_id, allow_pickle=True)

    store = stored(tmp_path, next(tmp_path.glob("a.np*")))

    check(store, TRACES)
    assert store.question_ids == ["q0", "q1", "q2"]


def test_a_dict_of_columns(tmp_path):
    hidden = np.stack([t["hidden_states"][:, :2] for t in TRACES])
    np.save(tmp_path / "a.npy", {"hidden_states": hidden, "labels": np.array([0, 1, 1])}, allow_pickle=True)

    store = stored(tmp_path, tmp_path / "a.npy")

    np.testing.assert_array_equal([t.hidden_states for t in store], hidden)
    assert [t.label for t in store] == [0, 1, 1]


@pytest.mark.parametrize(
    "save", [lambda p, a: np.save(p / "a.npy", a), lambda p, a: np.savez_compressed(p / "a.npz", x=a)]
)
def test_fields_of_records_are_columns(tmp_path, save):
    shape = TRACES[0]["hidden_states"].shape
    records = np.zeros(2, [("question_id", "U4"), ("hidden_states", "f4", shape)])
    records["question_id"], records["hidden_states"][1] = ["a", "b"], TRACES[0]["hidden_states"]
    save(tmp_path, records)

    store = stored(tmp_path, next(tmp_path.glob("a.np*")))

    assert store.question_ids == ["a", "b"]
    np.testing.assert_array_equal(store[1].hidden_states, TRACES[0]["hidden_states"])


def test_bytes_behind_the_pickle_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", objects(TRACES), allow_pickle=True)
    with open(tmp_path / "a.npy", "ab") as file:
        file.write(b"x")

    assert "trailing bytes" in error_of("convert", tmp_path / "a.npy", tmp_path / "s.zarr", *NONE, code=3)
