"""Provenance in `tracestore convert`, `merge` and `subset`: files, conflicts and permission."""

import json

import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_traces, tree_bytes, write_pickle, write_store

FLAG = "--allow-mixed-provenance"


def write_folder(folder, traces, provenance=None):
    write_pickle(folder / "t.pkl", traces)
    if provenance is not None:
        (folder / "provenance.json").write_text(json.dumps(provenance))
    return folder


def models(path):
    with tracestore.open(path) as store:
        return [None if t.provenance is None else t.provenance.model for t in store]


@pytest.fixture
def folders(tmp_path):
    """Folders a and b of two models, and c without a provenance."""
    traces = make_traces(6)
    values = ({"model": "a", "layer_ids": [1, 2, 3]}, {"model": "b"}, None)
    return [
        write_folder(tmp_path / name, traces[2 * k : 2 * k + 2], value)
        for k, (name, value) in enumerate(zip("abc", values, strict=True))
    ]


def test_the_file_of_a_folder_is_used_for_its_sources(folders, tmp_path):
    a, _, c = folders
    done = convert(a, c, tmp_path / "s.zarr")
    assert f"provenance: {a / 'provenance.json'}, model a\n" in done.stdout
    assert models(tmp_path / "s.zarr") == ["a", "a", None, None]
    before = tree_bytes(tmp_path / "s.zarr")
    convert(a, c, tmp_path / "s.zarr")
    assert tree_bytes(tmp_path / "s.zarr") == before


def test_a_given_file_replaces_those_of_the_folders(folders, tmp_path):
    (tmp_path / "p.json").write_text('{"model": "given", "final_norm": null}')
    done = convert(*folders, tmp_path / "s.zarr", "--provenance", tmp_path / "p.json", "--overwrite")
    assert done.stdout.count("provenance: ") == 1 and models(tmp_path / "s.zarr") == ["given"] * 6


def test_conflicts_need_permission(folders, tmp_path):
    a, b, _ = folders
    store = tmp_path / "s.zarr"
    message = error_of("convert", a, b, store, code=2)
    assert "model: found b, expected a" in message and FLAG in message and not store.exists()
    convert(a, store)
    before = tree_bytes(store)
    assert f"{store}: other provenance: model: found b" in error_of("convert", b, store, code=2)
    assert tree_bytes(store) == before
    convert(b, store, FLAG)
    assert models(store) == ["a", "a", "b", "b"]


def test_a_begun_replacement_of_another_provenance_is_dropped(folders, tmp_path, monkeypatch):
    from tracestore.store.write.writer import StoreWriter

    store = tmp_path / "s.zarr"
    convert(folders[2], store)
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "replace_existing", lambda writer: 1 / 0)
        convert(folders[0], store, "--overwrite", check=1)
    assert models(store) == [None, None]
    (folders[0] / "provenance.json").write_text('{"model": "corrected"}')
    convert(folders[0], store, "--overwrite")
    assert models(store) == ["corrected"] * 2


@pytest.mark.parametrize("text", ["", "[1", "[]", '{"model": 1}', '{"name": "a"}', "{" * 100000, '{"model": NaN}'])
def test_a_bad_file_is_one_line(folders, tmp_path, text):
    path = folders[0] / "provenance.json"
    path.write_text(text)
    assert str(path) in error_of("convert", folders[0], tmp_path / "s.zarr", code=2)
    assert not (tmp_path / "s.zarr").exists()
    path.unlink()
    missing = error_of("convert", folders[0], tmp_path / "s.zarr", "--provenance", path, code=2)
    assert f"{path}: No such file" in missing


def test_layers_that_do_not_fit_are_one_line(folders, tmp_path):
    (folders[0] / "provenance.json").write_text('{"layer_ids": [1, 2]}')
    message = error_of("convert", folders[0], tmp_path / "s.zarr", code=3)
    assert "t.pkl, trace 0, provenance: found 2 layer_ids, expected 3" in message


@pytest.fixture
def stores(tmp_path):
    """Stores a and b of two models, c without a provenance."""
    traces, paths = make_traces(6), [tmp_path / f"{name}.zarr" for name in "abc"]
    for k, (path, value) in enumerate(zip(paths, ({"model": "a"}, {"model": "b"}, None), strict=True)):
        write_store(path, traces[2 * k : 2 * k + 2], provenance=value)
    return paths


def test_merge_and_subset_keep_the_provenance_of_each_source(stores, tmp_path):
    a, b, c = stores
    merged = tmp_path / "m.zarr"
    command("merge", a, c, merged, check=0)
    assert models(merged) == ["a", "a", None, None]
    message = error_of("merge", b, merged, code=2)
    assert message.count(f"{b}: other provenance: model: found b, expected a; {FLAG}") == 1
    assert "found b" in error_of("merge", a, b, tmp_path / "n.zarr", code=2) and not (tmp_path / "n.zarr").exists()
    command("merge", b, merged, FLAG, check=0)
    assert models(merged) == ["a", "a", None, None, "b", "b"]
    for path in (a, merged):
        command("export", path, tmp_path / f"{path.stem}_files", check=0)
    assert json.loads((tmp_path / "a_files/provenance.json").read_text())["model"] == "a"
    assert not (tmp_path / "m_files/provenance.json").exists()  # The traces of c are of an unknown model.
    # A copy of a mixed store, or of the traces of one model, needs no permission.
    command("merge", merged, tmp_path / "copy.zarr", check=0)
    assert models(tmp_path / "copy.zarr") == models(merged)
    (tmp_path / "ids").write_text("q2\nq3\n")
    command("subset", merged, "--ids", tmp_path / "ids", tmp_path / "only_b.zarr", check=0)
    command("subset", merged, "--ids", tmp_path / "ids", b, check=0)
    with tracestore.open(tmp_path / "only_b.zarr") as store:
        assert [p.model for p in store.provenance] == ["b"]
    words = ("subset", merged, "--ids", tmp_path / "ids", a)
    assert "found b, expected a" in error_of(*words, code=2)
    command(*words, FLAG, check=0)
    assert models(a) == ["a", "a", "b", "b"]


def test_a_provenance_that_comes_later_is_reported(tmp_path):
    """The store has the files, whose traces are not read again."""
    write_pickle(tmp_path / "data" / "a.pkl", make_traces(1))
    for name, text in (("s", "{}"), ("t", '{"model": "m"}')):
        (tmp_path / "data" / "provenance.json").write_text(text)
        convert(tmp_path / "data", tmp_path / f"{name}.zarr")
        assert "stays" not in convert(tmp_path / "data", tmp_path / f"{name}.zarr").stdout
    done = convert(tmp_path / "data", tmp_path / "s.zarr")
    assert "a.pkl: the store has another provenance, which stays; --overwrite replaces it" in done.stdout
    assert models(tmp_path / "s.zarr") == [None]
    (tmp_path / "data" / "provenance.json").unlink()
    assert "which stays" not in convert(tmp_path / "data", tmp_path / "t.zarr").stdout
