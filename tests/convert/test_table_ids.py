"""Tables and scores files whose ids are those of no trace."""

import json

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, make_traces, write_pickle

BOTH = "such as 'x0', and none of them in the traces, which have ids such as 'q0'"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_npz(folder, name="t.npz"):
    states = np.stack([t["hidden_states"] for t in make_traces(4, tokens=3)])
    np.savez(folder / name, hidden_states=states, question_ids=np.array([f"q{k}" for k in range(4)]))


@pytest.fixture(params=["pickle", "npz", "npz of arrays by id"])
def folder(request, tmp_path):
    path = tmp_path / "in"
    path.mkdir()
    if request.param == "pickle":
        write_pickle(path / "t.pkl", make_traces(4))
    elif request.param == "npz":
        write_npz(path)
    else:
        np.savez(path / "t.npz", **{f"{t['question_id']}/hidden_states": t["hidden_states"] for t in make_traces(4)})
    return path


def test_labels_of_a_table_without_an_id_of_the_traces_are_refused(folder, tmp_path):
    write_rows(folder / "metadata.jsonl", [{"id": f"x{k}", "label": k % 2} for k in range(4)])
    first = BOTH.replace("the traces", "the first traces of each file")
    assert f"metadata.jsonl: found 4 ids {first}" in convert(folder, tmp_path / "s.zarr", "--dry-run").stdout
    message = error_of("convert", folder, tmp_path / "s.zarr", code=3)
    assert f"metadata.jsonl: found 4 ids {BOTH}" in message and "--map question_id=KEY" in message
    assert not (tmp_path / "s.zarr").exists()
    done = convert(folder, tmp_path / "s.zarr", "--skip-bad")
    assert BOTH in done.stdout and np.isnan(tracestore.open(tmp_path / "s.zarr").labels).all()


def test_texts_of_a_table_without_an_id_of_the_traces_are_reported(folder, tmp_path):
    write_rows(folder / "metadata.jsonl", [{"id": f"x{k}", "question": "why?", "ref": f"q{k}"} for k in range(4)])
    done = convert(folder, tmp_path / "s.zarr")
    assert f"metadata.jsonl: found 4 ids {BOTH}; its column ref has them: rename it to question_id" in done.stdout
    assert sorted(tracestore.open(tmp_path / "s.zarr").question_ids) == [f"q{k}" for k in range(4)]


def test_labels_in_the_traces_make_those_of_a_table_optional(tmp_path):
    write_pickle(tmp_path / "t.pkl", [t | {"label": 1} for t in make_traces(4)])
    write_rows(tmp_path / "t.jsonl", [{"id": f"x{k}", "label": 0} for k in range(4)])
    assert BOTH in convert(tmp_path, tmp_path / "s.zarr").stdout
    assert tracestore.open(tmp_path / "s.zarr").labels.tolist() == [1] * 4


def test_a_column_with_the_ids_of_the_traces_is_proposed(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    write_rows(tmp_path / "t.jsonl", [{"id": f"x{k}", "ref": f"q{k}", "correct": k % 2} for k in range(4)])
    flags = ("--scores", str(tmp_path / "t.jsonl"), "--id-column", "ref")
    assert " ".join(flags) in error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    convert(tmp_path, tmp_path / "s.zarr", *flags)
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 1, 0, 1]


def test_a_key_of_the_traces_with_the_ids_of_the_table_is_proposed(tmp_path):
    write_pickle(tmp_path / "t.pkl", [t | {"row": f"x{k}"} for k, t in enumerate(make_traces(4))])
    write_rows(tmp_path / "t.jsonl", [{"id": f"x{k}", "label": k % 2} for k in range(4)])
    assert "--map question_id=row takes" in error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    convert(tmp_path, tmp_path / "s.zarr", "--map", "question_id=row")
    assert tracestore.open(tmp_path / "s.zarr").labels.tolist() == [0, 1, 0, 1]


