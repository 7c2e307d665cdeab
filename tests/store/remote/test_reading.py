"""Remote stores give the same values as local ones."""

import json
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import ROOT, command, error_of, make_traces, run_cli, tree_bytes, write_store
from tests.store.remote.server import free_port, wait_until_it_answers
from tests.store.remote.stores import assert_same_epoch, committed_files, epoch, make_store, open_with_cache, upload
from tests.tiers import long
from tracestore.errors import UsageError
from tracestore.store.maintain.verify import verify_store
from tracestore.store.remote.disk_cache import DiskCache
from tracestore.store.write.writer import StoreWriter


@pytest.mark.parametrize("view", ["graph", "sequence"])
@pytest.mark.parametrize("shuffle", ["global", *long("block", "none")])
def test_an_epoch_equals_that_of_the_local_store(local_store, remote_store, proxy, view, shuffle):
    expected = epoch(local_store, view, shuffle=shuffle)
    assert_same_epoch(epoch(remote_store, view, shuffle=shuffle), expected)  # cold
    before = proxy.count
    assert_same_epoch(epoch(remote_store, view, shuffle=shuffle), expected)  # warm
    assert proxy.count - before <= 3, "a warm cache asks for the newest manifest only"


@pytest.mark.long
def test_an_epoch_of_a_compressed_store_equals_that_of_the_local_store(tmp_path, remote):
    make_store(tmp_path / "coded.zarr", codec="blosc-zstd")
    upload(tmp_path / "coded.zarr", remote)
    for view in ("graph", "sequence"):
        assert_same_epoch(epoch(remote, view), epoch(tmp_path / "coded.zarr", view))


def test_every_field_equals_that_of_the_local_store(local_store, remote_store):
    with tracestore.open(local_store) as one, tracestore.open(remote_store) as other:
        assert repr(other) == f"TraceStore({remote_store!r}, 36 traces)"
        assert other.question_ids == one.question_ids and np.array_equal(other.scores, one.scores)
        for a, b in zip(one, other, strict=True):
            assert (a.question_id, a.answer, a.tokens_decoded, a.source) == (
                b.question_id,
                b.answer,
                b.tokens_decoded,
                b.source,
            )
            assert np.array_equal(a.hidden_states, b.hidden_states) and np.array_equal(a.attention, b.attention)
            assert np.array_equal(a.last_token, b.last_token) and np.array_equal(a.tokens, b.tokens)
        assert other.index_of("q7") == one.index_of("q7")
        assert np.array_equal(other.features(), one.features())
        assert {k: v for k, v in other.info().items() if k != "path"} == {
            k: v for k, v in one.info().items() if k != "path"
        }


def test_only_the_files_in_use_are_fetched(remote_store, proxy, tmp_path):
    with tracestore.open(remote_store) as store:
        assert len(store) == 36 and store.num_layers == 3
        assert proxy.gets("/c/0/0") == proxy.gets("attention/c/0") == 0
        assert store[0].hidden_states.shape == (3, 24, 32)
    assert proxy.gets("hidden_states/c/0/0") == 1 and proxy.gets("attention/c/0") == 0


def test_a_pickled_store_opens_the_same_generation(remote_store):
    with tracestore.open(remote_store) as store:
        other = pickle.loads(pickle.dumps(store))
        assert other.generation == store.generation and len(other) == 36


WITH_WORKERS = """
import sys
import torch
import tracestore

if __name__ == "__main__":
    address, context = sys.argv[1:]
    dataset = tracestore.TraceDataset(address, view="sequence")
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=6, num_workers=2, collate_fn=tracestore.collate_sequences, multiprocessing_context=context
    )
    for batch in loader:
        for question_id, sequence in zip(batch.question_id, batch.sequences, strict=True):
            print(question_id, float(sequence.double().sum()))
"""


@pytest.mark.parametrize("context", long("fork", "forkserver", "spawn"))
def test_datasets_work_in_worker_processes(remote_store, local_store, tmp_path, context):
    # A process of its own: a forkserver keeps the environment that it was started in.
    (tmp_path / "script.py").write_text(WITH_WORKERS)
    done = run_cli(tmp_path / "script.py", remote_store, context, check=0, env={"PYTHONPATH": str(ROOT)})
    with tracestore.open(local_store) as store:
        expected = [f"{trace.question_id} {float(trace.last_token.astype('f8').sum())}" for trace in store]
    assert [line.split()[0] for line in done.stdout.splitlines()] == [line.split()[0] for line in expected]
    found, sums = ([float(line.split()[1]) for line in lines] for lines in (done.stdout.splitlines(), expected))
    assert np.allclose(found, sums)


@pytest.mark.long
def test_commands_accept_urls(remote_store, local_store, tmp_path):
    info = json.loads(command("info", remote_store, "--json", check=0).stdout)
    assert info["path"] == remote_store and info["num_traces"] == 36
    shown = [json.loads(command("view", s, "q3", "--json", check=0).stdout) for s in (remote_store, local_store)]
    assert shown[0] == shown[1]
    command("lint", remote_store)
    command("report", remote_store, "--output", tmp_path / "page.html", check=0)
    assert "store.zarr" in (tmp_path / "page.html").read_text()
    command("export", remote_store, tmp_path / "out", check=0)
    command("merge", remote_store, tmp_path / "merged.zarr", check=0)
    with tracestore.open(tmp_path / "merged.zarr") as merged:
        assert len(merged) == 36
    loader = tracestore.TraceBatchLoader(remote_store)
    assert len(loader) == 1 or len(loader) > 0


