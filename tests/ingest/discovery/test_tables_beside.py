"""Tables in folders without arrays: which rows belong to which source."""

import csv
import json

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, write_pickle

NONE = ("--attention", "none")
STATES = np.random.default_rng(0).random((4, 2, 5, 8), np.float32).astype("f2")
LAST = STATES[:, :, -1]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def stored(tmp_path, *flags):
    convert(tmp_path / "in", tmp_path / "s.zarr", *NONE, *flags)
    return tracestore.open(tmp_path / "s.zarr")


def test_files_named_by_the_ids_of_a_table_in_another_folder(tmp_path):
    folder = tmp_path / "in/states/nq"
    folder.mkdir(parents=True)
    for k, states in enumerate(STATES):
        np.save(folder / f"{k}.npy", states)
    rows = [{"doc_id": k, "doc": {"question": f"Q{k}", "answer": "gold"}, "exact_match": k % 2} for k in range(4)]
    write_lines(tmp_path / "in/gpt2/samples_nq.jsonl", rows)
    write_lines(tmp_path / "in/gpt2/results.jsonl", [{"task": "nq", "exact_match": 0.5}])
    with stored(tmp_path) as store:
        found = {t.question_id: (t.question, t.answer, t.score) for t in store}
    assert found == {str(k): (f"Q{k}", None, k % 2) for k in range(4)}


def test_tables_named_like_the_data_sets_of_a_file(tmp_path):
    (tmp_path / "in").mkdir()
    arrays = {}
    for name, rows in (("cities", slice(3)), ("larger", slice(3, 4))):
        arrays |= {f"{name}.layer_{k}": np.repeat(LAST[rows, k], 2, 0) for k in range(2)}
    np.savez(tmp_path / "in/acts.npz", **arrays)
    assert "--map last_token=hidden_states" in error_of("convert", tmp_path / "in", tmp_path / "s.zarr", *NONE, code=3)
    for name, count in (("cities", 6), ("larger", 2)):
        rows = [{"id": f"{name}_{k}", "question": f"Q{k}", "label": k % 2} for k in range(count)]
        write_csv(tmp_path / f"in/datasets/{name}.csv", rows)
    with stored(tmp_path) as store:
        assert len(store) == 8 and store["larger_1"].label == 1 and store["cities_5"].question == "Q5"
        np.testing.assert_array_equal(store["cities_3"].last_token, LAST[1])


@pytest.mark.parametrize("name, texts", [("data/dev.csv", True), ("data/other.csv", False)])
def test_ids_in_a_file_and_a_table_of_another_folder(tmp_path, name, texts):
    (tmp_path / "in/dev").mkdir(parents=True)
    ids = np.array(["a", "b", "c", "d"])
    np.savez(tmp_path / "in/dev/acts.npz", last_token=LAST, question_ids=ids)
    keys = ids[::-1] if texts else ["x", "y"]
    write_csv(tmp_path / "in" / name, [{"id": k, "question": f"Q{k}"} for k in keys])
    with stored(tmp_path) as store:
        assert [(t.question_id, t.question) for t in store] == [(k, f"Q{k}" if texts else None) for k in ids]


def test_numbers_of_a_list_are_the_ids_of_a_table_in_another_order(tmp_path):
    rows = [{"index": 4 * k + 3, "response": f"A{k}", "is_factual": k % 2} for k in range(4)]
    write_lines(tmp_path / "in/a.jsonl", rows[::-1])
    traces = [{"data_index": 4 * k + 3, "hidden_states": states} for k, states in enumerate(STATES)]
    write_pickle(tmp_path / "in/a.pkl", traces)
    with stored(tmp_path) as store:
        assert [(t.question_id, t.answer, t.score) for t in store] == [
            (str(4 * k + 3), f"A{k}", k % 2) for k in range(4)
        ]


def test_files_and_a_table_with_a_field_in_the_middle_of_their_names(tmp_path):
    for name, rows in (("nq", range(3)), ("nq_test", range(3, 4))):
        answers = [{"question": f"Q{k}", "model_answer": f"A{k}"} for k in rows]
        write_csv(tmp_path / f"in/output/llama-7b-answers-{name}.csv", answers)
        write_pickle(tmp_path / f"in/output/llama-7b-hidden_states-{name}.pkl", [STATES[k] for k in rows])
        tokens = [np.arange(5) + k for k in rows]
        write_pickle(tmp_path / f"in/output/llama-7b-input_output_ids-{name}.pkl", tokens)
    with stored(tmp_path) as store:
        found = {(t.question, t.answer, t.tokens[0]) for t in store}
        assert found == {(f"Q{k}", f"A{k}", k) for k in range(4)}
        for trace in store:
            np.testing.assert_array_equal(trace.hidden_states, STATES[trace.tokens[0]])


def test_layers_by_file_in_a_folder_with_the_name_of_a_table(tmp_path):
    for split, rows in (("dev", slice(3)), ("test", slice(3, 4))):
        (tmp_path / f"in/acts/{split}").mkdir(parents=True)
        for k in range(2):
            np.save(tmp_path / f"in/acts/{split}/layer_{k}.npy", np.repeat(LAST[rows, k], 2, 0))
        count = 2 * len(LAST[rows])
        write_lines(tmp_path / f"in/{split}.jsonl", [{"id": f"{split}{k}", "label": k % 2} for k in range(count)])
    with stored(tmp_path) as store:
        assert [(t.question_id, t.label) for t in store] == [
            *((f"dev{k}", k % 2) for k in range(6)),
            *((f"test{k}", k % 2) for k in range(2)),
        ]
        np.testing.assert_array_equal(store["dev5"].last_token, LAST[2])


