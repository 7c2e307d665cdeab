"""Verification finds every flipped bit and names its file, and repair replaces a damaged manifest.

A damaged manifest loses no trace that the sources or the previous manifest hold.
"""

import os
import random
import re
import shutil
from functools import partial

import pytest

import tracestore
from tests.fault_injection.conftest import make_data, select_shard
from tests.fault_injection.driver import run_convert, small_commits
from tests.helpers import make_traces, read_all, tree_bytes, write_store
from tracestore.errors import CorruptStoreError, TracestoreWarning
from tracestore.store.maintain.clean import clean_store
from tracestore.store.maintain.verify import repair_store, verify_store

FLIPS = int(os.environ.get("TRACESTORE_FLIPS", "300"))


def make_store(path, codec):
    """Write a store of several segments and generations whose files are writable."""
    write_store(
        path, make_traces(14, tokens=lambda k: 3 + k, dim=16), score=lambda k: None if k % 3 else k / 10,
        group=lambda k: "ab"[k % 2], commit_after=(3, 5, 6, 9), codec=codec,
    )  # fmt: skip
    for file in path.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
    return path


def flip(path, position, bit):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_verify_finds_every_flipped_bit(memory_folder, codec):
    store = make_store(memory_folder / f"flips_{codec}.zarr", codec)
    files = [p for p in sorted(store.rglob("*")) if p.is_file() and p.name != "lock"]
    sizes = [p.stat().st_size for p in files]
    for number in select_shard(range(FLIPS // 2)):
        rng = random.Random(f"{codec} {number}")
        # Half of the flips are uniform over bytes, half over files, so that small files are covered.
        (path,) = rng.choices(files, sizes) if number % 2 else rng.choices(files)
        position, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        flip(path, position, bit)
        damaged = verify_store(store, num_threads=1).damaged
        name = path.relative_to(store).as_posix()
        assert list(damaged) == [name], f"flip {number}: {name}, byte {position}, bit {bit}: {damaged}"
        flip(path, position, bit)
    assert verify_store(store).damaged == {} and verify_store(store, quick=True).damaged == {}
    print(f"{codec}: {FLIPS // 2} flips in {len(files)} files of {sum(sizes):,} bytes")


@pytest.mark.long
@pytest.mark.parametrize("damage", ["flip", "empty", "half"])
def test_repair_of_a_damaged_newest_manifest(memory_folder, monkeypatch, capsys, damage):
    small_commits(monkeypatch)
    folder = memory_folder / f"manifest_{damage}"
    folder.mkdir()
    data, store = make_data(folder / "data", num_files=3), folder / "s.zarr"
    assert run_convert([data, store]) == 0
    expected, newest = tree_bytes(store), max((store / "manifest").iterdir())
    with tracestore.open(store) as opened:
        truth = read_all(opened)
    newest.chmod(0o644)
    size, rng = newest.stat().st_size, random.Random(0)
    for _ in range(max(1, FLIPS // 30) if damage == "flip" else 1):
        if damage == "flip":
            flip(newest, rng.randrange(size), rng.randrange(8))
        else:
            os.truncate(newest, 0 if damage == "empty" else size // 2)
        with pytest.warns(TracestoreWarning, match="reading generation 2"), tracestore.open(store) as opened:
            assert read_all(opened) == truth[:4]
        capsys.readouterr()
        assert run_convert([data, store]) == 3
        assert f"tracestore verify {store} --repair" in capsys.readouterr().err
        report = repair_store(store)
        assert report.damaged == {} and any("restored from its copy" in line for line in report.repaired)
        assert any("generation 3 with 6 traces" in line for line in report.repaired)
        assert tree_bytes(store) == expected
        newest.chmod(0o644)
    # With the copy damaged as well, repair keeps the previous manifest; converting again adds the rest.
    for path in (newest, store / "index" / f"{newest.name}.manifest"):
        path.chmod(0o644)
        os.truncate(path, 10)
    report = repair_store(store)
    assert report.damaged == {} and any("set aside" in line for line in report.repaired)
    assert any("generation 2 with 4 traces" in line for line in report.repaired)
    assert run_convert([data, store]) == 0
    (aside,) = (store / "manifest").glob("damaged-*")
    aside.unlink()
    assert tree_bytes(store) == expected


def require_refusal(store, name, copy):
    """Assert that verification names a manifest that only has its copy, and that what removes files refuses."""
    before = tree_bytes(store)
    reason = f"missing, but its copy {copy} exists (tracestore verify {store} --repair restores it)"
    assert verify_store(store).damaged == verify_store(store, quick=True).damaged == {name: reason}
    calls = [partial(clean_store, older_than_s=0, dry_run=dry_run) for dry_run in (False, True)]
    for call in (*calls, partial(tracestore.create, append=True)):
        with pytest.raises(CorruptStoreError, match=re.escape(f"{name}: {reason}")):
            call(store)
    assert tree_bytes(store) == before


def test_a_lost_newest_manifest_is_restored_from_its_copy(memory_folder):
    """The copy proves the commit, of which nothing else may be removed until then."""
    store = make_store(memory_folder / "lost.zarr", "none")
    expected, newest = tree_bytes(store), max((store / "manifest").iterdir())
    newest.unlink()
    message = "missing, but its copy .* --repair restores it.; reading generation 4 instead"
    with pytest.warns(TracestoreWarning, match=message), tracestore.open(store) as opened:
        assert len(opened) == 10
        require_refusal(store, f"manifest/{newest.name}", f"index/{newest.name}.manifest")
        report = repair_store(store)
    assert report.damaged == {} and report.repaired[0] == f"manifest/{newest.name} restored from its copy: missing"
    assert tree_bytes(store) == expected
    assert clean_store(store, older_than_s=0).removed == []


def test_a_store_that_has_lost_all_manifests_is_not_an_empty_one(memory_folder):
    store = make_store(memory_folder / "no_manifests.zarr", "none")
    before = tree_bytes(store)
    shutil.rmtree(store / "manifest")
    for call in (tracestore.open, verify_store, lambda path: tracestore.create(path, append=True)):
        with pytest.raises(CorruptStoreError, match=r"missing, but its copy .* --repair restores it"):
            call(store)
    assert repair_store(store).damaged == {}
    with tracestore.open(store) as opened:
        assert len(opened) == 14
    after = tree_bytes(store)
    assert [path for path, data in before.items() if after.get(path) != data] == ["manifest/0000000004"]
    with tracestore.create(store, overwrite=True) as writer:
        writer.append(make_traces(1)[0])
    assert verify_store(store).damaged == {}


def test_a_damaged_copy_of_a_lost_manifest_is_set_aside(memory_folder):
    store = make_store(memory_folder / "no_copy.zarr", "none")
    newest = max((store / "manifest").iterdir())
    copy = store / "index" / f"{newest.name}.manifest"
    newest.unlink()
    os.truncate(copy, 10)
    require_refusal(store, f"manifest/{newest.name}", f"index/{copy.name}")
    report = repair_store(store)
    assert report.damaged == {} and report.repaired[0] == f"index/{copy.name} set aside: no manifest"
    assert [path.name for path in (store / "manifest").glob("damaged-*")] == [f"damaged-{newest.name}"]
    with tracestore.open(store) as opened:
        assert len(opened) == 10
    with tracestore.create(store, append=True) as writer:
        for trace in make_traces(14, tokens=lambda k: 3 + k, dim=16)[10:]:
            writer.append(trace)
    clean_store(store, older_than_s=0)
    assert (
        verify_store(store).damaged == {} and newest.exists() and (store / f"manifest/damaged-{newest.name}").exists()
    )


def test_repair_waits_for_readers(memory_folder):
    store = make_store(memory_folder / "pinned.zarr", "none")
    newest = max((store / "manifest").iterdir())
    with tracestore.open(store) as opened:
        os.truncate(newest, 10)
        with pytest.raises(tracestore.StoreLockedError, match="a reader has"):
            repair_store(store)
        assert opened[13].num_tokens == 16
    assert repair_store(store).damaged == {}


def test_repair_refuses_when_no_manifest_is_intact(memory_folder):
    store = make_store(memory_folder / "hopeless.zarr", "none")
    for manifest in [*(store / "manifest").iterdir(), *(store / "index").glob("*.manifest")]:
        os.truncate(manifest, 10)
    before = tree_bytes(store)
    with pytest.raises(CorruptStoreError, match="nothing was changed"):
        repair_store(store)
    assert tree_bytes(store) == before