@pytest.mark.parametrize("listing", [True, False])
def test_a_static_web_server_can_serve_a_store(local_store, tmp_path, monkeypatch, listing):
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))
    (local_store / "manifest" / "newest").write_text(f"{tracestore.open(local_store).generation:010d}\n")
    port = free_port()
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "-d", str(tmp_path)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if listing:
        (local_store / "manifest" / "newest").unlink()
    else:
        # For a folder with an index.html the server returns this file instead of a listing.
        (local_store / "manifest" / "index.html").write_text("<p>Nothing to see</p>")
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_it_answers(url).close()
        assert_same_epoch(epoch(f"{url}/local.zarr"), epoch(local_store))
        with pytest.raises(UsageError, match="no such store"):
            tracestore.open(f"{url}/other.zarr")
        with pytest.raises(UsageError, match="cannot be written"):
            StoreWriter(f"{url}/other.zarr")
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_a_replaced_store_is_a_different_store(own_remote_store, tmp_path):
    with tracestore.open(own_remote_store) as store:
        before = store[0].hidden_states.copy()
        pickled = pickle.dumps(store)
    write_store(own_remote_store, make_traces(4, tokens=24, layers=3, dim=32, seed=9), overwrite=True)
    with tracestore.open(own_remote_store) as store:
        assert len(store) == 4 and not np.array_equal(store[0].hidden_states, before)
    # The replaced segments stay until `tracestore clean` removes them.
    with pickle.loads(pickled) as store:
        assert np.array_equal(store[0].hidden_states, before)


@pytest.mark.long
def test_a_store_opens_while_a_writer_removes_generations(own_remote_store):
    stop = threading.Event()

    def write():
        k = 0
        while not stop.is_set():
            with tracestore.create(own_remote_store, append=True) as writer:
                for _ in range(3):
                    writer.append(make_traces(1, tokens=24, layers=3, dim=32, seed=k)[0] | {"question_id": f"new{k}"})
                    writer.flush()
                    k += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(15):
            with tracestore.open(own_remote_store) as store:
                assert len(store) >= 36 and len(store.scores) == len(store)
    finally:
        stop.set()
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_tokens_equal_those_of_the_local_store(remote_store, local_store, tmp_path, shuffle):
    """Also where the disk cache holds a part of the files only."""
    options = {"view": "tokens", "layers": [2, 0], "batch_size": 50, "shuffle": shuffle, "block_bytes": 20_000}
    expected = list(tracestore.TraceLoader(local_store, **options))
    store = open_with_cache(remote_store, DiskCache(tmp_path / "small", 60_000))
    found = list(tracestore.TraceLoader(store, **options))
    assert len(found) == len(expected) == 36 * 24 // 50 + 1
    for batch, other in zip(found, expected, strict=True):
        assert torch.equal(batch.hidden_states, other.hidden_states) and torch.equal(batch.position, other.position)


def test_no_file_is_pending_after_the_last_batch(remote_store):
    """The sizes of pending files are counted exactly, and all files are released after the last batch."""
    loader = tracestore.TraceLoader(remote_store, view="graph", batch_size=5, seed=3)
    (ahead,) = loader._gatherer.prefetch(loader.batch_indices, 0, len(loader))
    with ahead:
        for batch in range(len(loader)):
            ahead.advance(batch)
            with ahead._lock:
                held = sum(ahead._entries[name].size for name in ahead._uses)
            assert ahead._bytes == held
        ahead.advance(len(loader))
        assert not ahead._uses and not ahead._entries and ahead._bytes == 0


def test_an_epoch_whose_files_are_here_prefetches_nothing(remote_store):
    loader = tracestore.TraceLoader(remote_store, view="graph", batch_size=5, seed=3)

    def queued():
        (ahead,) = loader._gatherer.prefetch(loader.batch_indices, 0, len(loader))
        for batch in range(len(loader)):
            ahead._plan(batch)
        return len(ahead._queue)

    assert queued() > 0
    for _ in loader:
        pass
    assert queued() == 0


def test_threads_fetch_from_the_first_missing_file_on(remote_store, monkeypatch):
    started, start = [], threading.Thread.start

    def record(thread):
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", record)
    loader = tracestore.TraceLoader(remote_store, view="graph", batch_size=5, seed=3)
    for is_fetched in (True, False):
        for _ in loader:
            pass
        assert ("tracestore-fetch" in started) == is_fetched
        started.clear()


@pytest.mark.parametrize("change", ["flipped", "flipped at the end", "shorter", "longer", "empty"])
@pytest.mark.parametrize("name", ["attention/c/0", *long("hidden_states/c/0/0")])
def test_a_cached_file_that_was_damaged_is_not_committed(remote_store, tmp_path, name, change):
    command("merge", remote_store, tmp_path / "intact.zarr", check=0)
    with tracestore.open(remote_store) as store:
        entry = next(e for e in committed_files(store) if e.path.endswith(name))
        cached = tmp_path / "cache" / DiskCache.name_of(remote_store, entry)
    data = bytearray(cached.read_bytes())
    if change.startswith("flipped"):
        data[-1 if change.endswith("end") else len(data) // 2] ^= 1
    cached.chmod(0o644)
    cached.write_bytes({"shorter": data[:-1], "longer": data + b"\0", "empty": b""}.get(change, data))
    assert "in the cache; run the command again" in error_of("merge", remote_store, tmp_path / "new.zarr", code=3)
    command("merge", remote_store, tmp_path / "new.zarr", check=0)
    for path in ("intact.zarr", "new.zarr"):
        assert not verify_store(tmp_path / path).damaged
    assert tree_bytes(tmp_path / "new.zarr" / "segments") == tree_bytes(tmp_path / "intact.zarr" / "segments")
    assert cached.stat().st_nlink == 1
