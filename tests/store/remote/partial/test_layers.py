"""Layers of large arrays are fetched alone, verified, and kept in files with holes."""

import errno
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import tracestore
from tests.helpers import ROOT, command, make_trace, write_store
from tests.store.remote.conftest import upload_once
from tests.store.remote.stores import assert_same_epoch, epoch, open_with_cache
from tracestore._core.kernels import crc32c
from tracestore.errors import CorruptStoreError
from tracestore.store.format.entries import FileEntry, Layers
from tracestore.store.remote import layer_file
from tracestore.store.remote.disk_cache import LAYERS_SUFFIX, DiskCache
from tracestore.store.remote.layer_file import LayerFile

PATTERN = b"\xa5"
LAYERS, TRACES = 4, 12


@pytest.fixture(autouse=True)
def pattern(monkeypatch):
    """Fill holes, so that an access to rows that were not fetched gives other values than the store's."""

    def make_holes(fd, size, data_bytes):
        os.ftruncate(fd, size)
        os.pwrite(fd, PATTERN * data_bytes, 0)

    monkeypatch.setattr(layer_file, "make_holes", make_holes)


@pytest.fixture(scope="module")
def large_store(tmp_path_factory):
    """Path of a store of traces with layers of 16 KiB and more, in three segments. No test changes it."""
    traces = [make_trace(k, tokens=130 + 7 * (k % 5), layers=LAYERS, dim=96, heads=2) for k in range(TRACES)]
    path = tmp_path_factory.mktemp("large") / "large.zarr"
    return write_store(path, traces, score=lambda k: k / TRACES, commit_after=(3, 7, 11))


@pytest.fixture(scope="module")
def uploaded_large(server, large_store):
    return upload_once(server, large_store)


@pytest.fixture
def large_url(uploaded_large, remote):
    return uploaded_large


def trace_bytes(trace):
    return trace.hidden_states.nbytes + trace.attention_packed.nbytes


@pytest.mark.long
def test_a_random_trace_costs_its_own_bytes(large_store, large_url, proxy):
    with tracestore.open(large_store) as local, tracestore.open(large_url) as store:
        for index, most in ((6, 8), (5, 3), (6, 0), (11, 8)):
            requests, fetched = proxy.count, proxy.large
            assert np.array_equal(store[index].hidden_states, local[index].hidden_states)
            assert np.array_equal(store[index].attention, local[index].attention)
            assert proxy.count - requests <= most
            assert proxy.large - fetched <= (1.1 * trace_bytes(local[index]) if most else 0)


@pytest.mark.parametrize("view", ["graph", "sequence", "tokens"])
@pytest.mark.parametrize("layers", [None, (1,), (0, 2), (3, 0)])
def test_batches_equal_those_of_the_local_store(large_store, large_url, view, layers):
    chosen = np.array([1, 2, 6, 10])
    options = {"view": view, "batch_size": 2 if view != "tokens" else 50, "layers": layers, "seed": 5}
    options |= {"positions": 3} if view == "sequence" else {}
    loaders = [tracestore.TraceLoader(s, indices=chosen, **options) for s in (large_store, large_url)]
    for one, other in zip(*loaders, strict=True):
        for name in ("x", "hidden_states", "sequences", "edge_attr", "trace_index"):
            if hasattr(one, name):
                assert getattr(one, name).equal(getattr(other, name))


def test_the_layers_of_a_loader_are_fetched_alone(large_store, large_url, proxy):
    local = tracestore.open(large_store)
    list(tracestore.TraceLoader(large_url, view="graph", layers=(2,), indices=np.array([0, 5]), batch_size=2))
    wanted = sum(trace_bytes(local[k]) for k in (0, 5)) / LAYERS
    assert 0.9 * wanted < proxy.large <= 1.2 * wanted


def test_two_ranks_fetch_the_store_once(large_store, large_url, proxy, tmp_path):
    expected = tracestore.TraceLoader(large_store, view="graph", batch_size=4, seed=3)
    total = sum(trace_bytes(t) for t in tracestore.open(large_store))
    for rank in range(2):
        store = open_with_cache(large_url, DiskCache(tmp_path / f"cache{rank}"))
        loader = tracestore.TraceLoader(store, view="graph", batch_size=4, seed=3, rank=rank, world_size=2)
        assert len(list(loader)) == len(expected)
    assert proxy.large <= 1.05 * total


def test_an_epoch_of_the_whole_store_fetches_whole_files(large_store, large_url, proxy, tmp_path):
    assert_same_epoch(epoch(large_url), epoch(large_store))
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(LAYERS_SUFFIX)]


