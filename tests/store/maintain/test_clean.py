"""Removal of files that no generation names."""

import os
import time

import pytest

import tracestore
from tests.helpers import command, make_traces, segment_of, tree_bytes, write_store
from tracestore.errors import CorruptStoreError, StoreLockedError, UsageError
from tracestore.store.io import locks
from tracestore.store.maintain.clean import clean_store
from tracestore.store.maintain.verify import verify_store
from tracestore.store.write.record import record_from_dict
from tracestore.store.write.writer import StoreWriter

LEFT = ("segments/0123abcd", "index/0000000009-0badcafe.zip", "columns/0000000001.zip", "index/0000000000.manifest",
        ".tmp-0123456789abcdef", ".tmp-zarr.json", "manifest/.tmp-0000000003")  # fmt: skip


def leave(store, age_s=0):
    """Add what stopped writers may have left."""
    files = [store / "segments/0123abcd/rows.zip", store / "segments/0123abcd/hidden_states/c/0/0",
             store / ".tmp-0123456789abcdef/00000001/zarr.json", *(store / name for name in LEFT if "." in name[1:])]  # fmt: skip
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"left")
    for unit in LEFT:
        for path in (store / unit, *(store / unit).rglob("*")):
            os.utime(path, (time.time() - age_s,) * 2)


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    store = write_store(tmp_path / "s.zarr", make_traces(6), commit_after=[1, 3], score=0.5)
    before = tree_bytes(store)
    leave(store, age_s=100)
    with tracestore.open(store):
        assert clean_store(store, older_than_s=200).removed == []
        report = clean_store(store, older_than_s=50, dry_run=True)
        assert sorted(report.removed) == sorted(LEFT) and report.num_bytes == 4 * 8
        assert tree_bytes(store) != before
        assert clean_store(store, older_than_s=50) == report
    assert tree_bytes(store) == before and verify_store(store).leftovers == []
    assert clean_store(store, older_than_s=0).removed == []


def test_files_of_pinned_generations_stay(tmp_path):
    store = tmp_path / "s.zarr"
    with tracestore.create(store) as writer:
        writer.append(make_traces(1)[0])
        writer.flush()
        with tracestore.open(store) as pinned:
            for trace in make_traces(6)[1:]:
                writer.append(trace)
                writer.flush()
            assert clean_store(store, older_than_s=0).removed == []
            assert pinned.generation == 1 and verify_store(store).damaged == {}
            with tracestore.open(store) as newest:
                assert len(newest) == 6


def test_a_running_writer_keeps_its_temporary_folder(tmp_path):
    store = write_store(tmp_path / "s.zarr", make_traces(1))
    with StoreWriter(store) as writer:
        writer.begin_source("a", 1, "a")
        writer.append_packed(writer.pack(record_from_dict(make_traces(2)[1], source_name="a", position=0)))
        assert clean_store(store, older_than_s=0).removed == []
        writer.end_source()
        writer.commit()
    with tracestore.open(store) as opened:
        assert len(opened) == 2


def test_files_of_users_and_damaged_manifests_stay(tmp_path):
    store = write_store(tmp_path / "s.zarr", make_traces(1))
    kept = store / segment_of(store) / "notes.txt"
    kept.write_text("of the user")
    (store / "segments/0123abcd").mkdir()
    (store / "segments/0123abcd/mine.txt").write_text("of the user")
    (store / "manifest/damaged-0000000007").write_text("x")
    before = tree_bytes(store)
    clean_store(store, older_than_s=0)
    assert tree_bytes(store) == before


def test_a_store_whose_files_are_unknown_is_not_cleaned(tmp_path, monkeypatch):
    store = write_store(tmp_path / "s.zarr", make_traces(2), commit_after=[0])
    leave(store, age_s=100)
    lock = locks.WriterLock(store)
    monkeypatch.setattr(locks, "LOCK_WAIT_S", 0.02)
    with pytest.raises(StoreLockedError):
        clean_store(store, older_than_s=0)
    lock.release()
    manifest = store / "manifest/0000000001"
    manifest.chmod(0o644)
    manifest.write_bytes(b"damaged")
    before = tree_bytes(store)
    with pytest.raises(CorruptStoreError, match="--repair"):
        clean_store(store, older_than_s=0)
    assert tree_bytes(store) == before
    with pytest.raises(UsageError, match="no such store"):
        clean_store(tmp_path / "none.zarr", older_than_s=0)


def test_the_command(tmp_path):
    store = write_store(tmp_path / "s.zarr", make_traces(2))
    leave(store, age_s=2 * 24 * 3600)
    before = tree_bytes(store)
    assert "add --force" in command("clean", store, "--older-than", "23h", check=2).stderr
    assert "expected an age" in command("clean", store, "--older-than", "soon", check=2).stderr
    assert "removed 0 unnamed items" in command("clean", store, check=0).stdout
    assert "would remove 7 unnamed items" in command("clean", store, "--older-than", "1d", "--dry-run", check=0).stdout
    assert tree_bytes(store) == before
    assert "segments/0123abcd\n" in command("clean", store, "--older-than", "1d", check=0).stdout
    assert verify_store(store).leftovers == []
    leave(store)
    assert "removed 7" in command("clean", store, "--older-than", "0s", "--force", check=0).stdout
