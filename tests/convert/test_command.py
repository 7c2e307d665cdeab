"""The command `tracestore convert`, and `tracestore score` on its stores."""

import gc
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import tracestore
from tests.helpers import (
    ROOT,
    command,
    convert,
    error_of,
    make_trace,
    make_traces,
    tree_bytes,
    write_pickle,
    write_scores,
)
from tracestore.store.maintain.verify import verify_store


def test_convert_uses_the_scores_file_of_the_folder_and_skips_committed_files(folder, tmp_path):
    done = convert(folder, tmp_path / "s.zarr")
    assert "ground_truth_scores.csv" in done.stdout and done.stderr == ""
    store = tracestore.open(tmp_path / "s.zarr")
    assert len(store) == 12 and not np.isnan(store.scores).any()
    assert store[8].source == ("trivia_qa_traces_batch_0001.pkl.gz", 1)
    before = tree_bytes(tmp_path / "s.zarr")
    again = convert(folder, tmp_path / "s.zarr")
    assert "2 files already in the store" in again.stdout and tree_bytes(tmp_path / "s.zarr") == before


def test_a_store_is_no_source(folder, tmp_path):
    convert(folder, tmp_path / "s.zarr")
    found = error_of("convert", tmp_path / "s.zarr", tmp_path / "t.zarr", code=2)
    assert "s.zarr: a store; tracestore merge and subset copy stores" in found and found.count("\n") == 1
    assert not (tmp_path / "t.zarr").exists()


def test_json_output_is_one_document(folder, tmp_path):
    done = convert(folder, tmp_path / "s.zarr", "--json")
    summary = json.loads(done.stdout)
    assert summary["num_traces"] == 12 and summary["num_unscored"] == 0 and "12 traces" in done.stderr
    info = json.loads(command("info", tmp_path / "s.zarr", "--json", check=0).stdout)
    keys = "num_traces num_tokens num_layers hidden_dim num_heads attention attention_layout hidden_dtype"
    keys += " num_segments bytes num_scored generation"
    assert set(keys.split()) <= set(info) and info["num_heads"] == 2 and info["attention"] == "mean"
    assert info["bytes"] == sum(map(len, tree_bytes(tmp_path / "s.zarr").values())) - _manifest_bytes(
        tmp_path / "s.zarr"
    )


def _manifest_bytes(store):
    files = tree_bytes(store)
    return sum(len(v) for k, v in files.items() if "manifest" in k or k == "zarr.json")


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_bytes_do_not_depend_on_the_number_of_workers(folder, tmp_path, workers, codec):
    convert(folder, tmp_path / "a.zarr", "--workers", 1, "--codec", codec)
    convert(folder, tmp_path / "b.zarr", "--workers", workers, "--codec", codec)
    assert tree_bytes(tmp_path / "a.zarr") == tree_bytes(tmp_path / "b.zarr")


