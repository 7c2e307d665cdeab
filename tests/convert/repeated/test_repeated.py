"""The same command again, and folders that change between conversions."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import tracestore
from tests.convert.repeated import folders
from tests.convert.repeated.sequences import run, values
from tests.helpers import command, convert, error_of, field_flags, make_trace, tree_bytes, write_pickle
from tests.tiers import long
from tracestore.convert import cutting
from tracestore.convert.runner import Conversion

_LINES = {
    "hidden_states": "{file}.npz : hs -> L S D",
    "question_id": "{file}.npz : id",
    "is_correct": "{file}.npz : label",
    "group": "{file}.npz : group",
}


@pytest.fixture(params=[1, 10**9], ids=["many commits", "one commit"])
def data(tmp_path, monkeypatch, request):
    """A folder for sources, which are committed one by one or together."""
    monkeypatch.setattr(cutting, "MIN_BYTES", request.param)
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def save(path, seed, question_id, label=1, group="a", num_tokens=5):
    states = np.random.default_rng(seed).standard_normal((3, num_tokens, 16)).astype("f2")
    label = np.float64("nan" if label is None else label)
    np.savez(path, hs=states, id=np.array(question_id), label=label, group=np.array(group))


def words(data, lines=_LINES):
    fields = [word for name, line in lines.items() for word in ("--field", f"{name} = {line}")]
    return ["convert", data, data.parent / "s.zarr", *fields, "--attention", "none"]


def stored(data):
    """Return the label and the group of each trace."""
    found = values(data.parent / "s.zarr").items()
    return {key: (dict(scores).get("is_correct"), group) for key, (_, _, group, scores) in found}


_REFUSED = {
    "copy": ([(1, "q1")], (1, "q1 (1)"), "a copy"),
    "copy before": ([(1, "q1-old")], (1, "q1"), "a copy"),
    "copy of a copy": ([(1, "q1 (1)")], (1, "q1_bak"), "a copy"),
    "label": ([(1, "q1", 1)], (1, "q1", 0), "copies of a trace have one label"),
    "other label": ([(1, "q1", 0)], (1, "q1", 1), "copies of a trace have one label"),
    "label of the second": ([(1, "q1", None), (1, "q1", 1)], (1, "q1", 0), "copies of a trace have one label"),
    "group": ([(1, "q1", 1, "a")], (1, "q1", 1, "b"), "copies of a trace have one group"),
    "group of the second": ([(1, "q1", 1, ""), (1, "q1", 1, "a")], (1, "q1", 1, "b"), "have one group"),
    "content": ([(1, "q1")], (2, "q1"), "different content"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_refused_copy_stays_refused(data, case):
    """The files that it is compared with need not be read by the later commands."""
    known, refused, reason = _REFUSED[case]
    for k, trace in enumerate([*known, (7, "other", 0)]):
        save(data / f"a{k}.npz", *trace)
    save(data / "z.npz", *refused)
    first = error_of(*words(data), code=3)
    assert "z.npz" in first and reason in first
    assert [error_of(*words(data), code=3) for _ in range(3)] == [first] * 3
    (data / "z.npz").unlink()
    command(*words(data), check=0)
    found = values(data.parent / "s.zarr")
    command(*words(data), "--overwrite", check=0)
    assert values(data.parent / "s.zarr") == found


@pytest.mark.parametrize("case", ["copy", "label", "group"])
def test_a_copy_that_comes_later_is_refused(data, case):
    known, refused, reason = _REFUSED[case]
    save(data / "m.npz", *known[0])
    command(*words(data), check=0)
    save(data / "a.npz", *refused)
    found = [error_of(*words(data), code=3) for _ in range(3)]
    assert found[1:] == found[:1] * 2 and reason in found[0]


def test_an_unchanged_copy_keeps_its_label(data):
    """One of two files with a trace loses its label: the other one has it."""
    for name in "ab":
        save(data / f"{name}.npz", 1, "q1", 0)
    command(*words(data), check=0)
    save(data / "a.npz", 1, "q1", None)
    command(*words(data), check=0)
    assert stored(data) == {("q1", 0): (0, "a")}
    save(data / "b.npz", 1, "q1", None)
    assert "no longer have" in error_of(*words(data), code=3)
    command(*words(data), "--on-conflict", "keep-last", check=0)
    assert stored(data) == {("q1", 0): (None, "a")}


@pytest.mark.parametrize("value", [0, None, 1])
def test_the_last_content_of_a_file_counts(data, value):
    for label in (0, value, 0, None, value, 0):
        save(data / "a.npz", 1, "q1", label)
        command(*words(data), "--on-conflict", "keep-last", check=0)
        assert stored(data) == {("q1", 0): (label, "a")}


def test_an_earlier_array_returns(data):
    found = []
    for seed in (1, 2, 1, 3, 2):
        save(data / "a.npz", seed, "q1")
        command(*words(data), "--on-conflict", "keep-last", check=0)
        found.append(values(data.parent / "s.zarr")["q1", 0][0])
    assert found[0] == found[2] and found[1] == found[4] and len(set(found)) == 3
    save(data / "a.npz", 1, "q1")
    assert "different content" in error_of(*words(data), code=3)


@pytest.mark.parametrize("change", [{"label": 0}, {"group": "b"}, {"seed": 2}], ids=["label", "group", "content"])
def test_a_removed_file_returns(data, change):
    """Another file had its trace meanwhile, with other values."""
    first = {"seed": 1, "question_id": "q1", "label": 1, "group": "a"}
    save(data / "b.npz", **first)
    command(*words(data), check=0)
    (data / "b.npz").rename(data.parent / "b.npz")
    save(data / "a.npz", **first | change)
    command(*words(data), "--on-conflict", "keep-last", check=0)
    (data.parent / "b.npz").rename(data / "b.npz")
    if "seed" not in change:
        assert "copies of a trace have one" in error_of(*words(data), "--on-conflict", "keep-last", code=3)
        return
    command(*words(data), "--on-conflict", "keep-last", check=0)
    np.testing.assert_array_equal(
        tracestore.open(data.parent / "s.zarr")[0].hidden_states, np.load(data / "b.npz")["hs"]
    )


@pytest.mark.parametrize("flags", [[], pytest.param(["--workers", 2], marks=pytest.mark.long)])
def test_the_last_file_wins_each_time(data, flags):
    """A file with a refused trace is read again, and a later one has another trace of the same key."""
    write_pickle(data / "a.pkl", [make_trace(0), make_trace(1), {"question_id": "q2"}])
    write_pickle(data / "b.pkl", [make_trace(1, seed=5), make_trace(3)])
    expected = None
    for _ in range(3):
        convert(data, data.parent / "s.zarr", "--skip-bad", "--on-conflict", "keep-last", *flags)
        found = values(data.parent / "s.zarr")
        expected = expected or found
        assert found == expected
    states = np.frombuffer(found["q1", 0][0], "f2")
    np.testing.assert_array_equal(states, np.stack(make_trace(1, seed=5)["hidden_states"]).reshape(-1))


def test_a_file_with_a_refused_trace_changes_nothing_again(data):
    write_pickle(data / "a.pkl", [make_trace(0), {"question_id": "q1"}])
    write_pickle(data / "b.pkl", [make_trace(2)])
    convert(data, data.parent / "s.zarr", "--skip-bad")
    before = tree_bytes(data.parent / "s.zarr")
    convert(data, data.parent / "s.zarr", "--skip-bad")
    assert tree_bytes(data.parent / "s.zarr") == before


def test_only_changed_files_are_read(data):
    """Unchanged ones are read only if they may have a trace that changes."""
    for k in range(4):
        save(data / f"{k}.npz", k, f"q{k}", k % 2)
    command(*words(data), check=0)
    for label in (0, 1, 0):
        save(data / "1.npz", 1, "q1", label)
        done = command(*words(data), "--json", check=0)
        assert json.loads(done.stdout)["num_sources_skipped_existing"] == 3
    save(data / "9.npz", 9, "q9", 0)
    assert json.loads(command(*words(data), "--json", check=0).stdout)["num_sources_skipped_existing"] == 4


def test_a_second_reading_counts_what_the_first_one_has_committed(data, monkeypatch):
    """It begins without files that are open for the first one."""
    for k, name in enumerate(("0", "1", "b", "z")):
        write_pickle(data / f"{name}.pkl", [make_trace(k)])
    tracestore.convert_files(data, data.parent / "s.zarr")
    write_pickle(data / "a.pkl", [make_trace(9)])
    write_pickle(data / "b.pkl", [make_trace(2), make_trace(3, seed=5)])
    opened, again = [], Conversion._again

    def counted(conversion):
        opened.append(f"{data}/" in Path("/proc/self/maps").read_text())
        return again(conversion)

    monkeypatch.setattr(Conversion, "_again", counted)
    report = tracestore.convert_files(data, data.parent / "s.zarr", on_conflict="keep-last")
    assert opened == [False]
    assert report.num_traces_new == 1 and report.num_traces == 5


def test_other_options_are_not_ignored(data):
    """Files that the store has are read again if an option names other keys in them."""
    write_pickle(data / "a.pkl", [make_trace(k) | {"mine": k / 4, "own_id": f"m{k}"} for k in range(3)])
    convert(data, data.parent / "s.zarr")
    flags = "--score-column", "mine", "--score-direction", "correct"
    convert(data, data.parent / "s.zarr", *flags, check=3)  # `mine` was an extra of the traces
    for _ in range(2):
        convert(data, data.parent / "s.zarr", *flags, "--on-conflict", "keep-last")
        scores = [t.scores for t in tracestore.open(data.parent / "s.zarr")]
        assert scores == [{"mine": 0}, {"mine": 0.25}, {"mine": 0.5}]
    convert(data, data.parent / "s.zarr", "--id-column", "own_id", check=3)  # the same traces under other ids
    convert(data, data.parent / "s.zarr", "--id-column", "own_id", "--overwrite")
    assert [*tracestore.open(data.parent / "s.zarr").question_ids] == ["m0", "m1", "m2"]


def test_the_first_token_is_that_of_files_that_are_not_read(data):
    for name, first in (("a", 0), ("b", 0), ("c", 1)):
        (data / name).mkdir()
        for token in range(first, first + 3):
            np.save(data / name / f"{token}.npy", np.random.default_rng([first, token]).standard_normal((3, 16)))
    lines = {"hidden_states": "{id}/{token:d}.npy -> L D"}
    found = [error_of(*words(data, lines), code=3) for _ in range(3)]
    assert "the first token is 1, expected 0" in found[0] and found[1:] == found[:1] * 2


@pytest.mark.parametrize("line", [{"correctness.f1": "{file}.npz : f"}, {"ignore": '["{file}.npz : groups"]'}])
def test_a_misspelled_line_stays_refused(data, line):
    for k in range(3):
        save(data / f"{k}.npz", k, f"q{k}")
    found = [error_of(*words(data, _LINES | line), code=3) for _ in range(3)]
    assert "the files hold no such value" in found[0] and found[1:] == found[:1] * 2


@pytest.mark.parametrize("seed", [*range(4), *long(*range(4, 40))])
def test_a_store_is_that_of_the_folder_as_it_is(tmp_path, seed):
    """Each conversion refuses a file, or stores what a new store has."""
    log, wrong = run(seed, tmp_path)
    assert not wrong, [*log, *wrong]


@pytest.mark.parametrize("seed", [*range(300, 304), *long(*range(304, 340))])
def test_folders_of_many_forms(tmp_path, seed):
    """Each conversion refuses a file, or stores what a new store has, or prints which values differ."""
    log, wrong = folders.run(seed, tmp_path)
    assert not wrong, [*log, *wrong]


@pytest.mark.parametrize("k", range(1, 20, 2))
def test_a_label_that_changes_inside_a_large_file_is_found(tmp_path, k):
    """The size stays, and the samples of the fingerprint may miss the byte that differs; so does the time of a copy."""
    data, store = tmp_path / "data", tmp_path / "s.zarr"
    traces = [make_trace(i, tokens=20, dim=2048) | {"is_correct": True} for i in range(20)]
    path = write_pickle(data / "a.pkl", traces)
    convert(data, store)
    size = path.stat().st_size
    assert size > 1 << 20 and "(1 file already in the store" in convert(data, store).stdout
    write_pickle(path, [{**trace, "is_correct": i != k} for i, trace in enumerate(traces)])
    assert path.stat().st_size == size
    assert "1 stored trace" in convert(data, store).stdout
    assert np.flatnonzero(tracestore.open(store).scores == 0).tolist() == [k]
    assert "(1 file already in the store" in convert(data, store).stdout
    os.utime(path)
    before = tree_bytes(store / "segments")
    assert "its time has changed" in convert(data, store).stdout
    assert tree_bytes(store / "segments") == before
    assert "(1 file already in the store" in convert(data, store).stdout


@pytest.mark.parametrize("names", ["id", "id, sample"])
def test_the_rows_of_stored_traces_are_not_left_over_next_to_a_new_one_without_a_row(tmp_path, names):
    states = np.random.default_rng(0).standard_normal((4, 3, 5, 8)).astype("f2")
    (tmp_path / "in").mkdir()
    has_samples = names != "id"
    pattern, row = ("{id}_{sample}.npz", "id=id, sample=s") if has_samples else ("{id}.npz", "id=id")
    lines = [f"hidden_states = {pattern} : hs -> L S D", f"is_correct = t.csv : [{row}]/ok"]
    (tmp_path / "in/t.csv").write_text("id,s,ok\nq0,0,1\nq0,1,0\nq1,0,1\n" if has_samples else "id,ok\nq0,1\nq1,0\n")
    files = ("q0_0", "q0_1", "q1_0", "q1_1") if has_samples else ("q0", "q1", "q2")
    for k, name in enumerate(files):
        np.savez(tmp_path / f"in/{name}.npz", hs=states[k])
        if k == len(files) - 2:
            command("convert", tmp_path / "in", tmp_path / "s.zarr", *field_flags(*lines), check=0)
    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", check=0)
    assert f"is_correct: 0 rows of t.csv joined by {names}, 1 trace without a row" in done.stdout
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert np.isnan(store.scores).tolist() == [False] * (len(files) - 1) + [True]
