"""Replacing a store: the old store stays until the new one is complete."""

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, make_traces, segment_of, tree_digest, write_pickle
from tracestore.store.io import replacement
from tracestore.store.maintain.verify import verify_store


def test_overwrite_keeps_the_store_until_all_sources_are_accepted(store_path, tmp_path):
    before = tree_digest(store_path)
    write_pickle(tmp_path / "new/a.pkl", make_traces(2))
    (tmp_path / "new/b.pkl").write_bytes(b"not a pickle")
    convert(tmp_path / "new", store_path, "--overwrite", check=3)
    assert tree_digest(store_path) == before
    unfinished = tmp_path / ".tmp-store.zarr"
    name = segment_of(unfinished)
    inode = (unfinished / name).stat().st_ino
    (tmp_path / "new/b.pkl").unlink()
    convert(tmp_path / "new", store_path, "--overwrite")
    assert len(tracestore.open(store_path)) == 2 and not unfinished.exists()
    assert (store_path / name).stat().st_ino == inode, "converted files are reused"
    assert not verify_store(store_path).damaged and not verify_store(store_path).leftovers


def test_leftovers_of_an_overwrite_with_other_sources_are_not_used(store_path, tmp_path):
    bad = tmp_path / "bad"
    write_pickle(bad / "a.pkl", make_traces(2))
    (bad / "b.pkl").write_bytes(b"not a pickle")
    convert(bad, store_path, "--overwrite", check=3)
    other = write_pickle(tmp_path / "other.pkl", [t | {"question_id": f"o{k}"} for k, t in enumerate(make_traces(3))])
    convert(other, store_path, "--overwrite")
    assert tracestore.open(store_path).question_ids == ["o0", "o1", "o2"]


@pytest.mark.parametrize("fails_at", ["exchange", "after", "without exchange"])
def test_an_interrupt_leaves_one_of_the_two_stores(store_path, source, monkeypatch, tmp_path, fails_at):
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


def test_a_reader_of_the_old_store_continues(store_path, source):
    with tracestore.open(store_path) as opened:
        expected = opened[3].hidden_states.copy()
        convert(source, store_path, "--overwrite")
        assert np.array_equal(opened[3].hidden_states, expected) and len(opened) == 12


def test_an_exception_in_the_block_replaces_nothing(store_path):
    before = tree_digest(store_path)
    with pytest.raises(ZeroDivisionError), tracestore.create(store_path, overwrite=True) as writer:
        writer.append(make_traces(1)[0])
        raise ZeroDivisionError
    assert tree_digest(store_path) == before and not (store_path.parent / ".tmp-store.zarr").exists()


def test_a_creation_that_was_killed_is_continued(tmp_path, source):
    store = tmp_path / "s.zarr"
    store.mkdir()
    (store / "lock").touch()
    (store / ".tmp-0123456789abcdef/00000001").mkdir(parents=True)
    (store / ".tmp-0123456789abcdef/small").write_bytes(b"{")
    convert(source, store)
    assert not verify_store(store).leftovers and len(tracestore.open(store)) == 1
