"""Verification finds every flipped bit and names its file, and repair replaces a damaged manifest.

A damaged manifest loses no trace that the sources or the previous manifest hold.
"""

import os
import random

import pytest

import tracestore
from tests.fault_injection.conftest import make_data, select_shard
from tests.fault_injection.driver import run_convert, small_commits
from tests.helpers import make_traces, read_all, tree_bytes, write_store
from tracestore.errors import CorruptStoreError, TracestoreWarning
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
