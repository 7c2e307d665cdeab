"""Folders of exports as inputs: what is refused, which values count, and parts of an export."""

import json
import math
import shutil

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_traces, tree_bytes, write_pickle, write_scores, write_store

LIST = "tracestore_export.json"


@pytest.fixture
def out(tmp_path):
    """Export a store of twelve traces as pickles. The labels of the first two differ from their scores."""
    path = tmp_path / "s.zarr"
    write_store(path, make_traces(12), label=lambda k: float(k % 2), score=lambda k: float((k % 2 == 0) != (k < 2)))
    command("export", path, tmp_path / "out", "--traces-per-file", 5, check=0)
    return tmp_path / "out"


def labels(path):
    with tracestore.open(path) as store:
        return store.labels.tolist()


def test_a_part_of_an_export_keeps_its_values(out, tmp_path):
    convert(out / "traces_batch_0001.pkl", tmp_path / "part.zarr")
    with tracestore.open(tmp_path / "part.zarr") as store:
        assert list(store.question_ids) == [f"q{k}" for k in range(5, 10)]
        assert store.labels.tolist() == [1, 0, 1, 0, 1] and store.scores.tolist() == [0, 1, 0, 1, 0]


def test_the_folder_of_the_files_of_a_data_set_is_an_export(tmp_path):
    path = write_store(tmp_path / "s.zarr", make_traces(3), label=lambda k: float(k % 2))
    command("export", path, tmp_path / "out", "--format", "datasets", check=0)
    convert(tmp_path / "out" / "data", tmp_path / "back.zarr")
    assert labels(tmp_path / "back.zarr") == [0, 1, 0]


def test_exports_below_a_folder_and_other_files_next_to_them(out, tmp_path):
    top = tmp_path / "top"
    (top / "correct").mkdir(parents=True)
    out.rename(top / "correct" / "one")
    other = write_store(tmp_path / "t.zarr", [t | {"question_id": f"t{k}"} for k, t in enumerate(make_traces(2))])
    command("export", other, top / "two", "--format", "safetensors", check=0)
    (top / "mine").mkdir()
    write_pickle(top / "mine" / "a.pkl", [t | {"question_id": f"m{k}"} for k, t in enumerate(make_traces(2))])
    write_scores(top / "mine" / "scores.csv", {"m0": 0.25, "m1": 0.75, "q0": 0.5})
    convert(top, tmp_path / "all.zarr")
    with tracestore.open(tmp_path / "all.zarr") as store:
        label = {q: v for q, v in zip(store.question_ids, store.labels.tolist(), strict=True) if v == v}
        assert label == {f"q{k}": float(k % 2) for k in range(12)}
        assert store[store.index_of("m1")].score == 0.75 and np.isnan(store[store.index_of("t0")].score)
        assert store[store.index_of("q0")].score == 0.0
        assert len(store) == 16


def test_a_conversion_into_a_store_that_has_the_traces_adds_nothing(out, tmp_path):
    convert(out, tmp_path / "back.zarr")
    before = tree_bytes(tmp_path / "back.zarr")
    assert "3 files already in the store" in convert(out, tmp_path / "back.zarr").stdout
    assert tree_bytes(tmp_path / "back.zarr") == before


def test_a_named_scores_file_replaces_the_values_of_an_export(out, tmp_path):
    write_scores(tmp_path / "new.csv", {f"q{k}": k / 12 for k in range(12)})
    convert(out, tmp_path / "back.zarr", "--scores", tmp_path / "new.csv")
    with tracestore.open(tmp_path / "back.zarr") as store:
        assert np.isnan(store.labels).all() and store.scores.tolist() == [k / 12 for k in range(12)]


def test_a_changed_table_of_scores_is_used_only_if_it_is_named(out, tmp_path):
    write_scores(out / "scores.csv", {f"q{k}": 0.75 for k in range(12)})
    error = error_of("convert", out, tmp_path / "no.zarr", code=3)
    assert "scores.csv is not that of the export" in error and "--scores FILE" in error
    convert(out, tmp_path / "back.zarr", "--scores", out / "scores.csv")
    assert set(tracestore.open(tmp_path / "back.zarr").scores.tolist()) == {0.75}


def change(out, name, data=None):
    """Replace a file by one of the same size, or remove it."""
    path = out / name
    before = path.read_bytes()
    path.unlink()
    if data is not None:
        path.write_bytes(data(before))


