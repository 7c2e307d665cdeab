"""Errors of the server, of the network and of the user: retries, then an error of one line."""

import random
import sys
import traceback

import pytest
import torch

import tracestore
from tests.helpers import command, segment_of
from tests.store.remote.stores import assert_same_epoch, cached, epoch
from tracestore.errors import CorruptStoreError, RemoteError, UsageError
from tracestore.store.maintain.verify import verify_store
from tracestore.store.remote.disk_cache import DiskCache
from tracestore.store.remote.object_store import ObjectStore


@pytest.mark.long
def test_reading_recovers_from_errors_of_the_server(local_store, remote_store, proxy):
    kinds = ["503", "cut", None, None, None, "flip", 0.05]
    rng = random.Random(5)
    plan = [rng.choice(kinds) for _ in range(100_000)]
    plan[20] = "stall"

    flipped = set()

    def fault(count, method, path):
        if plan[count] != "flip":
            return plan[count]
        # A file damaged in transit is requested once more. Listings have no checksum.
        is_first = "/segments/" in path and path not in flipped
        flipped.add(path)
        return "flip" if is_first else None

    proxy.fault = fault
    for view in ("graph", "sequence"):
        assert_same_epoch(epoch(remote_store, view), epoch(local_store, view))


@pytest.mark.long
def test_an_unavailable_server_is_an_error_of_one_line(remote_store, proxy, monkeypatch):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "1")
    store = tracestore.open(remote_store)
    proxy.fault = lambda *_: "503"
    with pytest.raises(RemoteError, match=r"segments/\w+/\S+: failed for 1 s"):
        _ = store[0].hidden_states
    with pytest.raises(RemoteError):
        epoch(store)
    done = command("info", remote_store)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "failed for 1 s" in done.stderr
    proxy.fault = lambda *_: None
    assert store[0].hidden_states.shape == (3, 24, 32)


def test_missing_permission_is_a_usage_error(remote_store, proxy):
    proxy.fault = lambda *_: "403"
    done = command("info", remote_store)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no permission" in done.stderr


def test_damaged_objects_are_named(own_remote_store, proxy, local_store, tmp_path):
    file = f"{segment_of(local_store, 2)}/attention/c/0"
    data = bytearray((local_store / file).read_bytes())
    data[100] ^= 1
    objects = ObjectStore(own_remote_store)
    objects.put(file, bytes(data))
    with tracestore.open(own_remote_store) as store:
        assert store[0].attention.shape == (3, 24, 24)
        with pytest.raises(CorruptStoreError, match=file):
            _ = store[13].attention
    objects.put(file, bytes(data[:-1]))
    with tracestore.open(own_remote_store) as store, pytest.raises(CorruptStoreError, match=file):
        _ = store[13].attention
    objects.delete([file])
    with tracestore.open(own_remote_store) as store, pytest.raises(CorruptStoreError, match=file):
        _ = store[13].attention
    with tracestore.open(local_store) as store:
        damaged = DiskCache.name_of(own_remote_store, store.internals.segment(2).entries[file])
    assert damaged not in cached(tmp_path)


def test_missing_credentials_are_an_error_of_one_line(remote_store, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "1")
    done = command("info", remote_store)
    assert done.returncode in (1, 2) and done.stderr.count("\n") == 1 and len(done.stderr) < 500


@pytest.mark.long
def test_a_forked_worker_reports_the_error_of_the_server(remote_store, proxy, monkeypatch):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.5")
    dataset = tracestore.TraceDataset(remote_store, view="sequence")
    proxy.fault = lambda *_: "503"
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=6, num_workers=1, collate_fn=tracestore.collate_sequences, multiprocessing_context="fork"
    )
    with pytest.raises(RemoteError, match="failed for") as caught:
        list(loader)
    # The garbage collector would close the pipes of the loader before its worker ends, and wait for that for 5 s.
    traceback.clear_frames(caught.tb)


def test_urls_without_a_store_are_a_usage_error(remote, monkeypatch):
    for address, words in (
        (remote, "no such store"),
        ("s3://no-such-bucket/x.zarr", "no such store"),
        ("ftp://host/x.zarr", "ftp://, expected one of s3://"),
        ("s3://", "s3://"),
    ):
        with pytest.raises(UsageError, match=words):
            tracestore.open(address)
    ObjectStore(remote).put("zarr.json", b"{}")
    with pytest.raises(UsageError, match="not a store"):
        tracestore.open(remote)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r"obstore is not installed; run: pip install 'tracestore\[remote\]'"):
        tracestore.open(remote)


def test_invalid_settings_are_a_usage_error(remote_store, monkeypatch):
    for name, value in (
        ("TRACESTORE_CACHE_SIZE", "much"),
        ("TRACESTORE_REMOTE_TIMEOUT", "soon"),
        ("TRACESTORE_REMOTE_RETRY_TIMEOUT", "-1"),
        ("TRACESTORE_CACHE_DIR", "/proc/nowhere"),
    ):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            done = command("info", remote_store)
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and value in done.stderr, done.stderr


@pytest.mark.parametrize("ending", ["?versions", "#2", "/../other.zarr", "//x", " x"])
def test_invalid_urls_are_refused(remote, ending):
    with pytest.raises(UsageError, match="found an address with"):
        tracestore.open(remote + ending)


def test_an_error_that_a_retry_cannot_solve_is_raised_at_once(remote_store, proxy):
    proxy.fault = lambda *_: "400"
    with pytest.raises(UsageError, match="400"):
        tracestore.open(remote_store)
    assert proxy.count == 1


@pytest.mark.long
def test_a_server_that_ignores_ranges(local_store, remote_store, proxy, tmp_path, monkeypatch):
    """If the server ignores ranges, an interrupted download starts again from the first byte."""
    cuts = {}

    def fault(count, method, path):
        cuts[path] = cuts.get(path, 0) + 1
        if "/c/0" not in path:
            return None
        return "cut" if cuts[path] == 1 else "no range"

    proxy.fault = fault
    assert_same_epoch(epoch(remote_store), epoch(local_store))
    assert max(cuts.values()) > 2
    cuts.clear()
    assert not verify_store(remote_store).damaged


def test_batches_in_the_cache_come_before_the_error_of_a_later_one(remote_store, local_store, tmp_path, proxy):
    expected = epoch(local_store, shuffle="none")
    assert_same_epoch(epoch(remote_store, shuffle="none"), expected)
    loader = tracestore.TraceLoader(remote_store, view="graph", batch_size=5, shuffle="none")
    *_, last = loader.store.internals.index.segments()
    (tmp_path / "cache" / DiskCache.name_of(remote_store, last.rows)).unlink()
    proxy.fault = lambda *_: "403"
    batches = iter(loader)
    assert next(batches).question_id == expected[0][0]
    with pytest.raises(tracestore.TracestoreError, match=r"403|permission|denied"):
        list(batches)