def test_new_files_are_added_and_missing_scores_set(folder, tmp_path, traces):
    (folder / "ground_truth_scores.csv").unlink()
    convert(folder, tmp_path / "s.zarr")
    assert np.isnan(tracestore.open(tmp_path / "s.zarr").scores).all()
    write_pickle(folder / "trivia_qa_traces_batch_0002.pkl", [make_trace(50)])
    write_scores(folder / "my_scores.csv", {t["question_id"]: 0.25 for t in traces} | {"q50": 0.75})
    convert(folder, tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    assert len(store) == 13 and store[store.index_of("q50")].score == 0.75 and (store.scores[:12] == 0.25).all()
    assert verify_store(tmp_path / "s.zarr").damaged == {}


def test_score_replaces_scores_without_writing_segments(folder, tmp_path):
    convert(folder, tmp_path / "s.zarr")
    before = {k: v for k, v in tree_bytes(tmp_path / "s.zarr").items() if k.startswith("segments/")}
    write_scores(tmp_path / "new.csv", {"q0": 0.125, "elsewhere": 1}, "bleurt_score")
    done = command("score", tmp_path / "s.zarr", "--scores", tmp_path / "new.csv", "--name", "score", "--json", check=0)
    assert json.loads(done.stdout)["num_scores_without_trace"] == 1
    assert tracestore.open(tmp_path / "s.zarr").scores[0] == 0.125
    assert before == {k: v for k, v in tree_bytes(tmp_path / "s.zarr").items() if k.startswith("segments/")}


def test_group_column(folder, tmp_path):
    """The default is the column `group`; another column is used only with --group-column."""
    rows = "question_id,score,template,group\n" + "".join(f"q{k},0.5,t{k % 2},g{k % 3}\n" for k in range(12))
    (tmp_path / "both.csv").write_text(rows)
    given = ["--scores", tmp_path / "both.csv"]
    for name, words, expected in (
        ("plain", [], ["g0", "g1", "g2"]),
        ("chosen", ["--group-column", "template"], ["t0", "t1", "t0"]),
    ):
        convert(folder, tmp_path / name, *given, *words)
        assert [tracestore.open(tmp_path / name)[k].group for k in range(3)] == expected
    command("score", tmp_path / "plain", *given, "--group-column", "template", check=0)
    assert [tracestore.open(tmp_path / "plain")[k].group for k in range(3)] == ["t0", "t1", "t0"]
    before = tree_bytes(tmp_path / "plain")
    done = command("score", tmp_path / "plain", *given, "--group-column", "subject", check=3)
    assert "expected subject among them" in done.stderr and tree_bytes(tmp_path / "plain") == before
    (tmp_path / "both.csv").write_text(rows + "q3,0.5,t0,g0\n")
    done = command("score", tmp_path / "plain", *given, "--group-column", "template", check=3)
    assert "found a second template 't0' for question 'q3', expected 't1' as before" in done.stderr
    (folder / "ground_truth_scores.csv").unlink()
    done = convert(folder, tmp_path / "none", "--group-column", "template", check=2)
    assert "--group-column needs a scores file" in done.stderr


def test_nonfinite_values_are_kept_counted_and_reported(folder, tmp_path):
    trace = make_trace(70, tokens=3)
    trace["hidden_states"][1][0, 0] = np.nan
    write_pickle(folder / "nan.pkl", [trace])
    done = convert(folder, tmp_path / "s.zarr")
    assert "NaN or infinite values in 1 trace;" in done.stdout
    store = tracestore.open(tmp_path / "s.zarr")
    found = store[store.index_of("q70")]
    assert found.has_nonfinite and np.isnan(found.hidden_states[1, 0, 0]) and not store[1].has_nonfinite


def wrong_usage(tmp_path, folder):
    """Return arguments, exit code and a part of the message."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.tex").write_text("all of it")
    dst = tmp_path / "s.zarr"
    no_column = write_scores(tmp_path / "no_column.csv", {"q0": 1}, "rating")
    return [
        ([tmp_path / "nowhere", dst], 2, "no such file"),
        ([empty, dst], 2, "no trace file"),
        ([folder, empty, dst], 2, f"{empty}: no trace file"),
        (
            [folder, empty, dst, "--field", "hidden_states=*.pkl : []/hidden_states -> L S D"],
            2,
            f"{empty}: no trace file",
        ),
        ([folder, tmp_path / "occupied"], 2, "neither empty nor a store"),
        ([folder, tmp_path / "no" / "parent" / "s.zarr"], 2, "does not exist"),
        ([folder, dst, "--scores", tmp_path / "none.csv"], 2, "no such scores file"),
        ([folder, dst, "--scores", no_column], 3, "no_column.csv: found columns question_id, rating"),
        ([folder, dst, "--attention", "all"], 2, "invalid choice"),
        ([folder, dst, "--memory-budget", "lots"], 2, "512MiB"),
        ([folder, dst, "--memory-budget", "1MiB"], 2, "at least"),
        ([folder, dst, "--workers", "0"], 2, "at least 1"),
        ([folder], 2, "DST"),
        ([folder / "trivia_qa_traces_batch_0000.pkl", folder / "ground_truth_scores.csv" / "x"], 2, ""),
    ]


def test_wrong_usage_is_one_line(tmp_path, folder):
    for args, code, words in wrong_usage(tmp_path, folder):
        done = convert(*args, check=code)
        assert words in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "s.zarr").exists()
    for args in (["info", tmp_path / "none.zarr"], ["verify", tmp_path / "none.zarr"], ["frobnicate"]):
        done = command(*args, check=2)
        assert done.stderr.count("\n") == 1


def test_options_that_differ_from_those_of_the_store_need_overwrite(folder, tmp_path):
    convert(folder, tmp_path / "s.zarr", "--attention", "heads")
    done = convert(folder, tmp_path / "s.zarr", "--attention", "mean", check=2)
    assert "--attention heads" in done.stderr
    convert(folder, tmp_path / "s.zarr")
    convert(folder, tmp_path / "s.zarr", "--attention", "mean", "--overwrite")
    assert tracestore.open(tmp_path / "s.zarr").attention_mode == "mean"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_destination_is_wrong_usage(folder, tmp_path):
    (tmp_path / "ro").mkdir(mode=0o555)
    done = convert(folder, tmp_path / "ro" / "s.zarr", check=2)
    assert done.stderr.count("\n") == 1 and "s.zarr" in done.stderr


@pytest.mark.long
def test_a_full_disk_leaves_the_store_intact(folder, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        big = write_pickle(tmp_path / "big.pkl", make_traces(3, tokens=60, dim=300))
        convert(folder, mount / "s.zarr")
        before = tree_bytes(mount / "s.zarr")
        done = convert(big, mount / "s.zarr", check=3)
        assert "hidden_dim" in done.stderr
        big = write_pickle(tmp_path / "big.pkl", [make_trace(100 + k, tokens=600, dim=8) for k in range(20)])
        done = convert(big, mount / "s.zarr", check=4)
        assert "no space left" in done.stderr and "needed" in done.stderr and done.stderr.count("\n") == 1
        assert tree_bytes(mount / "s.zarr") == before and verify_store(mount / "s.zarr").damaged == {}
        subprocess.run(["mount", "-o", "remount,size=200m", mount], check=True)
        convert(big, mount / "s.zarr")
        assert len(tracestore.open(mount / "s.zarr")) == 32
    finally:
        gc.collect()  # a mapped store keeps the mount busy
        subprocess.run(["umount", mount], check=True)


@pytest.mark.long
def test_the_message_of_an_interrupt_says_how_to_continue(tmp_path):
    data = tmp_path / "data"
    for k in range(3):
        write_pickle(data / f"b{k}.pkl.gz", [make_trace(20 * k + i, tokens=64, dim=256, layers=12) for i in range(20)])
    process = subprocess.Popen(
        [sys.executable, "-m", "tracestore.convert", data, tmp_path / "s.zarr"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    time.sleep(0.15)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    if process.returncode == 130:
        assert "to continue" in stderr and stderr.count("\n") == 1
    convert(data, tmp_path / "s.zarr")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 60


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (["--map", "hidden_states=hs"], "--field 'hidden_states = *.pkl : []/hs'"),
        (["--axes", "SLD"], "--field 'hidden_states = *.pkl : []/hidden_states -> S L D'"),
        (
            ["--map", "hidden_states=hs,question_id=id", "--axes", "SLD"],
            "--field 'hidden_states = *.pkl : []/hs -> S L D' --field 'question_id = *.pkl : []/id'",
        ),
    ],
)
def test_map_and_axes_print_the_lines_of_a_layout(tmp_path, flags, lines):
    write_pickle(tmp_path / "in" / "a.pkl", make_traces(1))
    message = error_of("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, code=2)
    assert lines in message and not (tmp_path / "s.zarr").exists()


def test_many_files_without_traces_print_one_line(tmp_path):
    folder = tmp_path / "in"
    for k in range(20):
        write_pickle(folder / f"q{k}.pkl", make_traces(k + 1)[k:])
        (folder / f"q{k}.json").write_text('{"model": "m"}')
    done = convert(folder, tmp_path / "s.zarr")
    assert "skipped 20 files without traces (q0.json, q1.json, q2.json and 17 more): holds no array" in done.stdout
    assert len(done.stdout.splitlines()) < 12 and len(tracestore.open(tmp_path / "s.zarr")) == 20