DAMAGE = {
    "a missing file": ("traces_batch_0001.pkl", None),
    "a shorter file": ("traces_batch_0002.pkl", lambda b: b[:-1]),
    "a longer file": ("traces_batch_0000.pkl", lambda b: b + b"\0"),
    "an edited text": ("traces_batch_0001.pkl", lambda b: b.replace(b"q5", b"q9", 1)),
    "a missing table": ("traces.jsonl", None),
    "a changed table": ("traces.jsonl", lambda b: b.replace(b'"label": 1.0', b'"label": 0.0', 1)),
    "changed facts": ("store.json", lambda b: b.replace(b'"correct"', b'"wrong!!"')),
    "a list that is no JSON": (LIST, lambda b: b[:-3]),
    "another list": (LIST, lambda b: b'{"files": []}'),
    "a list of another version": (LIST, lambda b: b.replace(b'"tracestore_export": 1', b'"tracestore_export": 2')),
    "a path outside": (LIST, lambda b: b.replace(b'"traces_batch_0000.pkl"', b'"../traces_batch_0000.pkl"')),
    "a number that is a text": (LIST, lambda b: b.replace(b'"num_traces": 12', b'"num_traces": "12"')),
    "too few traces": (LIST, lambda b: b.replace(b'"num_traces": 5', b'"num_traces": 4')),
    "too many traces": (LIST, lambda b: b.replace(b'"num_traces": 2', b'"num_traces": 3')),
    "lines of other traces": (LIST, lambda b: b.replace(b'"table_begin": 0', b'"table_begin": 5')),
    "an unknown format": (LIST, lambda b: b.replace(b'"format": "pkl"', b'"format": "xyz"')),
    "a provenance that is not there": (LIST, lambda b: b.replace(b'"provenance": null', b'"provenance": 3')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_export_is_refused(out, tmp_path, damage):
    change(out, *DAMAGE[damage])
    error_of("convert", out, tmp_path / "no.zarr", code=3)
    assert not (tmp_path / "no.zarr").exists() or len(tracestore.open(tmp_path / "no.zarr")) < 12


@pytest.mark.parametrize("format", ["safetensors", "datasets", "pkl", "pt-lstm"])
def test_files_of_an_export_that_are_exchanged_are_refused(tmp_path, format):
    path, out = write_store(tmp_path / "s.zarr", make_traces(2, tokens=6), attention="none"), tmp_path / "out"
    command("export", path, out, "--format", format, "--traces-per-file", 1, check=0)
    first, second = sorted(
        file for file in out.rglob("*.*") if file.suffix in (".safetensors", ".parquet", ".pkl", ".pt")
    )
    size, content = first.stat().st_size, first.read_bytes()
    assert second.stat().st_size == size
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    error = error_of("convert", out, tmp_path / "back.zarr", code=3)
    assert "has changed since the export; restore it" in error


def test_a_layout_reads_no_unfinished_export(out, tmp_path):
    path = out / LIST
    path.write_text(path.read_text().replace('"complete"', '"unfinished"'))
    lines = "--field", "records = *.pkl : []", "--field", "ignore = ['*.json*', '*.csv']"
    error = error_of("convert", out, tmp_path / "again.zarr", *lines, code=3)
    assert "an unfinished export" in error


def test_files_without_the_list_are_ordinary_files(out, tmp_path):
    (tmp_path / "copy").mkdir()
    for name in ("traces_batch_0000.pkl", "scores.csv"):
        shutil.copy(out / name, tmp_path / "copy")
    convert(tmp_path / "copy", tmp_path / "back.zarr")
    with tracestore.open(tmp_path / "back.zarr") as store:
        assert store.labels.tolist() == [0, 1, 0, 1, 0] and store.scores.tolist() == [0, 1, 1, 0, 1]


def test_the_old_loader_and_a_dry_run_read_exports(out, tmp_path):
    assert tracestore.TraceBatchLoader(out).get_total_traces() == 12
    assert "question_id 'q0', L 3, S 1" in convert(out, tmp_path / "no.zarr", "--dry-run").stdout
    text = (out / LIST).read_text()
    (out / LIST).write_text(json.dumps(json.loads(text) | {"state": "unfinished", "files": [], "side_files": []}))
    for words in (("convert", out, tmp_path / "no.zarr"), ("convert", out / "traces_batch_0000.pkl", tmp_path / "n")):
        assert "unfinished export" in error_of(*words, code=3)


def test_exports_whose_scores_have_opposite_directions_are_refused(out, tmp_path):
    command("export", tmp_path / "s.zarr", tmp_path / "top" / "one", check=0)
    with tracestore.create(tmp_path / "t.zarr", score_direction="hallucination") as writer:
        writer.append(make_traces(1)[0] | {"question_id": "t0"}, score=0.75)
    command("export", tmp_path / "t.zarr", tmp_path / "top" / "two", check=0)
    assert "a high score means 'correct'" in error_of("convert", tmp_path / "top", tmp_path / "all.zarr", code=2)


@pytest.mark.parametrize("choice", ["error", "keep-first", "keep-last"])
def test_a_score_or_group_that_an_export_no_longer_has_is_a_conflict(tmp_path, choice):
    traces, folder = make_traces(3), tmp_path / "out"
    for scores, groups in (((0.25, 0.75, 0.25), "abc"), ((0.75, math.nan, 0.25), ("a", "b", ""))):
        shutil.rmtree(folder, ignore_errors=True)
        with tracestore.create(tmp_path / "s.zarr", overwrite=True) as writer:
            for trace, score, group in zip(traces, scores, groups, strict=True):
                writer.append(trace, score=score, group=group)
        command("export", tmp_path / "s.zarr", folder, check=0)
        arguments = folder, tmp_path / "back.zarr", "--on-conflict", choice
        result = command("convert", *arguments)
        if choice == "error" and groups != "abc":
            assert result.returncode == 3 and "2 stored traces" in result.stderr
            return
        assert result.returncode == 0
    with tracestore.open(tmp_path / "back.zarr") as store:
        found = [(trace.scores.get("score"), trace.group) for trace in store]
    kept = choice == "keep-first"
    assert found == [(0.75, "a"), (0.75 if kept else None, "b"), (0.25, "c" if kept else "")]