def test_a_scores_file_without_an_id_of_the_traces_is_refused(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    rows = [f"x{k},q{k},{k / 4}" for k in range(4)]
    (tmp_path / "scores.csv").write_text("\n".join(["question_id,ref,score", *rows]))
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    assert f"scores.csv: found 4 ids {BOTH}; its column ref has them: --id-column ref" in message
    convert(tmp_path, tmp_path / "s.zarr", "--id-column", "ref")
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 0.25, 0.5, 0.75]


def test_ids_of_a_table_may_be_in_the_store_already(tmp_path):
    for k, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        write_pickle(tmp_path / name / "t.pkl", make_traces(2 * k + 2)[2 * k :])
        (tmp_path / name / "scores.csv").write_text("question_id,score\nq0,0.5\n")
        done = convert(tmp_path / name, tmp_path / "s.zarr")
        assert "none of them" not in done.stdout


def test_a_trace_whose_id_a_table_lacks_does_not_get_the_row_of_its_position(tmp_path):
    write_npz(tmp_path)
    write_rows(tmp_path / "t.jsonl", [{"id": key, "label": k % 2} for k, key in enumerate(["q1", "q0", "x2", "q3"])])
    convert(tmp_path, tmp_path / "s.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store:
        labels = dict(zip(store.question_ids, store.labels.tolist(), strict=True))
    assert np.isnan(labels.pop("q2")) and labels == {"q0": 1, "q1": 0, "q3": 1}


def test_a_hash_in_any_column_names_a_file(tmp_path):
    (tmp_path / "states").mkdir()
    rows = []
    for k, trace in enumerate(make_traces(3)):
        name = f"6e33ee1e{k}"
        write_pickle(tmp_path / "states" / f"{name}.pkl", {"hidden_states": trace["hidden_states"]})
        rows.append({"doc_id": k, "acc": float(k == 1), "hash": name})
    write_rows(tmp_path / "samples.jsonl", rows[::-1])
    convert(tmp_path, tmp_path / "s.zarr")
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert {q: store[q].score for q in store.question_ids} == {"0": 0, "1": 1, "2": 0}


def test_a_table_whose_name_has_braces_is_named_in_the_summary(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_pickle(folder / "a{0}{x}.pkl", [{k: v for k, v in t.items() if k != "label"} for t in make_traces(4)])
    write_rows(folder / "a{0}{x}.jsonl", [{"question_id": f"q{k}", "label": k % 2} for k in range(4)])
    done = convert(folder, tmp_path / "s.zarr", check=0)
    assert "found inside 4 traces or their rows in a{0}{x}.jsonl and used" in done.stdout


def test_tables_that_are_not_read_are_named(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for k, trace in enumerate(make_traces(4)):
        write_pickle(folder / f"states_{k}.pkl", trace)
    (folder / "notes.json").write_text('[{"speaker": "a"}, {"speaker": "b"}]')
    (folder / "config.json").write_text('{"model": "m"}')
    done = convert(folder, tmp_path / "s.zarr")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("not read: ")]
    assert "notes.json" in line and "config.json" not in line
    (folder / "notes.json").unlink()
    assert "not read" not in convert(folder, tmp_path / "t.zarr").stdout


def test_labels_in_the_order_of_a_list_that_is_read_one_by_one_are_refused(tmp_path):
    write_pickle(tmp_path / "t.pkl", [{k: v for k, v in t.items() if k != "question_id"} for t in make_traces(4)])
    (tmp_path / "labels.json").write_text("[0, 1, 1, 0]")
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)
    assert "the rows of labels.json have no ids" in message and "question_id or question" in message


def test_a_column_of_row_numbers_states_the_order_of_a_table(tmp_path):
    states = np.stack([t["hidden_states"] for t in make_traces(4, tokens=3)])
    np.save(tmp_path / "hidden_states.npy", states)
    write_rows(tmp_path / "samples.jsonl", [{"row": k, "question": f"{k}?", "label": k % 2} for k in (2, 0, 3, 1)])
    convert(tmp_path, tmp_path / "s.zarr")
    for trace in tracestore.open(tmp_path / "s.zarr"):
        np.testing.assert_array_equal(trace.hidden_states, states[int(trace.question[0])])
        assert trace.label == int(trace.question[0]) % 2
