"""Untrusted stores do no harm, and commands do not change files that are not part of a store."""

import hashlib
import json
import os
import pickle
import random
import struct
import subprocess
import sys

import numpy as np
import pytest

import tracestore
from tests.helpers import ROOT, command, convert, make_traces, write_pickle, write_scores
from tests.malicious_inputs.stores import Store, valid_stores
from tracestore.errors import CorruptStoreError, TracestoreError, UsageError
from tracestore.extract.questions import Question
from tracestore.extract.run import extract_to_store
from tracestore.store.format.codecs import ChunkCodec
from tracestore.store.format.entries import FileEntry
from tracestore.store.format.mapped_arrays import pack_arrays
from tracestore.store.format.ragged import encode_strings
from tracestore.store.io import replacement
from tracestore.store.io.files import LocalFiles
from tracestore.store.maintain.verify import verify_store


def digest(folder):
    """Return a hash of a tree: names, kinds, targets of links, and bytes."""
    found = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.update(f"{path.relative_to(folder)}\0{status.st_mode}\0".encode())
        if path.is_symlink():
            found.update(os.readlink(path).encode())
        elif path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


def refused(*words, code):
    done = command(*words, check=code)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.fixture
def store_path(store_path):
    """A store with one generation, so that a reader has no predecessor to fall back to."""
    for name in sorted(os.listdir(store_path / "manifest"))[:-1]:
        (store_path / "manifest" / name).unlink()
    return store_path


@pytest.fixture
def source(tmp_path):
    return write_pickle(tmp_path / "more.pkl", [t | {"question_id": "new"} for t in make_traces(1)])


# Names


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "segments/../../x", "segments/00000000/evil.pth", "index/0000000001/part\n", "zarr.json", "",
     "segments/00000000/hidden_states/c/0/0/0/0", "segments/0/num_tokens/c/0", None, 7],
)  # fmt: skip
def test_no_entry_has_another_name(path):
    with pytest.raises(CorruptStoreError, match="not a valid path"):
        FileEntry(path, 1, 1)


def test_a_name_in_the_index_leads_nowhere_else(store_path, tmp_path):
    store = Store(store_path)
    arrays = store.part(0)
    count = len(arrays["file_size"])
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    arrays["file_path"], arrays["file_path_offsets"] = encode_strings([str(outside)] * count)
    store.set_part(0, pack_arrays(arrays))
    store.seal()
    with tracestore.open(store_path) as opened, pytest.raises(CorruptStoreError, match="not a valid path"):
        _ = opened[0].hidden_states
    assert "not a valid path" in command("verify", store_path, check=3).stderr


# Files


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "device"])
@pytest.mark.parametrize(
    "name", ["segments/00000000/hidden_states/c/0/0", "columns", "manifest/0000000002", "zarr.json"]
)
def test_only_regular_files_are_opened(store_path, source, tmp_path, kind, name):
    path, kept = store_path / name, tmp_path / "kept"
    os.rename(path, kept)
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        if os.geteuid() != 0:
            pytest.skip("only root makes devices")
        os.mknod(path, 0o20666, os.makedev(1, 5))
    before = digest(kept) if kept.is_dir() else kept.read_bytes()
    command("info", store_path)
    done = command("verify", store_path)
    assert done.returncode in (2, 3)
    for words in (
        ["score", store_path, "--scores", write_scores(tmp_path / "s.csv", {"q1": 0.5})],
        ["convert", source, store_path],
    ):
        assert command(*words).returncode in (0, 2, 3)
    assert before == (digest(kept) if kept.is_dir() else kept.read_bytes())
    if kind == "link":
        assert "cp -rL" in done.stdout + done.stderr


# Bytes


def test_headers_of_chunks_that_lie():
    """No death, and nothing of what lay in memory before."""
    rng = random.Random(0)
    values = np.arange(4096, dtype="<u2")
    for name in ("blosc-zstd", "blosc-lz4", "zstd"):
        codec = ChunkCodec(name, 2)
        good = bytes(codec.encode(values.tobytes()))
        assert codec.decode(good, values.nbytes).tobytes() == values.tobytes()
        for size in (0, 1, values.nbytes - 1, values.nbytes + 1, 1 << 40):
            with pytest.raises(ValueError):
                codec.decode(good, min(size, 1 << 20))
        for _ in range(3000):
            data = bytearray(good)
            for _ in range(rng.choice([1, 2, 4])):
                at = rng.randrange(rng.choice([20, len(data)]))
                data[at] = rng.randrange(256)
            try:
                found = codec.decode(bytes(data), values.nbytes)
            except ValueError:
                continue
            assert found.nbytes == values.nbytes