@pytest.mark.parametrize("form", ["lists", "arrays", "batches"])
@pytest.mark.parametrize("suffix", [".pkl", ".npy"])
def test_chunks_of_the_rows_of_a_table(tmp_path, form, suffix):
    flags = ("--axes", "NLD") if form == "arrays" else ()
    write_csv(tmp_path / "in/questions.csv", [{"id": f"q{k}", "question": f"Q{k}"} for k in range(4)])
    for k, rows in enumerate((slice(3), slice(3, 4))):
        arrays = {"hidden_states": LAST[rows] if form == "arrays" else STATES[rows]}
        if form == "batches":
            arrays["attention_mask"] = np.ones((len(STATES[rows]), 5), int)
        for name, value in arrays.items():
            value = list(value) if form == "lists" and suffix == ".pkl" else value
            path = tmp_path / f"in/{name}_{k}{suffix}"
            np.save(path, value) if suffix == ".npy" else write_pickle(path, value)
    with stored(tmp_path, *flags) as store:
        assert [(t.question_id, t.question) for t in store] == [(f"q{k}", f"Q{k}") for k in range(4)]
        found = [t.last_token if form == "arrays" else t.hidden_states for t in store]
    np.testing.assert_array_equal(found, LAST if form == "arrays" else STATES)


def test_batches_of_layers_named_by_their_first_rows_and_a_table_of_the_name_of_their_folder(tmp_path):
    for name, count in (("cities", 3), ("larger", 4)):
        for k in range(2):
            for first in (0, 2):
                path = tmp_path / f"in/acts/{name}/layer_{8 * k}_{first}.pkl"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_pickle(path, LAST[first : min(first + 2, count), k])
        rows = [{"statement": f"{name} {k}", "label": k % 2} for k in range(count)]
        write_csv(tmp_path / f"in/datasets/{name}.csv", rows)
    with stored(tmp_path) as store:
        assert [(t.question, t.label) for t in store] == [
            *((f"cities {k}", k % 2) for k in range(3)),
            *((f"larger {k}", k % 2) for k in range(4)),
        ]
        np.testing.assert_array_equal([t.last_token for t in store], np.concatenate([LAST[:3], LAST]))


def test_tables_named_like_files_without_their_field(tmp_path):
    for name, rows in (("true", slice(1)), ("false", slice(1, 4))):
        (tmp_path / "in").mkdir(exist_ok=True)
        write_pickle(tmp_path / f"in/{name}_hidden_states.pkl", list(STATES[rows]))
        count = len(STATES[rows])
        write_lines(tmp_path / f"in/{name}_statements.jsonl", [{"id": f"{name}{k}"} for k in range(count)])
    with stored(tmp_path) as store:
        found = {t.question_id: t.label for t in store}
    assert found == {"true0": 0, "false0": 1, "false1": 1, "false2": 1}


def test_the_only_table_in_another_folder_has_a_row_for_each_number(tmp_path):
    (tmp_path / "in/hs").mkdir(parents=True)
    for k, states in enumerate(STATES):
        np.savez(tmp_path / f"in/hs/sample_{k:04d}.npz", hidden_states=states, tokens=np.arange(5))
    write_lines(tmp_path / "in/results/texts.jsonl", [{"model_response": f"A{k}"} for k in range(4)])
    with stored(tmp_path) as store:
        assert [t.answer for t in store] == [f"A{k}" for k in range(4)]


def test_an_object_of_columns_is_a_table(tmp_path):
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/hidden_states.npy", LAST)
    columns = {"model": "m", "layers": [8, 16], "ids": list("abcd"), "labels": [0, 1, 1, 0]}
    (tmp_path / "in/meta.json").write_text(json.dumps(columns))
    with stored(tmp_path) as store:
        assert {t.question_id: t.label for t in store} == dict(zip("abcd", columns["labels"], strict=True))


def test_a_table_for_each_file_in_another_folder_and_columns_by_file(tmp_path):
    for k in range(2):
        for folder in ("tensors", "meta", f"q{k}"):
            (tmp_path / "in" / folder).mkdir(parents=True, exist_ok=True)
        np.savez(tmp_path / f"in/tensors/a{k}.npz", hidden_states=STATES[k], tokens=np.arange(5))
        (tmp_path / f"in/meta/a{k}.json").write_text(json.dumps({"id": f"a{k}", "question": f"Q{k}", "label": k}))
        for n in range(2):
            np.save(tmp_path / f"in/q{k}/layer_{n}.npy", STATES[k, n])
        for name, text in (("prompt", f"P{k}"), ("response", f"R{k}"), ("label", str(k))):
            (tmp_path / f"in/q{k}/{name}.txt").write_text(text)
    with stored(tmp_path) as store:
        assert [(store[f"a{k}"].question, store[f"a{k}"].label) for k in range(2)] == [("Q0", 0), ("Q1", 1)]
        found = [(store[f"q{k}"].question, store[f"q{k}"].answer, store[f"q{k}"].label) for k in range(2)]
        assert found == [("P0", "R0", 0), ("P1", "R1", 1)]
