"""`tracestore convert --watch`: files that are added while it runs."""

import fcntl
import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import tracestore
from tests.helpers import ROOT, convert, error_of, field_flags, make_traces, write_pickle, write_scores
from tracestore.convert import watch

LABELED = field_flags("hidden_states = {id}.npy -> L S D", "is_correct = labels.csv : [id=qid]/y")
WATCH = ("--watch", "--watch-timeout", "10", "--attention", "none")


class Clock:
    """The time of a watch, which passes while it sleeps."""

    def __init__(self):
        self._seconds, self._calls = 0.0, []

    def at(self, seconds, function, *args):
        """Call a function at a time."""
        self._calls.append((seconds, function, args))

    def monotonic(self):
        return self._seconds

    def sleep(self, seconds):
        self._seconds += seconds
        due = [call for call in self._calls if call[0] <= self._seconds]
        for call in due:
            self._calls.remove(call)
            call[1](*call[2])


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def connector_arrays(k):
    """Return the tensors that vLLM's connector writes for a request."""
    rng = np.random.default_rng(k)
    return {"hidden_states": rng.standard_normal((5 + k, 3, 8)).astype("f2"), "token_ids": np.arange(5 + k)}


def write_in_parts(folder, k):
    """Write a file as vLLM does: a lock is held while the file grows. Yield after each part."""
    path = folder / f"cmpl-{k}.safetensors"
    save_file(connector_arrays(k), folder.parent / "whole")
    data = (folder.parent / "whole").read_bytes()
    with open(f"{path}.lock", "w") as lock, open(path, "wb") as file:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for part in (data[:4], data[4:200], data[200:]):
            file.write(part)
            file.flush()
            yield


def test_files_of_a_growing_folder_are_converted(tmp_path, folder, clock):
    for k in range(6):
        parts = write_in_parts(folder, k)
        for second in range(4):
            clock.at(4 * k + second, next, parts, None)
    done = convert(folder, tmp_path / "s.zarr", *WATCH, "--json")
    store = tracestore.open(tmp_path / "s.zarr")
    assert sorted(store.question_ids) == [f"cmpl-{k}" for k in range(6)]
    for k in range(6):
        trace, expected = store[store.index_of(f"cmpl-{k}")], connector_arrays(k)
        np.testing.assert_array_equal(trace.hidden_states, expected["hidden_states"].transpose(1, 0, 2))
    report = json.loads(done.stdout)
    assert report["num_sources"] == report["num_traces_new"] == report["num_traces"] == 6
    assert report["generation"] > 1 and report["skipped"] == []


