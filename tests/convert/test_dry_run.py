"""convert --dry-run: what the first traces hold, without writing."""

import json

import numpy as np
import pytest

from tests.helpers import convert, make_trace, make_traces, write_pickle


def lines_of(done):
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_keys_shapes_and_roles_are_printed(tmp_path):
    traces = [t | {"note": "x", "bleurt_score": 0.5, "logits": np.zeros((40, 50_000), "f4")} for t in make_traces(5)]
    traces = [{("hs" if k == "hidden_states" else k): v for k, v in t.items() if k != "question_id"} for t in traces]
    write_pickle(tmp_path / "a.pkl", traces)
    done = convert(tmp_path / "a.pkl", tmp_path / "s.zarr", "--dry-run", "--map", "hidden_states=hs")
    lines = lines_of(done)
    assert "a.pkl:" in lines
    for line in (
        "hs list of 3: float16 (1, 8) -> hidden_states",
        "attentions list of 3: float16 (2, 1, 1) -> attentions",
        "tokens int64 (1,) -> tokens",
        "tokens_decoded list of 1: text -> tokens_decoded",
        "note text -> extra",
        "bleurt_score float -> score",
        "logits float32 (40, 50000) -> dropped",
        "no question_id: the name of the file becomes the id, with the position if there are several traces",
    ):
        assert line in lines, done.stdout
    assert any(
        line.startswith("trace 2 would be stored: question_id 'a.pkl:2' (made up), L 3, S 3, D 8 float16")
        for line in lines
    )
    assert not any("trace 3" in line for line in lines)
    assert not (tmp_path / "s.zarr").exists() and lines[-1] == "1 file, 0 refused; nothing was written"


def test_files_with_the_same_keys_are_described_once(tmp_path):
    for k in range(4):
        write_pickle(tmp_path / f"batch_{k}.pkl", make_traces(2))
    write_pickle(tmp_path / "other.pkl", [make_trace(1) | {"more": 1}])
    done = convert(tmp_path, tmp_path / "s.zarr", "--dry-run", "--json")
    report = json.loads(done.stdout)
    assert [files["files"] for files in report["files"]] == [[f"batch_{k}.pkl" for k in range(4)], ["other.pkl"]]
    assert report["num_sources"] == 5 and "batch_0.pkl and 3 more files" in done.stderr


def test_a_refused_file_is_described_and_ends_with_its_error(tmp_path):
    write_pickle(tmp_path / "a.pkl", [{"question_id": "a", "hs": 1}])
    write_pickle(tmp_path / "b.pkl", make_traces(1))
    (tmp_path / "c.pkl").write_bytes(b"x")
    done = convert(tmp_path, tmp_path / "s.zarr", "--dry-run", check=3)
    assert "hs int -> extra" in lines_of(done) and "trace 0 would be stored: question_id 'q0'" in done.stdout
    assert done.stderr.count("\n") == 1 and "name it with --map hidden_states=KEY" in done.stderr
    assert "3 files, 2 refused" in done.stdout
    convert(tmp_path, tmp_path / "s.zarr", "--dry-run", "--skip-bad")


def test_the_options_of_an_existing_store_apply(tmp_path):
    path = write_pickle(tmp_path / "a.pkl", make_traces(2, dtype="f4"))
    convert(path, tmp_path / "s.zarr", "--attention", "none", "--dtype", "keep")
    done = convert(path, tmp_path / "s.zarr", "--dry-run")
    assert "D 8 float32" in done.stdout and "causal attention" not in done.stdout


def test_preprocessed_files(tmp_path):
    torch = pytest.importorskip("torch")
    value = {
        "sequences": torch.zeros(2, 3, 4, dtype=torch.float16),
        "labels": torch.ones(2),
        "question_ids": ["a", "b"],
    }
    torch.save(value, tmp_path / "a.pt")
    lines = lines_of(convert(tmp_path / "a.pt", tmp_path / "s.zarr", "--dry-run"))
    assert "sequences float16 (2, 3, 4) -> last_token" in lines
    assert "trace 1 would be stored: question_id 'b', L 3, D 4 float16, label 1" in lines


def test_a_damaged_or_odd_file_ends_in_one_line(tmp_path):
    write_pickle(tmp_path / "a.pkl", [{"\x1b[2J": object, 7: {"a": [[[[1]]]]}, "hidden_states": [[[1.0]]]}])
    done = convert(tmp_path / "a.pkl", tmp_path / "s.zarr", "--dry-run", check=3)
    assert "\x1b" not in done.stdout + done.stderr and done.stderr.count("\n") == 1
