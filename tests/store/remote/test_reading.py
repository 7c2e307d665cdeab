"""Stores of other machines give the same as local ones, or a clear error."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import ROOT, command, make_traces, run_cli
from tests.malicious_inputs.stores import Store
from tests.store.remote.server import free_port, wait_until_it_answers
from tests.tiers import long
from tracestore.errors import CorruptStoreError, RemoteError, TracestoreError, UsageError
from tracestore.store.format.mapped_arrays import pack_arrays
from tracestore.store.io import fsio
from tracestore.store.maintain.verify import repair_store, verify_store
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.store import TraceStore
from tracestore.store.remote.disk_cache import DiskCache
from tracestore.store.remote.files import RemoteFiles
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.write.writer import StoreWriter

SEGMENTS = 6


def make_store(path, **options):
    """Write a store of 36 traces in six segments."""
    with tracestore.create(path, **options) as writer:
        for k, trace in enumerate(make_traces(6 * SEGMENTS, tokens=24, layers=3, dim=32)):
            writer.append(trace, score=k / 36)
            if k % 6 == 5:
                writer.flush()


def upload(folder, address):
    bucket = ObjectStore(address)
    files = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: bucket.put(path.relative_to(folder).as_posix(), path), files))


def open_with_cache(address, cache):
    return TraceStore(StoreInternals.open(RemoteFiles(ObjectStore(address), cache), cache_bytes=1 << 20))


@pytest.fixture
def local(tmp_path):
    make_store(tmp_path / "local.zarr")
    return tmp_path / "local.zarr"


@pytest.fixture
def there(local, remote):
    upload(local, remote)
    return remote


def epoch(store, view="graph", **options):
    """Return the ids and tensors of the batches of an epoch, in order."""
    found = []
    for batch in tracestore.TraceLoader(store, view=view, batch_size=5, seed=3, **options):
        if view == "sequence":
            found.append((batch.question_id, batch.sequences.clone(), batch.score.clone()))
        else:
            found.append((batch.question_id, batch.x.clone(), batch.edge_index.clone(), batch.edge_attr.clone()))
    return found


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


def cached(tmp_path):
    return {p.name: p.stat().st_size for p in (tmp_path / "cache").glob("[!.]*")}


@pytest.mark.parametrize("view", ["graph", "sequence"])
@pytest.mark.parametrize("shuffle", ["global", *long("block", "none")])
def test_an_epoch_is_the_local_one(local, there, proxy, view, shuffle):
    expected = epoch(local, view, shuffle=shuffle)
    assert_same(epoch(there, view, shuffle=shuffle), expected)  # cold
    before = proxy.count
    assert_same(epoch(there, view, shuffle=shuffle), expected)  # warm
    assert proxy.count - before <= 3, "a warm cache asks for the newest manifest only"


def test_an_epoch_of_a_compressed_store_is_the_local_one(tmp_path, remote):
    make_store(tmp_path / "coded.zarr", codec="blosc-zstd")
    upload(tmp_path / "coded.zarr", remote)
    for view in ("graph", "sequence"):
        assert_same(epoch(remote, view), epoch(tmp_path / "coded.zarr", view))


def test_every_field_is_the_local_one(local, there):
    with tracestore.open(local) as one, tracestore.open(there) as other:
        assert repr(other) == f"TraceStore({there!r}, 36 traces)"
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


def test_only_what_is_used_is_fetched(there, proxy, tmp_path):
    with tracestore.open(there) as store:
        assert len(store) == 36 and store.num_layers == 3
        assert proxy.gets("/c/0/0") == proxy.gets("attention/c/0") == 0
        assert store[0].hidden_states.shape == (3, 24, 32)
    assert proxy.gets("hidden_states/c/0/0") == 1 and proxy.gets("attention/c/0") == 0


def test_errors_of_the_server_are_survived(local, there, proxy):
    kinds = ["503", "cut", None, None, None, "flip", 0.05]
    rng = random.Random(5)
    plan = [rng.choice(kinds) for _ in range(100_000)]
    plan[20] = "stall"

    flipped = set()

    def fault(count, method, path):
        if plan[count] != "flip":
            return plan[count]
        # What is damaged on its way is asked for once more; a listing has no checksum of its own.
        is_first = "/segments/" in path and path not in flipped
        flipped.add(path)
        return "flip" if is_first else None

    proxy.fault = fault
    for view in ("graph", "sequence"):
        assert_same(epoch(there, view), epoch(local, view))


@pytest.mark.long
def test_a_server_that_stays_away_is_an_error_of_one_line(there, proxy, monkeypatch):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "1")
    store = tracestore.open(there)
    proxy.fault = lambda *_: "503"
    with pytest.raises(RemoteError, match=r"segments/00000000/hidden_states/\S+: failed for 1 s"):
        _ = store[0].hidden_states
    with pytest.raises(RemoteError):
        epoch(store)
    done = command("info", there)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "failed for 1 s" in done.stderr
    proxy.fault = lambda *_: None
    assert store[0].hidden_states.shape == (3, 24, 32)


def test_no_permission_is_wrong_usage(there, proxy):
    proxy.fault = lambda *_: "403"
    done = command("info", there)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no permission" in done.stderr


def test_damage_at_the_server_is_named(there, proxy, local, tmp_path):
    file = "segments/00000002/attention/c/0"
    data = bytearray((local / file).read_bytes())
    data[100] ^= 1
    bucket = ObjectStore(there)
    bucket.put(file, bytes(data))
    with tracestore.open(there) as store:
        assert store[0].attention.shape == (3, 24, 24)
        with pytest.raises(CorruptStoreError, match=file):
            _ = store[13].attention
    bucket.put(file, bytes(data[:-1]))
    with tracestore.open(there) as store, pytest.raises(CorruptStoreError, match=file):
        _ = store[13].attention
    bucket.delete([file])
    with tracestore.open(there) as store, pytest.raises(CorruptStoreError, match=file):
        _ = store[13].attention
    with tracestore.open(local) as store:
        damaged = next(DiskCache.name_of(there, f) for f in store.internals.index.files() if f.path == file)
    assert damaged not in cached(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_the_cache_stays_within_its_bound(local, there, tmp_path, shuffle):
    sizes = [p.stat().st_size for p in local.rglob("segments/*/*/c/*") if p.is_file()]
    sizes += [p.stat().st_size for p in local.rglob("segments/*/*/c/*/*") if p.is_file()]
    bound, most = 2 * max(sizes), 0
    cache = DiskCache(tmp_path / "small", bound)
    done = threading.Event()

    def watch():
        nonlocal most
        while not done.is_set():
            total = 0
            for item in os.scandir(tmp_path / "small"):
                try:
                    total += item.stat().st_size
                except FileNotFoundError:
                    total = 0
                    break  # looked at while it changed
            most = max(most, total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        store = open_with_cache(there, cache)
        assert_same(epoch(store, shuffle=shuffle), epoch(local, shuffle=shuffle))
    finally:
        done.set()
        watcher.join()
    assert bound / 2 < most <= bound + max(sizes)


def test_the_disk_gets_the_room_of_what_left_the_cache(there, tmp_path):
    store = open_with_cache(there, DiskCache(tmp_path / "small", 20_000))
    for index in [*range(0, 36, 6)] * 2:
        store[index].hidden_states.sum()
    held = {name for name in os.listdir(tmp_path / "small") if not name.startswith(".")}
    with open("/proc/self/maps") as maps:
        mapped = {line.split("/")[-1].strip() for line in maps if "(deleted)" in line and str(tmp_path) in line}
    # The index, which the open store needs, and what the last two reads pushed out.
    assert len(mapped) <= 3 and held


@pytest.mark.long
def test_two_processes_fetch_each_file_once(there, proxy, tmp_path):
    code = f"""
