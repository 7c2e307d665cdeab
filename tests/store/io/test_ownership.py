"""Commands do not change folders that are not stores, nor files in a store that tracestore did not write."""

import os

import pytest

import tracestore
from tests.helpers import command, convert, error_of, segment_of, tree_digest, write_scores
from tracestore.errors import UsageError
from tracestore.extract.extraction import extract_to_store
from tracestore.extract.questions import Question


def _user_files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"of the user: {name}")


NOT_STORES = {
    "text": lambda f: _user_files(f, "notes.txt"),
    "hidden": lambda f: _user_files(f, ".config"),
    "empty zarr.json": lambda f: (f / "zarr.json").touch(),
    "foreign zarr.json": lambda f: (f / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}'),
    "foreign array": lambda f: (f / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array", "shape": [1]}'),
    "zarr 2": lambda f: (f / ".zgroup").write_text('{"zarr_format": 2}'),
    "lock with text": lambda f: _user_files(f, "lock"),
    "lock and more": lambda f: _user_files(f, "lock", "index/important"),
    "lock folder": lambda f: (f / "lock").mkdir(),
    "manifest": lambda f: _user_files(f, "manifest/page"),
    "empty manifest": lambda f: (f / "manifest").mkdir(),
    "manifest of ships": lambda f: _user_files(f, "manifest/0000000001"),
    "index": lambda f: _user_files(f, "index/a"),
    "columns": lambda f: _user_files(f, "columns/b"),
    "segments": lambda f: _user_files(f, "segments/00000000/x"),
    "all names": lambda f: _user_files(f, "manifest/a", "index/b", "columns/c", "segments/d", "lock", "zarr.json"),
    "temporary": lambda f: _user_files(f, ".tmp-zarr.json.txt"),
    "home": lambda f: _user_files(f, ".bashrc", "documents/thesis.tex", "Downloads/a.pdf"),
    "git": lambda f: _user_files(f, ".git/HEAD", ".git/config", "README.md"),
    "git index": lambda f: _user_files(f, ".git/index", "index/index.html", "manifest/app.json"),
    "python": lambda f: _user_files(f, "setup.py", "package/__init__.py"),
    "results": lambda f: _user_files(f, "results.json", "lstm_solo/best.pt"),
    "traces": lambda f: _user_files(f, "batch_0000.pkl", "scores.csv"),
    "link to nothing": lambda f: (f / "columns").symlink_to("nowhere"),
    "link to folder": lambda f: (f / "segments").symlink_to(f.parent),
    "link loop": lambda f: (f / "index").symlink_to("index"),
    "link named as a temporary folder": lambda f: (f / ".tmp-0123456789abcdef").symlink_to(f.parent),
    "link named lock": lambda f: (f / "lock").symlink_to("/etc/hostname"),
    "fifo": lambda f: os.mkfifo(f / "manifest"),
    "fifo zarr.json": lambda f: os.mkfifo(f / "zarr.json"),
    "deep": lambda f: _user_files(f, "a/b/c/d/e"),
    "odd names": lambda f: _user_files(f, "a\nb", " ", "é"),
}


def _no_answer(questions):
    raise AssertionError("a model was asked before the folder was examined")


@pytest.mark.parametrize("kind", NOT_STORES)
def test_a_folder_that_is_not_a_store_is_not_changed(store_path, source, tmp_path, kind):
    folder = tmp_path / "theirs"
    folder.mkdir()
    NOT_STORES[kind](folder)
    before = tree_digest(folder)
    scores = write_scores(tmp_path / "s.csv", {"q1": 0.5})
    for words in (
        ["convert", source, folder],
        ["convert", source, folder, "--overwrite"],
        ["merge", store_path, folder],
        ["merge", store_path, folder, "--overwrite"],
        ["subset", store_path, folder, "--segments", "0"],
        ["score", folder, "--scores", scores],
        ["verify", folder],
        ["verify", folder, "--repair"],
    ):
        done = command(*words)
        assert done.returncode in ((2, 3) if words[0] == "verify" else (2,)), (words, done.stderr)
        assert tree_digest(folder) == before, words
        assert done.stderr.count("\n") == 1 or words[0] == "verify", words
    with pytest.raises(UsageError):
        list(extract_to_store(folder, [Question("q", "?", ("a",))], _no_answer, attention="mean"))
    assert tree_digest(folder) == before, "extract"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["more.pkl", "s.csv", "store.zarr", "theirs"]


def test_a_file_of_the_user_in_a_store_is_kept(store_path, source):
    """The file stays, and the error names it. Files of file managers are ignored."""
    _user_files(store_path, "notes.txt")
    before = tree_digest(store_path)
    assert "notes.txt" in error_of("convert", source, store_path, code=2)
    assert "notes.txt" in error_of("convert", source, store_path, "--overwrite", code=2)
    assert tree_digest(store_path) == before
    os.rename(store_path / "notes.txt", store_path / ".DS_Store")
    convert(source, store_path)
    name = f"{segment_of(store_path)}/notes.txt"
    _user_files(store_path, name)
    convert(source, store_path, "--overwrite")
    assert len(tracestore.open(store_path)) == 1
    left = list(store_path.parent.rglob("notes.txt"))
    assert [p.read_text() for p in left] == [f"of the user: {name}"]