def test_a_file_without_a_lock_is_converted_when_it_is_whole(tmp_path, folder, clock):
    save_file(connector_arrays(0), tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    (folder / "a.safetensors").write_bytes(data[:-10])
    clock.at(3, lambda: (folder / "a.safetensors").write_bytes(data))
    convert(folder, tmp_path / "s.zarr", *WATCH)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 1


def test_other_files_are_converted_when_they_do_not_change_any_more(tmp_path, folder, clock):
    traces = make_traces(4)
    write_pickle(folder / "0.pkl", traces[:2])
    clock.at(3, lambda: write_pickle(folder / "1.pkl", traces[2:]))
    done = convert(folder, tmp_path / "s.zarr", *WATCH)
    assert tracestore.open(tmp_path / "s.zarr").question_ids == ["q0", "q1", "q2", "q3"]
    assert "already in the store" in done.stdout and "0 files already" in done.stdout.splitlines()[-2]


def test_counts_of_several_conversions_are_added(tmp_path, folder, clock):
    traces = [trace | {"topic": "a"} for trace in make_traces(6, dtype="f4")]
    write_pickle(folder / "0.pkl", make_traces(2))
    for k in (1, 2):
        path = write_pickle(tmp_path / f"{k}.pkl", traces[2 * k : 2 * k + 2])
        clock.at(3 * k, path.rename, folder / path.name)
    report = json.loads(convert(folder, tmp_path / "s.zarr", *WATCH, "--json").stdout)
    assert report["num_traces"] == report["num_traces_read"] == 6 and report["num_sources"] == 3
    assert report["num_sources_rounded"] == {"float32": 2} and report["extras"] == {"topic": 4}


def test_a_refused_file_ends_the_watch_or_is_skipped_once(tmp_path, folder, clock):
    (folder / "bad.pkl").write_bytes(b"nonsense")
    assert "bad.pkl" in error_of("convert", folder, tmp_path / "s.zarr", *WATCH, code=3)
    clock.at(3, lambda: save_file(connector_arrays(1), folder / "a.safetensors"))
    done = convert(folder, tmp_path / "t.zarr", *WATCH, "--skip-bad")
    assert done.stdout.count("skipped bad.pkl") == 1 and len(tracestore.open(tmp_path / "t.zarr")) == 1
    (folder / "a.safetensors").unlink()
    assert "1 refused" in error_of("convert", folder, tmp_path / "u.zarr", *WATCH, "--skip-bad", code=3)


def test_with_skip_bad_errors_of_a_conversion_end_the_watch(tmp_path, folder, clock):
    for k in range(2):
        np.save(folder / f"q{k}.npy", np.full((2, 3, 4), k + 1, "f2"))
    (folder / "labels.csv").write_text("qid,y\nq0,1\nq1,0\n")
    clock.at(3, (folder / "labels.csv").write_text, "qid,y\nq0,\nq1,0\n")
    words = ("convert", folder, tmp_path / "s.zarr", *WATCH, *LABELED, "--skip-bad")
    assert "1 stored trace such as q0 have a score" in error_of(*words, code=3)


@pytest.mark.parametrize(
    ("ids", "message"), [(("x0", "x1", "x2"), "none of them in the traces"), (("q1", "q2", "q3"), "are left over")]
)
@pytest.mark.parametrize("words", [("--dry-run",), ("--dry-run", "--skip-bad"), ("--skip-bad",), WATCH])
def test_a_scores_file_with_the_ids_of_other_traces_is_refused_at_the_end(tmp_path, folder, clock, ids, message, words):
    write_pickle(folder / "0.pkl", make_traces(1))
    clock.at(3, lambda: write_pickle(folder / "1.pkl", make_traces(3)[1:]))
    write_scores(folder / "scores.csv", dict.fromkeys(ids, 0.9))
    if words != WATCH:
        clock.sleep(3)
    assert message in error_of("convert", folder, tmp_path / "s.zarr", *words, code=3)
    # An id of a refused trace may be in the file: if none is that of a trace, the summary has one line about it.
    write_pickle(folder / "2.pkl", [*make_traces(5)[4:], {"question_id": "q3"}])
    done = convert(folder, tmp_path / "t.zarr", *dict.fromkeys((*words, "--skip-bad")))
    assert done.stdout.count("none of them in the traces") == ("x0" in ids)


def test_overwrite_replaces_the_store_once(tmp_path, folder, clock):
    convert(write_pickle(tmp_path / "old.pkl", make_traces(2, dim=4)), tmp_path / "s.zarr", "--attention", "none")
    write_pickle(folder / "0.pkl", make_traces(2))
    clock.at(3, lambda: write_pickle(folder / "1.pkl", make_traces(4)[2:]))
    convert(folder, tmp_path / "s.zarr", *WATCH, "--overwrite")
    assert len(tracestore.open(tmp_path / "s.zarr")) == 4


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("is_added", [False, True])
def test_a_store_that_goes_while_the_watch_runs_gets_all_files(tmp_path, folder, clock, is_replaced, is_added):
    store = tmp_path / "s.zarr"
    write_pickle(folder / "0.pkl", make_traces(2))
    clock.at(3, shutil.rmtree, store)
    if is_replaced:
        clock.at(3, convert, write_pickle(tmp_path / "o.pkl", make_traces(3)[2:]), store, "--attention", "none")
    if is_added:
        clock.at(5, lambda: write_pickle(folder / "1.pkl", make_traces(4)[3:]))
    done = convert(folder, store, *WATCH)
    ids = {"q0", "q1", *(["q2"] if is_replaced else []), *(["q3"] if is_added else [])}
    assert sorted(tracestore.open(store).question_ids) == sorted(ids)
    assert done.stdout.count(" added from ") == 2


def test_wrong_usage(tmp_path, folder):
    short = ("--watch", "--watch-timeout", "0.1")
    assert "no trace file within 0.1 s" in error_of("convert", folder, tmp_path / "s.zarr", *short, code=2)
    assert "no such file" in error_of("convert", tmp_path / "none", tmp_path / "s.zarr", *short, code=2)
    message = error_of("convert", folder, tmp_path / "s.zarr", "--watch-timeout", "1", code=2)
    assert "needs --watch" in message


@pytest.mark.long
def test_ctrl_c_ends_the_watch_and_the_same_command_continues(tmp_path, folder):
    save_file(connector_arrays(0), folder / "0.safetensors")
    words = (sys.executable, "-m", "tracestore", "convert", folder, tmp_path / "s.zarr", "--watch", "--attention")
    words += ("none",)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    for line in process.stdout:
        if "without a label or score" in line:  # the last line of the first conversion
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "1 trace committed; run the same command to continue" in errors
    shutil.copy(folder / "0.safetensors", folder / "1.safetensors")
    convert(folder, tmp_path / "s.zarr", *WATCH)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 2


def test_files_of_a_stated_layout_wait_for_the_table_that_it_names(tmp_path, folder, clock):
    states = np.random.default_rng(0).standard_normal((3, 2, 4, 5)).astype("f2")
    np.save(folder / "q0.npy", states[0])
    table = "qid,y\nq0,1\nq1,0\nq2,1\n"
    clock.at(3, (folder / "labels.csv").write_text, table)
    for k in (1, 2):
        np.save(tmp_path / f"q{k}.npy", states[k])
        clock.at(3 * (k + 1), (tmp_path / f"q{k}.npy").rename, folder / f"q{k}.npy")
    done = convert(folder, tmp_path / "s.zarr", *WATCH, *LABELED)
    assert "waiting for other files: is_correct: no file matches labels.csv" in done.stdout
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert {q: store[q].score for q in store.question_ids} == {"q0": 1, "q1": 0, "q2": 1}


def test_files_that_never_fit_end_the_watch_with_the_reason(tmp_path, folder):
    np.save(folder / "q0.npy", np.ones((2, 3, 4), "f2"))
    assert "labels.csv" in error_of("convert", folder, tmp_path / "s.zarr", *WATCH, *LABELED, code=3)


def test_a_table_that_changes_replaces_the_labels_of_a_stated_layout(tmp_path, folder, clock):
    for k in range(2):
        np.save(folder / f"q{k}.npy", np.full((2, 3, 4), k + 1, "f2"))
    (folder / "labels.csv").write_text("qid,y\nq0,1\nq1,0\n")
    clock.at(3, (folder / "labels.csv").write_text, "qid,y\nq0,0\nq1,0\n")
    done = convert(folder, tmp_path / "s.zarr", *WATCH, *LABELED)
    assert "scores, labels or groups of 1 stored trace have changed and were replaced" in done.stdout
    assert tracestore.open(tmp_path / "s.zarr").scores.tolist() == [0, 0]