def test_threads_fetch_a_layer_once(large_store, large_url, proxy, tmp_path):
    stores = [open_with_cache(large_url, DiskCache(tmp_path / "cache")) for _ in range(6)]
    expected = tracestore.open(large_store)[6].hidden_states
    found = []
    threads = [threading.Thread(target=lambda s=s: found.append(s[6].hidden_states.copy())) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(np.array_equal(f, expected) for f in found)
    assert proxy.gets("hidden_states/c/0/0") == 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_flipped_bit_is_fetched_again_then_refused(large_store, large_url, proxy, times):
    left = times

    def fault(count, method, path):
        nonlocal left
        if method == "GET" and path.split("?")[0].endswith("hidden_states/c/0/0") and left:
            left -= 1
            return "flip"
        return None

    proxy.fault = fault
    store = tracestore.open(large_url)
    if times == 1:
        assert np.array_equal(store[6].hidden_states, tracestore.open(large_store)[6].hidden_states)
    else:
        with pytest.raises(CorruptStoreError, match=r"layer \d+: checksum mismatch"):
            _ = store[6].hidden_states
        proxy.fault = lambda count, method, path: "flip" if path.split("?")[0].endswith("attention/c/0") else None
        assert "checksum mismatch" in command("view", large_url, "6", check=3).stderr
    proxy.fault = lambda count, method, path: None
    assert np.array_equal(store[6].hidden_states, tracestore.open(large_store)[6].hidden_states)


@pytest.mark.parametrize("fault", ["no range", "short", "long", "misplaced", "other place", "cut"])
@pytest.mark.long
def test_servers_that_lie_about_ranges(large_store, large_url, proxy, fault, monkeypatch):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.4")
    proxy.fault = lambda count, method, path: fault if "/c/0" in path and method == "GET" else None
    local = tracestore.open(large_store)
    with tracestore.open(large_url) as store:
        for index in (6, 1, 6, 11):
            try:
                found = store[index].hidden_states
            except tracestore.errors.TracestoreError:
                assert fault != "no range"
            else:
                assert np.array_equal(found, local[index].hidden_states)


def test_a_file_from_before_the_start_is_verified_by_layer(large_store, large_url, proxy, tmp_path, monkeypatch):
    local = tracestore.open(large_store)
    with tracestore.open(large_url) as store:
        assert np.array_equal(store[6].hidden_states, local[6].hidden_states)
    (file,) = (p for p in (tmp_path / "cache").iterdir() if p.name.endswith(LAYERS_SUFFIX))
    data = file.read_bytes()
    at = data.index(local[6].hidden_states[1].tobytes())
    with open(file, "r+b") as opened:
        opened.seek(at + 100)
        opened.write(bytes(64))
    monkeypatch.setattr(layer_file, "STAMP", b"next")
    before = proxy.large
    with tracestore.open(large_url) as store:
        assert np.array_equal(store[6].hidden_states, local[6].hidden_states)
    assert 0 < proxy.large - before <= 1.1 * local[6].hidden_states[1].nbytes


@pytest.mark.parametrize("seed", range(12))
def test_no_layer_counts_before_its_data_after_a_loss_of_power(large_store, large_url, tmp_path, seed, monkeypatch):
    """Drop pages of the files in any order: those that had not reached the disk."""
    rng = np.random.default_rng(seed)
    local = tracestore.open(large_store)
    with tracestore.open(large_url) as store:
        for index in (5, 6):
            _ = store[index].hidden_states, store[index].attention
    for file in (p for p in (tmp_path / "cache").iterdir() if p.name.endswith(LAYERS_SUFFIX)):
        data = bytearray(file.read_bytes())
        for page in range(0, len(data), 4096):
            if rng.random() < 0.3:
                data[page : page + 4096] = bytes(len(data[page : page + 4096]))
        file.write_bytes(data if rng.random() < 0.8 else data[: len(data) // 2])
    monkeypatch.setattr(layer_file, "STAMP", b"next")
    with tracestore.open(large_url) as store:
        for index in (5, 6):
            assert np.array_equal(store[index].hidden_states, local[index].hidden_states)
            assert np.array_equal(store[index].attention, local[index].attention)


@pytest.mark.long
def test_a_cache_that_is_too_small_gives_the_right_values(large_store, large_url, tmp_path):
    local = tracestore.open(large_store)
    store = open_with_cache(large_url, DiskCache(tmp_path / "small", 300_000))
    for index in [*range(0, TRACES, 4), *range(1, TRACES, 4)] * 2:
        assert np.array_equal(store[index].hidden_states, local[index].hidden_states)
        assert np.array_equal(store[index].attention, local[index].attention)


def test_an_array_that_is_read_from_front_to_back_is_fetched_whole(large_store, large_url, proxy):
    with tracestore.open(large_url) as store:
        for index in range(12):
            _ = store[index].hidden_states
    assert proxy.gets("hidden_states/c/0/0") <= 3 * 4


READ = """
import sys, tracestore
store = tracestore.open(sys.argv[1])
print(sum(float(store[k].hidden_states.astype("f4").sum()) for k in (6, 5)))
"""


@pytest.mark.long
def test_processes_fetch_a_layer_once(large_store, large_url, proxy):
    words = [sys.executable, "-c", READ, large_url]
    processes = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate()[0] for process in processes}
    local = tracestore.open(large_store)
    assert found == {f"{sum(float(local[k].hidden_states.astype('f4').sum()) for k in (6, 5))}\n"}
    assert proxy.large == local[6].hidden_states.nbytes + local[5].hidden_states.nbytes


def test_the_cache_counts_the_blocks_of_a_file_with_holes(large_url, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_file, "make_holes", lambda fd, size, data_bytes: os.ftruncate(fd, size))
    cache = DiskCache(tmp_path / "sparse", 10 << 20)
    size = open_with_cache(large_url, cache)[6].hidden_states.nbytes
    ((name, counted, _),) = (file for file in cache._complete() if file[0].endswith(LAYERS_SUFFIX))
    assert size <= counted <= size + 3 * 4096 < (cache.folder / name).stat().st_size


def test_a_full_disk_evicts_files_before_one_with_holes_is_made(large_store, large_url, tmp_path, monkeypatch):
    store = open_with_cache(large_url, DiskCache(tmp_path / "cache"))
    for index in (1, 11):
        _ = store[index].hidden_states
    before, real, failures = set(os.listdir(tmp_path / "cache")), os.ftruncate, [True]

    def full_once(fd, size, data_bytes):
        if failures:
            failures.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, size)

    monkeypatch.setattr(layer_file, "make_holes", full_once)
    local = tracestore.open(large_store)
    assert np.array_equal(store[6].hidden_states, local[6].hidden_states)
    assert before - set(os.listdir(tmp_path / "cache")), "no file was evicted"


def test_a_full_disk_without_a_file_to_evict_is_an_error(large_url, tmp_path, monkeypatch):
    store = open_with_cache(large_url, DiskCache(tmp_path / "cache"))
    assert store.question_ids[6] and store[6].num_tokens

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(layer_file, "make_holes", full)
    with pytest.raises(tracestore.DiskFullError, match="bytes are free, more were needed"):
        _ = store[6].hidden_states


class _DyingServer:
    """Streams one range of a file, and kills its process after some bytes."""

    address, is_forked, has_ranges = "s3://bucket/store", False, True

    def __init__(self, data, num_bytes, piece_bytes=1000):
        self.data, self.num_bytes, self.piece_bytes, self.fetched = data, num_bytes, piece_bytes, 0

    def stream_range(self, entry, begin, end, take):
        for at in range(begin, end, self.piece_bytes):
            if self.fetched >= self.num_bytes:
                os.kill(os.getpid(), signal.SIGKILL)
            piece = self.data[at : min(at + self.piece_bytes, end)]
            take(piece, at)
            self.fetched += len(piece)
        return True


def layers_of(data, num_bytes):
    """Return an entry of a file of data, its layers of num_bytes, and the size of the data."""
    ends = np.arange(0, len(data) + 1, num_bytes)
    crcs = np.array([crc32c(data[begin : begin + num_bytes]) for begin in ends[:-1]], "u4")
    return FileEntry("segments/0/hidden_states/c/0/0", len(data) + 20, 0), Layers(ends, crcs), len(data)


def files_of(folder, server):
    """Return the files of a server with a cache in a folder."""
    return SimpleNamespace(
        cache=DiskCache(folder), object_store=server, next_use=lambda name: None, on_miss=lambda: None
    )


@pytest.mark.parametrize("piece_bytes", [1_000, 16_000, 48_000, 80_000])
def test_the_layers_of_a_piece_are_recorded_with_one_write(tmp_path, monkeypatch, piece_bytes):
    data = np.random.default_rng(0).bytes(80_000)
    found = LayerFile(files_of(tmp_path, _DyingServer(data, 1 << 30, piece_bytes)), *layers_of(data, 5_000))
    writes, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, flags, at: writes.append(at) or pwrite(fd, flags, at))
    assert found.fetch([(0, 80_000)]) and found.mapped.read(0, 80_000) == data
    assert len(writes) <= -(-80_000 // piece_bytes)


@pytest.mark.parametrize("num_bytes", [0, 1, 5_000, 15_999, 16_000, 16_001, 33_000, 47_000, 64_000, 78_001])
def test_a_process_that_is_killed_leaves_the_layers_that_it_had(tmp_path, num_bytes):
    data = np.random.default_rng(num_bytes).bytes(80_000)
    stored = layers_of(data, 16_000)
    pid = os.fork()
    if pid == 0:
        try:
            server = _DyingServer(data, num_bytes)
            LayerFile(files_of(tmp_path, server), *stored).fetch([(0, 80_000)])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    server = _DyingServer(data, 1 << 30)
    found = LayerFile(files_of(tmp_path, server), *stored)
    assert found.fetch([(0, 80_000)])
    assert found.mapped.read(0, 80_000) == data
    whole = -(-num_bytes // 1000) * 1000 // 16_000  # the server sends pieces of 1,000 bytes
    assert server.fetched == 80_000 - 16_000 * whole
