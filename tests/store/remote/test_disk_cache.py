"""The disk cache of remote files: its size, concurrent processes, kills and full disks."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import tracestore
from tests.helpers import ROOT
from tests.store.remote.stores import SEGMENTS, assert_same_epoch, cached, committed_files, epoch, open_with_cache
from tracestore.store.io import fsio
from tracestore.store.remote.disk_cache import DiskCache


@pytest.mark.long
@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_the_cache_stays_within_its_limit(local_store, remote_store, tmp_path, shuffle):
    sizes = [p.stat().st_size for p in local_store.rglob("*") if p.is_file()]
    bound, most = 2 * max(sizes), 0
    cache = DiskCache(tmp_path / "small", bound)
    done = threading.Event()

    def watch():
        nonlocal most
        sizes_before = {}
        while not done.is_set():
            sizes_now = {}
            for item in os.scandir(tmp_path / "small"):
                with contextlib.suppress(FileNotFoundError):
                    sizes_now[item.name, item.inode()] = item.stat().st_size
            # What two scans in a row saw was there all at once; one scan alone counts evicted files and the new ones.
            most = max(most, sum(size for file, size in sizes_now.items() if sizes_before.get(file) == size))
            sizes_before = sizes_now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        store = open_with_cache(remote_store, cache)
        assert_same_epoch(epoch(store, shuffle=shuffle), epoch(local_store, shuffle=shuffle))
    finally:
        done.set()
        watcher.join()
    assert bound / 2 < most <= bound + max(sizes)


@pytest.mark.long
def test_evicted_files_are_unmapped(remote_store, tmp_path):
    store = open_with_cache(remote_store, DiskCache(tmp_path / "small", 20_000))
    for index in [*range(0, 36, 6)] * 2:
        store[index].hidden_states.sum()
    held = {name for name in os.listdir(tmp_path / "small") if not name.startswith(".")}
    with open("/proc/self/maps") as maps:
        mapped = {line.split("/")[-1].strip() for line in maps if "(deleted)" in line and str(tmp_path) in line}
    # Index and columns, which the open store needs, and the two files each that the last two reads evicted.
    assert len(mapped) <= 6 and held


@pytest.mark.long
def test_two_processes_fetch_each_file_once(remote_store, proxy, tmp_path):
    code = f"""
import tracestore
for batch in tracestore.TraceLoader({remote_store!r}, view="graph", batch_size=5, seed=3): pass
"""
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    asked = {path: n for (method, path), n in proxy.requests.items() if method == "GET" and "/segments/" in path}
    assert len(asked) == 5 * SEGMENTS and set(asked.values()) == {1}


@pytest.mark.long
def test_the_cache_is_valid_after_kills(remote_store, local_store, tmp_path, proxy):
    proxy.fault = lambda count, method, path: 0.03
    code = f"""
import tracestore
print("ready", flush=True)
for batch in tracestore.TraceLoader({remote_store!r}, view="graph", batch_size=5, seed=3): pass
"""
    rng = random.Random(2)
    for _ in range(int(os.environ.get("TRACESTORE_CACHE_KILLS", "5"))):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.random() * 1.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with tracestore.open(local_store) as store:
            known = {DiskCache.name_of(remote_store, entry) for entry in committed_files(store)}
        for name, size in cached(tmp_path).items():
            assert name in known and name.endswith(f"-{size}")
    proxy.fault = lambda *_: None
    assert_same_epoch(epoch(remote_store), epoch(local_store))
    assert not [n for n in os.listdir(tmp_path / "cache") if n.startswith(".part-")]


def test_a_full_disk_is_an_error(remote_store, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with tracestore.open(remote_store) as store:
        monkeypatch.setattr("tracestore.store.io.fsio.pwritev_all", full)
        with pytest.raises(tracestore.DiskFullError, match="bytes are free, more were needed"):
            _ = store[0].hidden_states
    assert not [n for n in os.listdir(tmp_path / "cache") if n.startswith(".part-")]


@pytest.mark.long
def test_files_damaged_by_a_crash_of_the_machine_are_fetched_again(remote_store, local_store, tmp_path, proxy):
    expected = epoch(local_store)
    assert_same_epoch(epoch(remote_store), expected)
    largest = max(cached(tmp_path), key=cached(tmp_path).get)
    for path in (tmp_path / "cache").glob("[!.]*"):
        if path.name == largest:  # A power failure can leave a file of the right size without its bytes.
            path.chmod(0o600)
            path.write_bytes(bytes(path.stat().st_size))
        os.utime(path, (1e9, 1e9))
    before = proxy.gets("/c/0/0") + proxy.gets("attention/c/0")
    assert_same_epoch(epoch(remote_store), expected)
    assert proxy.gets("/c/0/0") + proxy.gets("attention/c/0") == before + 1
    assert min(p.stat().st_mtime for p in (tmp_path / "cache").glob("[!.]*")) > 1e9


@pytest.mark.long
def test_other_files_in_the_cache_folder_are_kept(remote_store, tmp_path):
    folder = tmp_path / "cache"
    (folder / "lost+found").mkdir(parents=True)
    (folder / "thesis.tex").write_bytes(bytes(100_000))
    store = open_with_cache(remote_store, DiskCache(folder, 30_000))
    for index in range(0, 36, 6):
        assert store[index].hidden_states.shape == (3, 24, 32)
    assert (folder / "thesis.tex").stat().st_size == 100_000 and (folder / "lost+found").is_dir()


def test_a_full_disk_evicts_files_that_are_not_needed(remote_store, tmp_path, monkeypatch):
    store = open_with_cache(remote_store, DiskCache(tmp_path / "cache", 1 << 30))
    for index in range(0, 30, 6):
        assert store[index].hidden_states.size
    before, real, failures = set(cached(tmp_path)), fsio.pwritev_all, [True]

    def full_once(*args):
        if failures:
            failures.pop()
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr("tracestore.store.io.fsio.pwritev_all", full_once)
    assert store[30].hidden_states.shape == (3, 24, 32)
    assert before - set(cached(tmp_path)), "no file was evicted"


def test_a_removed_cache_is_created_again(remote_store, tmp_path):
    with tracestore.open(remote_store) as store:
        assert store[0].hidden_states.size
        shutil.rmtree(tmp_path / "cache")
        assert store[6].hidden_states.size and store[0].attention.size