import tracestore
for batch in tracestore.TraceLoader({there!r}, view="graph", batch_size=5, seed=3): pass
"""
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    asked = {path: n for (method, path), n in proxy.requests.items() if method == "GET" and "/segments/" in path}
    assert len(asked) == 4 * SEGMENTS and set(asked.values()) == {1}


@pytest.mark.long
def test_a_cache_survives_kills(there, local, tmp_path, proxy):
    proxy.fault = lambda count, method, path: 0.03
    code = f"""
import tracestore
print("ready", flush=True)
for batch in tracestore.TraceLoader({there!r}, view="graph", batch_size=5, seed=3): pass
"""
    rng = random.Random(2)
    for _ in range(int(os.environ.get("TRACESTORE_CACHE_KILLS", "5"))):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.random() * 1.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with tracestore.open(local) as store:
            known = {DiskCache.name_of(there, entry) for entry in store.internals.index.files()}
            known |= {DiskCache.name_of(there, f) for c in store.internals.manifest.columns for f in c.files}
        for name, size in cached(tmp_path).items():
            assert name in known and name.endswith(f"-{size}")
    proxy.fault = lambda *_: None
    assert_same(epoch(there), epoch(local))
    assert not [n for n in os.listdir(tmp_path / "cache") if n.startswith(".part-")]


def test_a_disk_without_room_says_so(there, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with tracestore.open(there) as store:
        monkeypatch.setattr("tracestore.store.io.fsio.pwritev_all", full)
        with pytest.raises(tracestore.DiskFullError, match="bytes were needed"):
            _ = store[0].hidden_states
    assert not [n for n in os.listdir(tmp_path / "cache") if n.startswith(".part-")]


def test_a_pickled_store_is_the_same_generation(there):
    with tracestore.open(there) as store:
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


@pytest.mark.parametrize("context", ["fork", *long("forkserver", "spawn")])
def test_workers_fetch_what_they_need(there, local, tmp_path, context):
    # A process of its own: a forkserver keeps the environment that it was started in.
    (tmp_path / "script.py").write_text(WITH_WORKERS)
    done = run_cli(tmp_path / "script.py", there, context, check=0, env={"PYTHONPATH": str(ROOT)})
    with tracestore.open(local) as store:
        expected = [f"{trace.question_id} {float(trace.last_token.astype('f8').sum())}" for trace in store]
    assert [line.split()[0] for line in done.stdout.splitlines()] == [line.split()[0] for line in expected]
    found, sums = ([float(line.split()[1]) for line in lines] for lines in (done.stdout.splitlines(), expected))
    assert np.allclose(found, sums)


def test_who_has_no_credentials_is_told(there, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "1")
    done = command("info", there)
    assert done.returncode in (1, 2) and done.stderr.count("\n") == 1 and len(done.stderr) < 500


def test_a_forked_worker_says_what_the_server_said(there, proxy, monkeypatch):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.5")
    dataset = tracestore.TraceDataset(there, view="sequence")
    proxy.fault = lambda *_: "503"
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=6, num_workers=1, collate_fn=tracestore.collate_sequences, multiprocessing_context="fork"
    )
    with pytest.raises(RemoteError, match="failed for"):
        list(loader)


def test_what_is_no_store_is_wrong_usage(remote, monkeypatch):
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


@pytest.mark.long
def test_commands_take_addresses(there, local, tmp_path):
    info = json.loads(command("info", there, "--json", check=0).stdout)
    assert info["path"] == there and info["num_traces"] == 36
    shown = [json.loads(command("view", s, "q3", "--json", check=0).stdout) for s in (there, local)]
    assert shown[0] == shown[1]
    command("lint", there)
    command("report", there, "--output", tmp_path / "page.html", check=0)
    assert "store.zarr" in (tmp_path / "page.html").read_text()
    command("export", there, tmp_path / "out", check=0)
    command("merge", there, tmp_path / "merged.zarr", check=0)
    with tracestore.open(tmp_path / "merged.zarr") as merged:
        assert len(merged) == 36
    loader = tracestore.TraceBatchLoader(there)
    assert len(loader) == 1 or len(loader) > 0


@pytest.mark.parametrize("listing", [True, False])
def test_a_web_server(local, tmp_path, monkeypatch, listing):
    monkeypatch.setenv("TRACESTORE_CACHE_DIR", str(tmp_path / "cache"))
    (local / "manifest" / "newest").write_text(f"{tracestore.open(local).generation:010d}\n")
    port = free_port()
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "-d", str(tmp_path)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if listing:
        (local / "manifest" / "newest").unlink()
    else:
        # For a folder with an index.html the server returns this file instead of a listing.
        (local / "manifest" / "index.html").write_text("<p>Nothing to see</p>")
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_it_answers(url).close()
        assert_same(epoch(f"{url}/local.zarr"), epoch(local))
        with pytest.raises(UsageError, match="no such store"):
            tracestore.open(f"{url}/other.zarr")
        with pytest.raises(UsageError, match="cannot be written"):
            StoreWriter(f"{url}/other.zarr")
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_a_store_that_was_replaced_is_another_one(there, tmp_path):
    with tracestore.open(there) as store:
        before = store[0].hidden_states.copy()
        pickled = pickle.dumps(store)
    with tracestore.create(there, overwrite=True) as writer:
        for trace in make_traces(4, tokens=24, layers=3, dim=32, seed=9):
            writer.append(trace)
    with tracestore.open(there) as store:
        assert len(store) == 4 and not np.array_equal(store[0].hidden_states, before)
    with pytest.raises(TracestoreError):
        pickle.loads(pickled)


@pytest.mark.long
def test_generations_that_go_while_a_reader_opens(there):
    stop = threading.Event()

    def write():
        k = 0
        while not stop.is_set():
            with tracestore.create(there, append=True) as writer:
                for _ in range(3):
                    writer.append(make_traces(1, tokens=24, layers=3, dim=32, seed=k)[0] | {"question_id": f"new{k}"})
                    writer.flush()
                    k += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(15):
            with tracestore.open(there) as store:
                assert len(store) >= 36 and len(store.scores) == len(store)
    finally:
        stop.set()
        thread.join()


@pytest.mark.long
def test_verify_reads_every_object(there, local, tmp_path):
    assert verify_store(there) == replace(verify_store(local), leftovers=[])
    assert not verify_store(there, quick=True).damaged
    bucket = ObjectStore(there)
    for path in (
        "segments/00000001/attention/c/0",
        "segments/00000002/tokens/zarr.json",
        "zarr.json",
        "index/0000000006/part",
    ):
        data = bucket.read(path)
        bucket.put(path, data[:-1] + bytes([data[-1] ^ 1]))
        assert set(verify_store(there).damaged) == {path}
        bucket.delete([path])
        assert verify_store(there, quick=True).damaged[path] == "missing"
        bucket.put(path, data)
    bucket.put("segments/00000099/x", b"left over")
    assert "segments/00000099/x" in command("verify", there, check=0).stdout
    with pytest.raises(UsageError, match="on this machine"):
        repair_store(there)
    with pytest.raises(UsageError, match="no such store"):
        verify_store(f"{there}-not")


@pytest.mark.long
def test_verify_finds_contradictions_with_valid_checksums(local, remote):
    for name in sorted(os.listdir(local / "manifest"))[:-1]:
        (local / "manifest" / name).unlink()  # An older generation has the part with its first checksum.
    store = Store(local)
    arrays = store.part(0)
    arrays["num_tokens"][0] += 1
    store.set_part(0, pack_arrays(arrays))
    store.seal()
    upload(local, remote)
    expected = verify_store(local).damaged
    assert any("num_tokens" in reason for reason in expected.values())
    assert verify_store(remote).damaged == expected


@pytest.mark.long
def test_what_a_crash_of_the_machine_tore_is_fetched_again(there, local, tmp_path, proxy):
    expected = epoch(local)
    assert_same(epoch(there), expected)
    largest = max(cached(tmp_path), key=cached(tmp_path).get)
    for path in (tmp_path / "cache").glob("[!.]*"):
        if path.name == largest:  # as after a power cut: the size is there, the bytes are not
            path.chmod(0o600)
            path.write_bytes(bytes(path.stat().st_size))
        os.utime(path, (1e9, 1e9))
    before = proxy.gets("/c/0/0") + proxy.gets("attention/c/0")
    assert_same(epoch(there), expected)
    assert proxy.gets("/c/0/0") + proxy.gets("attention/c/0") == before + 1
    assert min(p.stat().st_mtime for p in (tmp_path / "cache").glob("[!.]*")) > 1e9


@pytest.mark.long
def test_nothing_else_in_the_cache_s_folder_is_touched(there, tmp_path):
    folder = tmp_path / "cache"
    (folder / "lost+found").mkdir(parents=True)
    (folder / "thesis.tex").write_bytes(bytes(100_000))
    store = open_with_cache(there, DiskCache(folder, 30_000))
    for index in range(0, 36, 6):
        assert store[index].hidden_states.shape == (3, 24, 32)
    assert (folder / "thesis.tex").stat().st_size == 100_000 and (folder / "lost+found").is_dir()


def test_a_full_disk_gives_up_what_is_not_needed(there, tmp_path, monkeypatch):
    store = open_with_cache(there, DiskCache(tmp_path / "cache", 1 << 30))
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
    assert before - set(cached(tmp_path)), "something went to make room"


def test_a_removed_cache_is_made_again(there, tmp_path):
    with tracestore.open(there) as store:
        assert store[0].hidden_states.size
        shutil.rmtree(tmp_path / "cache")
        assert store[6].hidden_states.size and store[0].attention.size


def test_wrong_settings_are_wrong_usage(there, monkeypatch):
    for name, value in (
        ("TRACESTORE_CACHE_SIZE", "much"),
        ("TRACESTORE_REMOTE_TIMEOUT", "soon"),
        ("TRACESTORE_REMOTE_RETRY_TIMEOUT", "-1"),
        ("TRACESTORE_CACHE_DIR", "/proc/nowhere"),
    ):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            done = command("info", there)
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and value in done.stderr, done.stderr


@pytest.mark.parametrize("ending", ["?versions", "#2", "/../other.zarr", "//x", " x"])
def test_odd_addresses_are_refused(remote, ending):
    with pytest.raises(UsageError, match="found an address with"):
        tracestore.open(remote + ending)


def test_what_asking_again_does_not_change_is_said_at_once(there, proxy):
    proxy.fault = lambda *_: "400"
    began = time.monotonic()
    with pytest.raises(UsageError, match="400"):
        tracestore.open(there)
    assert time.monotonic() - began < 5


@pytest.mark.long
def test_a_web_server_that_has_whole_files_only(local, there, proxy, tmp_path, monkeypatch):
    """If the server ignores ranges, an interrupted download starts again from the first byte."""
    cuts = {}

    def fault(count, method, path):
        cuts[path] = cuts.get(path, 0) + 1
        if "/c/0" not in path:
            return None
        return "cut" if cuts[path] == 1 else "no range"

    proxy.fault = fault
    assert_same(epoch(there), epoch(local))
    assert max(cuts.values()) > 2
    cuts.clear()
    assert not verify_store(there).damaged


def test_an_order_s_bookkeeping_is_even(there, local):
    """After the last batch nothing is counted as needed any more."""
    store = tracestore.open(there)
    loader = tracestore.TraceLoader(local, view="graph", batch_size=5, seed=3)
    ahead = store.prefetch(loader.batch_indices, 0, len(loader), "graph")
    with ahead:
        for batch in range(len(loader)):
            ahead.advance(batch)
            with ahead._lock:
                ahead._plan()
                held = sum(ahead._entries[name].size for name in ahead._uses)
            assert ahead._bytes == held
        ahead.advance(len(loader))
        assert not ahead._uses and not ahead._entries and ahead._bytes == 0