def test_a_zstd_bomb_takes_no_memory():
    from numcodecs import Zstd

    bomb = bytes(Zstd(level=3).encode(np.zeros(1 << 28, "u1")))
    with pytest.raises(ValueError, match="expected 65536"):
        ChunkCodec("zstd", 2).decode(bomb, 65536)
    # The same without a size in its header, as a stream is written.
    with pytest.raises(ValueError, match="does not state its size"):
        ChunkCodec("zstd", 2).decode(b"\x28\xb5\x2f\xfd\x00\x58" + bomb[10:], 65536)


def test_edges_stay_in_their_graphs(tmp_path):
    (edges,) = (p for p in valid_stores(tmp_path) if p.stem == "edges")
    store = Store(edges)
    name = "segments/00000000/edge_index/c/0/0"
    data = bytearray((edges / name).read_bytes())
    struct.pack_into("<i", data, 0, 10**6)
    store.write(name, bytes(data))
    store.reseal()
    store.seal()
    with tracestore.open(edges) as opened:
        with pytest.raises(CorruptStoreError, match="edge leaves its graph"):
            list(tracestore.TraceLoader(opened, view="graph", batch_size=2))
        with pytest.raises(CorruptStoreError):
            _ = opened[0].attention
    assert "edge_index: row 0: an edge leaves its graph" in command("verify", edges, check=3).stderr
    refused("export", edges, tmp_path / "out", "--format", "pt-gnn", code=3)


def test_values_of_manifest_and_index_out_of_range(store_path):
    """The least and the largest of each number, and other types."""
    original = Store(store_path).manifest
    for name in ("num_traces", "num_tokens", "generation", "num_scored", "index", "columns", "fields", "attributes"):
        for value in (-1, 2**63, 10**400, 0.5, None, "x", [], [[]], {}):
            if value == original[name] or (name, value) == ("fields", []):
                continue
            store = Store(store_path)
            store.manifest = original | {name: value}
            store.seal()
            with pytest.raises(TracestoreError):
                tracestore.open(store_path).close()
                assert verify_store(store_path).damaged
                raise CorruptStoreError("found by verify")
    store.manifest = original
    store.seal()
    assert not verify_store(store_path).damaged


def test_metadata_says_what_the_format_says(store_path):
    """In any order of keys, with any blanks, and nothing else."""
    store, name = Store(store_path), "segments/00000000/hidden_states/zarr.json"
    document = json.loads((store_path / name).read_text())
    store.write(name, json.dumps(dict(reversed(document.items()))).encode())
    store.reseal()
    store.seal()
    assert not verify_store(store_path).damaged
    for change in ({"data_type": "object"}, {"fill_value": 7}, {"shape": [2**40, 8]}, {"more": 1}):
        store.write(name, json.dumps(document | change).encode())
        store.reseal()
        store.seal()
        with tracestore.open(store_path) as opened, pytest.raises(CorruptStoreError, match=r"hidden_states/zarr\.json"):
            _ = opened[0].hidden_states
        assert list(verify_store(store_path).damaged) == ["segments/00000000/hidden_states/zarr.json"]


# What is not a store


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
    "spool": lambda f: _user_files(f, ".spool/00000000"),
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
    "link named lock": lambda f: (f / "lock").symlink_to("/etc/hostname"),
    "fifo": lambda f: os.mkfifo(f / "manifest"),
    "fifo zarr.json": lambda f: os.mkfifo(f / "zarr.json"),
    "deep": lambda f: _user_files(f, "a/b/c/d/e"),
    "odd names": lambda f: _user_files(f, "a\nb", " ", "é"),
}


def _no_answer(questions):
    raise AssertionError("a model was asked before the folder was examined")


@pytest.mark.parametrize("kind", NOT_STORES)
def test_what_is_no_store_is_left_alone(store_path, source, tmp_path, kind):
    folder = tmp_path / "theirs"
    folder.mkdir()
    NOT_STORES[kind](folder)
    before = digest(folder)
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
        assert digest(folder) == before, words
        assert done.stderr.count("\n") == 1 or words[0] == "verify"
    with pytest.raises(UsageError):
        list(extract_to_store(folder, [Question("q", "?", ("a",))], _no_answer, attention="mean"))
    assert digest(folder) == before, "extract"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["more.pkl", "s.csv", "store.zarr", "theirs"]


def test_a_store_with_a_file_of_the_user(store_path, source):
    """The file stays, and the error names it. Files of file managers are ignored."""
    _user_files(store_path, "notes.txt")
    before = digest(store_path)
    assert "notes.txt" in refused("convert", source, store_path, code=2)
    assert "notes.txt" in refused("convert", source, store_path, "--overwrite", code=2)
    assert digest(store_path) == before
    os.rename(store_path / "notes.txt", store_path / ".DS_Store")
    convert(source, store_path)
    _user_files(store_path, "segments/00000000/notes.txt")
    convert(source, store_path, "--overwrite")
    assert len(tracestore.open(store_path)) == 1
    left = list(store_path.parent.rglob("notes.txt"))
    assert [p.read_text() for p in left] == ["of the user: segments/00000000/notes.txt"]


