"""Tables and scores files next to traces: no row is joined to a trace of another id, and no table is left unread."""

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


def labels_of(store):
    with tracestore.open(store) as opened:
        return {key: None if np.isnan(v) else v for key, v in zip(opened.question_ids, opened.labels, strict=True)}


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


@pytest.mark.parametrize("row", [{"label": 1}, {"question": "why?"}, {"is_correct": True, "ref": "q0"}], ids=str)
def test_a_table_without_an_id_of_the_traces_is_refused(folder, tmp_path, row):
    write_rows(folder / "metadata.jsonl", [{"id": f"x{k}"} | row for k in range(4)])
    for flags in ([], ["--skip-bad"]):
        assert "metadata.jsonl" in error_of("convert", folder, tmp_path / "s.zarr", *flags, code=3)
    assert not (tmp_path / "s.zarr").exists()


@pytest.mark.parametrize("prefix", ["x", "q"])
def test_labels_of_a_table_next_to_those_in_the_traces_are_refused(tmp_path, prefix):
    write_pickle(tmp_path / "t.pkl", [t | {"label": 1} for t in make_traces(4)])
    write_rows(tmp_path / "t.jsonl", [{"id": f"{prefix}{k}", "label": 0} for k in range(4)])
    assert "t.jsonl" in error_of("convert", tmp_path, tmp_path / "s.zarr", code=3)


def test_a_table_is_joined_to_traces_of_a_built_in_layout_by_their_ids(tmp_path):
    write_pickle(tmp_path / "t.pkl", make_traces(4))
    write_rows(tmp_path / "t.jsonl", [{"id": f"q{k}", "is_correct": k % 2 == 1} for k in (2, 0, 3, 1)])
    done = convert(tmp_path, tmp_path / "s.zarr")
    assert "is_correct: 4 rows of t.jsonl joined by id" in done.stdout
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert dict(zip(store.question_ids, store.scores.tolist(), strict=True)) == {"q0": 0, "q1": 1, "q2": 0, "q3": 1}


def test_both_meanings_of_a_label_are_shown_and_each_can_be_pasted(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_pickle(folder / "a{0}{x}.pkl", make_traces(4))
    write_rows(folder / "a{0}{x}.jsonl", [{"question_id": f"q{k}", "label": k % 2} for k in range(4)])
    shown = convert(folder, tmp_path / "s.zarr", check=3).stdout
    for name in ("is_correct", "is_hallucinated"):
        part = next(part for part in shown.split("\n1. ")[1].split("\n2. ") if f"--field '{name} = " in part)
        lines = [
            line.strip().removeprefix("--field '").removesuffix("'") for line in part.splitlines() if "--field" in line
        ]
        convert(folder, tmp_path / f"{name}.zarr", *[flag for line in lines for flag in ("--field", line)])
        with tracestore.open(tmp_path / f"{name}.zarr") as store:
            assert store["q1"].score == 1 and store["q0"].score == 0


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
    write_rows(tmp_path / "t.jsonl", [{"id": key, "y": k % 2} for k, key in enumerate(["q1", "q0", "x2", "q3"])])
    lines = ["hidden_states = t.npz : hidden_states -> N L S D", "question_id = t.npz : question_ids -> N"]
    lines += ["is_hallucinated = t.jsonl : [id=id]/y", "S.padding = none"]
    done = convert(tmp_path, tmp_path / "s.zarr", *[flag for line in lines for flag in ("--field", line)])
    assert "3 rows of t.jsonl joined by id, 1 without a trace, 1 traces without a row" in done.stdout
    with tracestore.open(tmp_path / "s.zarr") as store:
        scores = dict(zip(store.question_ids, store.scores.tolist(), strict=True))
    assert np.isnan(scores.pop("q2")) and scores == {"q0": 1, "q1": 0, "q3": 1}


def test_a_hash_in_any_column_may_be_the_id(tmp_path):
    (tmp_path / "states").mkdir()
    rows = []
    for k, trace in enumerate(make_traces(3)):
        name = f"6e33ee1e{k}"
        write_pickle(tmp_path / "states" / f"{name}.pkl", {"hidden_states": trace["hidden_states"]})
        rows.append({"doc_id": k, "acc": float(k == 1), "hash": name})
    write_rows(tmp_path / "samples.jsonl", rows[::-1])
    lines = ["hidden_states = states/{id}.pkl : hidden_states -> L S D", "is_correct = samples.jsonl : [id=hash]/acc"]
    convert(tmp_path, tmp_path / "s.zarr", *[flag for line in lines for flag in ("--field", line)])
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert {q: store[q].score for q in store.question_ids} == {f"6e33ee1e{k}": float(k == 1) for k in range(3)}


def test_a_table_of_something_else_is_refused_and_settings_are_not_read(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for k, trace in enumerate(make_traces(4)):
        write_pickle(folder / f"states_{k}.pkl", trace)
    (folder / "notes.json").write_text('[{"speaker": "a"}, {"speaker": "b"}]')
    (folder / "config.json").write_text('{"model": "m"}')
    assert "notes.json" in error_of("convert", folder, tmp_path / "s.zarr", code=3)
    (folder / "notes.json").unlink()
    convert(folder, tmp_path / "s.zarr")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 4


def test_labels_in_the_order_of_a_list_are_asked(tmp_path):
    write_pickle(tmp_path / "t.pkl", [{k: v for k, v in t.items() if k != "question_id"} for t in make_traces(4)])
    (tmp_path / "labels.json").write_text("[0, 1, 1, 0]")
    done = convert(tmp_path, tmp_path / "s.zarr", check=3)
    assert (
        "is_correct: joined in order" in done.stderr and "--field 'is_hallucinated = labels.json -> N'" in done.stdout
    )


@pytest.mark.parametrize("column", ["row", "idx", "position", "example_number", "line_no"])
def test_rows_in_order_with_other_numbers_are_refused(tmp_path, column):
    np.save(tmp_path / "hidden_states.npy", np.stack([t["hidden_states"] for t in make_traces(4, tokens=3)]))
    write_rows(tmp_path / "samples.jsonl", [{column: k, "y": k % 2} for k in (2, 0, 3, 1)])
    lines = ["hidden_states = hidden_states.npy -> N L S D", "is_correct = samples.jsonl : []/y", "S.padding = none"]
    flags = [flag for line in lines for flag in ("--field", line)]
    message = error_of("convert", tmp_path, tmp_path / "s.zarr", *flags, code=3)
    assert f"[]/{column}: rows are joined in order, and this column of ids is left out" in message
