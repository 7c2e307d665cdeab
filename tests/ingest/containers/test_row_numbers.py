"""Rows of a table that arrays without names, or integers next to arrays, number."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import tracestore
from tests.helpers import convert, error_of
from tests.ingest.containers.layouts import base

NONE = ("--attention", "none")
STATES = [base(k, tokens=2 + k % 3, attention=False)["hidden_states"].astype("f2") for k in range(11)]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "in"
    path.mkdir()
    return path


def write_table(folder, count):
    lines = [json.dumps({"question_id": f"hotpot_{k}", "question": f"fact {k}?"}) + "\n" for k in range(count)]
    (folder / "table.jsonl").write_text("".join(lines))


def test_arrays_without_names_have_the_rows_of_their_numbers(folder, tmp_path):
    np.savez(folder / "a.npz", *STATES)
    write_table(folder, len(STATES))
    convert(folder, tmp_path / "s.zarr", *NONE)
    with tracestore.open(tmp_path / "s.zarr") as store:
        for k, states in enumerate(STATES):
            trace = store[f"hotpot_{k}"]
            assert trace.question == f"fact {k}?"
            np.testing.assert_array_equal(trace.hidden_states, states)


@pytest.mark.parametrize(("count", "reason"), [(10, "found number 10, and 10 rows in table.jsonl"), (12, "12 rows")])
def test_a_table_of_another_length_is_refused(folder, tmp_path, count, reason):
    np.savez(folder / "a.npz", *STATES)
    write_table(folder, count)
    assert reason in error_of("convert", folder, tmp_path / "s.zarr", *NONE, code=3)


def save_shards(folder, numbers):
    for shard in (0, 1):
        rows = numbers[3 * shard : 3 * shard + 3]
        arrays = {"hidden_states": np.stack([STATES[k % 6][:, :2] for k in rows]), "example_idx": np.array(rows)}
        save_file(arrays, folder / f"hidden_states-{shard}.safetensors")
    write_table(folder, 6)


def test_integers_number_the_rows_of_a_table_whose_ids_are_others(folder, tmp_path):
    save_shards(folder, [4, 0, 5, 2, 1, 3])
    convert(folder, tmp_path / "s.zarr", *NONE)
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert sorted(store.question_ids) == [f"hotpot_{k}" for k in range(6)]
        for k in range(6):
            np.testing.assert_array_equal(store[f"hotpot_{k}"].hidden_states, STATES[k][:, :2])


def test_an_integer_without_a_row_is_refused(folder, tmp_path):
    save_shards(folder, [4, 1, 5, 2, 6, 3])  # counted from 1
    message = error_of("convert", folder, tmp_path / "s.zarr", *NONE, code=3)
    assert "found number 6, and 6 rows in table.jsonl, counted from 0; give each row a column question_id" in message