# Replacing a store


def test_overwrite_keeps_the_store_until_all_is_accepted(store_path, tmp_path):
    before = digest(store_path)
    (tmp_path / "new").mkdir()
    write_pickle(tmp_path / "new/a.pkl", make_traces(2))
    (tmp_path / "new/b.pkl").write_bytes(b"not a pickle")
    convert(tmp_path / "new", store_path, "--overwrite", check=3)
    assert digest(store_path) == before, "the first source was accepted, the second was not"
    half = tmp_path / ".tmp-store.zarr"
    assert half.is_dir()
    segment = half / "segments/00000000"
    kept = segment.stat().st_ino
    (tmp_path / "new/b.pkl").unlink()
    convert(tmp_path / "new", store_path, "--overwrite")
    assert len(tracestore.open(store_path)) == 2 and not half.exists()
    assert (store_path / "segments/00000000").stat().st_ino == kept, "what was converted is used"
    assert not verify_store(store_path).damaged and not verify_store(store_path).leftovers


def test_what_a_stopped_overwrite_left_of_other_sources_is_not_used(store_path, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    write_pickle(bad / "a.pkl", make_traces(2))
    (bad / "b.pkl").write_bytes(b"not a pickle")
    convert(bad, store_path, "--overwrite", check=3)
    other = write_pickle(tmp_path / "other.pkl", [t | {"question_id": f"o{k}"} for k, t in enumerate(make_traces(3))])
    convert(other, store_path, "--overwrite")
    assert tracestore.open(store_path).question_ids == ["o0", "o1", "o2"]


@pytest.mark.parametrize("fails_at", ["exchange", "after", "without exchange"])
def test_a_stop_leaves_one_of_the_two_stores(store_path, source, monkeypatch, tmp_path, fails_at):
    def stop(*_, **__):
        raise KeyboardInterrupt

    if fails_at == "without exchange":
        monkeypatch.setattr(replacement, "exchange", lambda *_: False)
    else:
        if fails_at == "exchange":
            monkeypatch.setattr(replacement, "exchange", stop)
        with pytest.raises(KeyboardInterrupt), tracestore.create(store_path, overwrite=True) as writer:
            if fails_at == "after":
                monkeypatch.setattr(replacement, "remove_contents", stop)
            writer.append(make_traces(1)[0])
        assert len(tracestore.open(store_path)) == (12 if fails_at == "exchange" else 1)
        monkeypatch.undo()
    convert(source, store_path, "--overwrite")
    assert len(tracestore.open(store_path)) == 1 and not verify_store(store_path).damaged
    assert sorted(p.name for p in tmp_path.iterdir()) == ["more.pkl", "store.zarr"]


def test_a_reader_beside_an_overwrite_goes_on(store_path, source):
    with tracestore.open(store_path) as opened:
        expected = opened[3].hidden_states.copy()
        convert(source, store_path, "--overwrite")
        assert np.array_equal(opened[3].hidden_states, expected) and len(opened) == 12


def test_a_program_that_fails_replaces_nothing(store_path):
    before = digest(store_path)
    with pytest.raises(ZeroDivisionError), tracestore.create(store_path, overwrite=True) as writer:
        writer.append(make_traces(1)[0])
        raise ZeroDivisionError
    assert digest(store_path) == before and not (store_path.parent / ".tmp-store.zarr").exists()


def test_a_killed_creation_is_continued(tmp_path, source):
    store = tmp_path / "s.zarr"
    store.mkdir()
    (store / "lock").touch()
    (store / ".tmp-zarr.json").write_bytes(b"{")
    convert(source, store)
    assert not verify_store(store).leftovers and len(tracestore.open(store)) == 1


# Leaving


def test_nothing_is_said_at_the_end_of_the_interpreter(store_path):
    code = "import sys, tracestore; store = tracestore.open(sys.argv[1]); trace = store[0]; sys.modules['keep'] = store"
    done = subprocess.run(
        [sys.executable, "-c", code, store_path], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stderr == ""


def test_a_pickled_store_still_opens(store_path):
    with tracestore.open(store_path) as opened:
        assert len(pickle.loads(pickle.dumps(opened))) == 12


def test_local_files_read_no_more_than_they_should(store_path):
    files = LocalFiles(store_path)
    with pytest.raises(CorruptStoreError, match="expected at most 10"):
        files.read_small("zarr.json", 10)
    with pytest.raises(FileNotFoundError):
        files.read_small("manifest/0000000099", 10)
