"""Commands check their destination, and the space on its disk, before they read their sources."""

import os

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_traces, write_pickle, write_store
from tracestore.cli.commands import extract
from tracestore.store.io import fsio
from tracestore.store.maintain import transfer
from tracestore.store.maintain.selection import large_array_bytes


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "s.zarr", make_traces(6, tokens=9), score=lambda k: k / 6)


def writing_commands(store, tmp_path, destination):
    """Return each command that writes to a store or a folder, with sources that are not there or are damaged."""
    (tmp_path / "damaged.pkl").write_bytes(b"\x80\x05damaged")
    (tmp_path / "q.csv").write_text("question_id,question\nq0,why?\n")
    model = ("--model", "none", "--questions", tmp_path / "q.csv", "--out")
    of_stores = {
        "convert": ("convert", tmp_path / "damaged.pkl", destination),
        "merge": ("merge", tmp_path / "none.zarr", destination),
        "subset": ("subset", tmp_path / "none.zarr", destination, "--segments", "7"),
        "extract": ("extract", *model, destination),
    }
    of_folders = {
        "extract": ("extract", *model, destination.with_suffix("")),
        "export": ("export", store, destination.with_suffix("")),
        "train": ("train", "--store", store, "--output-dir", destination.with_suffix(""), "--score", "none"),
        "benchmark": ("benchmark", store, "--output-dir", destination.with_suffix(""), "--score", "none"),
    }
    return of_stores, of_folders


@pytest.mark.parametrize("name", ["convert", "merge", "subset", "extract"])
def test_the_destination_of_a_store_is_checked_first(name, store, tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "read_questions", lambda _: [])
    of_stores, _ = writing_commands(store, tmp_path, tmp_path / "none" / "d.zarr")
    assert "the parent folder does not exist" in error_of(*of_stores[name], code=2)
    (tmp_path / "notes.zarr").mkdir()
    (tmp_path / "notes.zarr" / "notes.txt").write_text("mine")
    of_stores, _ = writing_commands(store, tmp_path, tmp_path / "notes.zarr")
    assert "neither empty nor a store" in error_of(*of_stores[name], code=2)
    (tmp_path / "file.zarr").write_text("mine")
    of_stores, _ = writing_commands(store, tmp_path, tmp_path / "file.zarr")
    assert "exists and is not a folder" in error_of(*of_stores[name], code=2)
    of_stores, _ = writing_commands(store, tmp_path, tmp_path / "d.zarr")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert "is not writable" in error_of(*of_stores[name], code=2)
    assert not (tmp_path / "d.zarr").exists() and (tmp_path / "file.zarr").read_text() == "mine"


@pytest.mark.parametrize("name", ["extract", "export", "train", "benchmark"])
def test_the_folder_of_results_is_checked_first(name, store, tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "read_questions", lambda _: [])
    (tmp_path / "file").write_text("mine")
    for destination in (tmp_path / "file.x", tmp_path / "file" / "in" / "d.x"):
        _, of_folders = writing_commands(store, tmp_path, destination)
        assert f"{tmp_path / 'file'} is not a folder" in error_of(*of_folders[name], code=2)
    _, of_folders = writing_commands(store, tmp_path, tmp_path / "new" / "d.x")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert f"the folder {tmp_path} is not writable" in error_of(*of_folders[name], code=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [("merge",), ("subset",), ("export", "pkl"), ("export", "pt-gnn")])
def test_too_little_space_is_reported_before_anything_is_copied(words, store, tmp_path, monkeypatch):
    name, *options = words
    words = [name, store, tmp_path / "d"]
    words += ["--segments", "0"] if name == "subset" else ["--format", *options] if options else []
    monkeypatch.setattr(transfer, "_whole_segments", lambda *_: {})  # Links need no space.
    monkeypatch.setattr(fsio, "free_bytes", lambda _: 1000)
    error = error_of(*words, code=4)
    assert "of 6 traces needs at least " in error and "1,000 are free" in error
    assert not (tmp_path / "d").exists() or not any((tmp_path / "d").iterdir())


def test_the_bytes_of_large_arrays_are_those_of_the_store(store):
    with tracestore.open(store) as opened:
        sizes = large_array_bytes(opened, np.arange(6))
        assert sizes.tolist() == [t.hidden_states.nbytes + t.attention_packed.nbytes for t in opened]


def test_a_merge_needs_space_for_new_traces_only(store, tmp_path, monkeypatch):
    monkeypatch.setattr(fsio, "free_bytes", lambda _: tracestore.open(store).info()["bytes"])
    command("merge", store, store, tmp_path / "d.zarr", check=0)
    monkeypatch.setattr(fsio, "free_bytes", lambda _: 1000)
    assert "0 traces added, 6 in all; 6 duplicates" in command("merge", store, tmp_path / "d.zarr", check=0).stdout


def test_a_conversion_compares_free_space_with_the_size_of_the_sources(tmp_path, monkeypatch):
    path = write_pickle(tmp_path / "t.pkl", make_traces(6, tokens=9))
    monkeypatch.setattr(fsio, "free_bytes", lambda _: path.stat().st_size // 300)
    assert "the store needs at least " in error_of("convert", path, tmp_path / "s.zarr", code=4)
    assert not (tmp_path / "s.zarr").exists()
    monkeypatch.setattr(fsio, "free_bytes", lambda _: path.stat().st_size // 2)
    assert "the disk may be too small" in convert(path, tmp_path / "s.zarr").stdout
    monkeypatch.setattr(fsio, "free_bytes", lambda _: 1)
    assert "1 file already in the store" in convert(path, tmp_path / "s.zarr").stdout
