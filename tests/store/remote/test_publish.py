"""Writing of remote stores: commits are complete or do not happen."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import tracestore
from tests.helpers import (
    ROOT,
    command,
    convert,
    error_of,
    field_flags,
    make_trace,
    make_traces,
    read_all,
    tree_bytes,
    write_pickle,
    write_store,
)
from tests.store.remote.stores import committed_files
from tests.tiers import long
from tracestore.errors import RemoteError, StoreLockedError, UsageError
from tracestore.store.maintain.clean import clean_store
from tracestore.store.maintain.verify import verify_store
from tracestore.store.remote.object_store import ObjectStore
from tracestore.store.remote.publish import RemoteTarget


def objects_of(address):
    """Return the bytes of all objects of a remote store, by path."""
    objects = ObjectStore(address)
    return {path: objects.read(path) for path in objects.list_recursive("")}


def assert_same_store(address, folder):
    """Assert that the newest generation of a remote store equals that of a local one, byte for byte."""
    local = tree_bytes(folder)
    newest = sorted(name for name in local if name.startswith("manifest/"))[-1]
    found = objects_of(address)
    assert found.pop("manifest/newest").decode().strip() == newest.removeprefix("manifest/")
    assert found == local


def test_convert_uploads_the_bytes_of_a_local_store(remote, folder, tmp_path):
    done = convert(folder, remote, "--json")
    assert json.loads(done.stdout)["store"] == remote
    convert(folder, tmp_path / "local.zarr")
    assert_same_store(remote, tmp_path / "local.zarr")
    assert not list((tmp_path / "cache" / ".writing").iterdir())
    again = json.loads(convert(folder, remote, "--json").stdout)
    assert again["num_sources_skipped_existing"] == 2 and again["num_traces_new"] == 0
    assert_same_store(remote, tmp_path / "local.zarr")


def test_convert_continues_a_remote_store(remote, folder, tmp_path):
    convert(folder, remote)
    convert(folder, tmp_path / "local.zarr")
    write_pickle(folder / "more.pkl", [t | {"question_id": f"m{k}"} for k, t in enumerate(make_traces(3, seed=1))])
    for destination in (remote, tmp_path / "local.zarr"):
        convert(folder, destination)
    assert_same_store(remote, tmp_path / "local.zarr")


def test_new_files_are_read_by_the_layout_of_a_remote_store(remote, tmp_path):
    lines = ("hidden_states = *.pkl : []/hidden_states -> L S D", "question_id = *.pkl : []/key")
    for words, numbers in ((field_flags(*lines), range(3)), ((), range(3, 5))):
        write_pickle(
            tmp_path / f"in/{len(numbers)}.pkl",
            [{"hidden_states": make_trace(k)["hidden_states"], "key": f"k{k}"} for k in numbers],
        )
        for destination in (remote, tmp_path / "local.zarr"):
            convert(tmp_path / "in", destination, *words)
    assert_same_store(remote, tmp_path / "local.zarr")
    with tracestore.open(remote) as store:
        assert store.question_ids == [f"k{k}" for k in range(5)]


@pytest.mark.long
def test_lens_is_uploaded(remote, tmp_path):
    unembedding = np.arange(240, dtype="f4").reshape(30, 8)
    traces = make_traces(2, layers=2, dim=8)
    for path in (remote, tmp_path / "local.zarr"):
        with tracestore.create(path) as writer:
            writer.append(traces[0])
            writer.set_lens(unembedding, norm="none")
        with tracestore.create(path, append=True) as writer:
            writer.set_lens(unembedding, norm="none")
            with pytest.raises(UsageError, match="another lens"):
                writer.set_lens(unembedding + 1, norm="none")
            writer.append(traces[1])
    assert_same_store(remote, tmp_path / "local.zarr")
    with tracestore.open(remote) as store:
        assert np.array_equal(store.lens.logits(np.eye(8, dtype="f4")), unembedding.T)
    assert verify_store(remote).damaged == {}


def test_create_writes_and_appends(remote):
    traces = make_traces(5)
    with tracestore.create(remote) as writer:
        for trace in traces[:3]:
            writer.append(trace, score=0.25)
        writer.flush()
        with tracestore.open(remote) as store:
            assert len(store) == 3
        writer.append(traces[3])
    with pytest.raises(UsageError, match="the store exists"):
        tracestore.create(remote)
    with tracestore.create(remote, append=True) as writer:
        writer.append(traces[4])
    with tracestore.open(remote) as store:
        assert store.question_ids == [t["question_id"] for t in traces]
        assert store[4].answer == traces[4]["generated_answer_clean"] and store.scores[0] == 0.25


def test_duplicates_are_compared_by_content(remote):
    traces = make_traces(2)
    write_store(remote, traces)
    with tracestore.create(remote, append=True) as writer:
        writer.append(traces[0])
        with pytest.raises(tracestore.InvalidInputError, match="generated_answer_clean"):
            writer.append(traces[1] | {"generated_answer_clean": "another one"})
    with tracestore.open(remote) as store:
        assert len(store) == 2


@pytest.mark.long
def test_score_merge_and_subset_accept_urls(remote, store_path, tmp_path):
    merged, part = remote.replace("/store.zarr", "/merged.zarr"), remote
    command("merge", store_path, merged, check=0)
    command("merge", store_path, tmp_path / "merged.zarr", check=0)
    assert_same_store(merged, tmp_path / "merged.zarr")
    (tmp_path / "scores.csv").write_text("question_id,score\nq10,0.75\n")
    for store in (merged, tmp_path / "merged.zarr"):
        command("score", store, "--scores", tmp_path / "scores.csv", check=0)
    assert_same_store(merged, tmp_path / "merged.zarr")
    (tmp_path / "ids").write_text("q1\nq3\n")
    done = command("subset", merged, part, "--ids", tmp_path / "ids", "--json", check=0)
    assert json.loads(done.stdout)["num_traces"] == 2
    done = command("merge", merged, merged)
    assert done.returncode == 2 and "is a source and the destination" in done.stderr
    done = command("score", f"{remote}-not", "--scores", tmp_path / "scores.csv")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no such store" in done.stderr


@pytest.mark.parametrize("fault", [None, *long("lost", "503", "cut")])
@pytest.mark.long
def test_a_merge_in_a_bucket_lets_the_server_copy(own_remote_store, local_store, proxy, tmp_path, fault):
    merged, puts = own_remote_store.replace("/store.zarr", "/merged.zarr"), []

    def at(count, method, path):
        puts.append(path) if method == "PUT" else None
        return fault if method == "PUT" and puts.count(path) == 1 else None

    proxy.fault = at
    command("merge", own_remote_store, merged, check=0)
    proxy.fault = lambda *_: None
    read = {path.split("/store.zarr/")[-1] for method, path in proxy.requests if method == "GET"}
    assert read and not [path for path in read if "/c/" in path]
    command("merge", local_store, tmp_path / "merged.zarr", check=0)
    assert_same_store(merged, tmp_path / "merged.zarr")
    command("merge", merged, tmp_path / "again.zarr", check=0)
    assert tree_bytes(tmp_path / "again.zarr") == tree_bytes(tmp_path / "merged.zarr")


@pytest.mark.long
def test_a_merge_in_a_bucket_finds_missing_objects_and_other_sizes(own_remote_store, local_store):
    merged, objects = own_remote_store.replace("/store.zarr", "/merged.zarr"), ObjectStore(own_remote_store)
    path = next(p for p in objects.list_recursive("segments") if "/attention/c/" in p)
    objects.put(path, b"short")
    assert "found 5 bytes" in error_of("merge", own_remote_store, merged, code=3)
    objects.delete([path])
    assert f"{path}: missing" in error_of("merge", own_remote_store, merged, code=3)
    assert not [p for p in objects_of(merged) if p.startswith("manifest/")]


@pytest.mark.long
def test_old_generations_are_removed(remote):
    write_store(remote, make_traces(9), commit_after=range(9))
    found = objects_of(remote)
    manifests = sorted(p for p in found if p.startswith("manifest/0"))
    assert manifests == ["manifest/0000000008", "manifest/0000000009"]
    with tracestore.open(remote) as store:
        assert {entry.path for entry in committed_files(store)} <= set(found)
    assert sum(p.startswith("index/") for p in found) <= 8


@pytest.mark.long
def test_overwrite_keeps_the_store_until_all_sources_are_accepted(remote, folder, tmp_path):
    convert(folder, remote)
    before = objects_of(remote)
    write_pickle(tmp_path / "bad.pkl", [{"question_id": "no arrays"}])
    write_pickle(tmp_path / "in/0.pkl", make_traces(2, seed=2))
    write_pickle(tmp_path / "in/1.pkl", make_traces(2, seed=3))
    for k in range(2):
        convert(tmp_path / f"in/{k}.pkl", tmp_path / f"{k}.zarr")
    command("convert", tmp_path / "bad.pkl", remote, "--overwrite", check=3)
    command("convert", tmp_path / "in", remote, "--overwrite", check=3)
    command("merge", tmp_path / "0.zarr", tmp_path / "1.zarr", remote, "--overwrite", check=3)
    with pytest.raises(ZeroDivisionError), tracestore.create(remote, overwrite=True) as writer:
        writer.append(make_traces(1)[0])
        raise ZeroDivisionError
    assert objects_of(remote) == before
    command("convert", tmp_path / "in", remote, "--overwrite", "--plan", tmp_path / "plan.json", check=0)
    command("work", tmp_path / "plan.json", check=0)
    command("commit", tmp_path / "plan.json", check=3)
    assert objects_of(remote).items() >= before.items()
    write_pickle(tmp_path / "good.pkl", make_traces(3, seed=1))
    convert(tmp_path / "good.pkl", remote, "--overwrite")
    convert(tmp_path / "good.pkl", tmp_path / "local.zarr")
    with tracestore.open(remote) as store, tracestore.open(tmp_path / "local.zarr") as local:
        assert store.generation == 2 and [t["hidden"] for t in read_all(store)] == [
            t["hidden"] for t in read_all(local)
        ]
        assert store.info()["num_segments"] == 1
    assert verify_store(remote).damaged == {}


@pytest.mark.long
def test_writing_recovers_from_errors_of_the_server(remote, folder, tmp_path, proxy):
    rng = random.Random(11)
    plan = [rng.choice(["503", "cut", "lost", None, None, None]) for _ in range(100_000)]
    proxy.fault = lambda count, method, path: plan[count]
    convert(folder, remote)
    proxy.fault = lambda *_: None
    convert(folder, tmp_path / "local.zarr")
    assert_same_store(remote, tmp_path / "local.zarr")


@pytest.mark.long
def test_an_outage_keeps_committed_traces_and_the_writer_can_continue(remote, proxy, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.5")
    traces = make_traces(4)
    writer = tracestore.create(remote)
    writer.append(traces[0])
    writer.flush()
    proxy.fault = lambda count, method, path: "503" if method == "PUT" and "/segments/" in path else None
    writer.append(traces[1])
    with pytest.raises(RemoteError, match="failed for"):
        writer.flush()
    proxy.fault = lambda *_: None
    with tracestore.open(remote) as store:
        assert len(store) == 1
    # The same writer can continue, and no committed trace is lost.
    writer.append(traces[2])
    writer.close()
    with tracestore.open(remote) as store:
        assert store.question_ids == [t["question_id"] for t in traces[:3]]


@pytest.mark.long
def test_a_killed_conversion_can_be_continued(remote, folder, tmp_path, proxy):
    """After a kill at any moment the store is readable, and an uninterrupted conversion completes it."""
    for k in range(6):
        write_pickle(
            folder / f"more_{k}.pkl", [t | {"question_id": f"m{k}_{t['question_id']}"} for t in make_traces(3)]
        )
    words = [sys.executable, "-m", "tracestore.convert", str(folder), remote]
    proxy.fault = lambda count, method, path: 0.02
    rng = random.Random(7)
    for _ in range(int(os.environ.get("TRACESTORE_REMOTE_KILLS", "4"))):
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1 + 3 * rng.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        with contextlib.suppress(UsageError), tracestore.open(remote) as store:
            for trace in store:
                trace.copy()
    proxy.fault = lambda *_: None
    convert(folder, remote)
    convert(folder, tmp_path / "local.zarr")
    assert_same_store(remote, tmp_path / "local.zarr")


def test_destinations_that_cannot_be_written_are_a_usage_error(remote, folder, proxy):
    done = convert(folder, "s3://no-such-bucket/store.zarr", check=2)
    assert done.stderr.count("\n") == 1 and "no such bucket" in done.stderr
    ObjectStore(remote).put("notes.txt", b"of the user")
    done = convert(folder, remote, check=2)
    assert done.stderr.count("\n") == 1 and "not a store" in done.stderr
    assert objects_of(remote) == {"notes.txt": b"of the user"}
    proxy.fault = lambda *_: "403"
    done = convert(folder, remote, check=2)
    assert done.stderr.count("\n") == 1 and "no permission" in done.stderr


@pytest.mark.long
def test_a_failed_first_commit_can_be_repeated(remote, proxy, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.5")
    proxy.fault = lambda count, method, path: "503" if method == "PUT" and "/columns/" in path else None
    done = convert(folder, remote, check=1)
    assert done.stderr.count("\n") == 1 and "failed for" in done.stderr
    proxy.fault = lambda *_: None
    assert objects_of(remote), "the failed commit uploaded some files"
    convert(folder, remote)
    convert(folder, tmp_path / "local.zarr")
    assert_same_store(remote, tmp_path / "local.zarr")


@pytest.mark.long
def test_a_trace_whose_commit_failed_can_be_appended_again(remote, proxy, monkeypatch):
    monkeypatch.setenv("TRACESTORE_REMOTE_RETRY_TIMEOUT", "0.5")
    trace = make_traces(1)[0]
    writer = tracestore.create(remote)
    writer.append(trace)
    proxy.fault = lambda count, method, path: "503" if method == "PUT" and "/segments/" in path else None
    with pytest.raises(RemoteError):
        writer.flush()
    proxy.fault = lambda *_: None
    writer.append(trace)
    writer.close()
    with tracestore.open(remote) as store:
        assert len(store) == 1


@pytest.mark.long
def test_several_writers_add_to_one_store(remote):
    """Each commit that another one has preceded resolves its keys again; nothing is lost or twice."""
    traces = make_traces(9)
    writers = [tracestore.create(remote, append=True) for _ in range(3)]
    for k, trace in enumerate(traces):
        writers[k % 3].append(trace, score=k / 10)
        writers[(k + 1) % 3].append(trace, score=k / 10)
        writers[k % 3].flush()
    for writer in writers:
        writer.close()
    with tracestore.open(remote) as store:
        assert sorted(store.question_ids) == [t["question_id"] for t in traces]
        expected = {t["question_id"]: np.stack(t["hidden_states"]).tobytes() for t in traces}
        assert {t["id"] if "id" in t else t["question_id"]: t["hidden"] for t in read_all(store)} == expected
    assert verify_store(remote).damaged == {}


@pytest.mark.parametrize("fault", ["lost", "503", "cut"])
@pytest.mark.long
def test_a_fault_at_each_put_of_a_commit(remote, proxy, fault):
    """A repeated request neither loses a commit nor applies it twice."""
    traces = make_traces(8)
    with tracestore.create(remote, append=True) as writer:
        for k, trace in enumerate(traces):
            puts = []

            def at(count, method, path, puts=puts, k=k):
                if method != "PUT":
                    return None
                puts.append(path)
                return fault if len(puts) == k + 1 or ("/manifest/" in path and puts.count(path) == 1) else None

            writer.append(trace)
            proxy.fault = at
            writer.flush()
    proxy.fault = lambda *_: None
    with tracestore.open(remote) as store:
        assert list(store.question_ids) == [t["question_id"] for t in traces] and store.generation == len(traces)
    assert verify_store(remote).damaged == {}


@pytest.mark.long
def test_a_manifest_that_old_ones_made_room_for_is_not_a_commit(remote):
    """Others have committed and removed the next generation: its number is free, and still the commit comes too late."""
    traces = make_traces(6)
    with tracestore.create(remote, append=True) as late:
        late.append(traces[0])
        with tracestore.create(remote, append=True) as writer:
            for trace in traces[1:]:
                writer.append(trace)
                writer.flush()
        assert ObjectStore(remote).size("manifest/0000000001") is None
    with tracestore.open(remote) as store:
        assert sorted(store.question_ids) == [t["question_id"] for t in traces] and store.generation == 6
    assert verify_store(remote).damaged == {}


def test_a_writer_of_a_replaced_store_commits_nothing(remote):
    """The new store lacks the traces that the writer has left out because the old one had them."""
    traces = make_traces(3)
    with tracestore.create(remote) as writer:
        writer.append(traces[0])
    with tracestore.create(remote, append=True) as late:
        late.append(traces[0])
        late.append(traces[1])
        with tracestore.create(remote, overwrite=True) as writer:
            writer.append(traces[2])
        with pytest.raises(StoreLockedError, match="another writer has replaced the store"):
            late.flush()
    with tracestore.open(remote) as store:
        assert list(store.question_ids) == ["q2"]


@pytest.mark.long
def test_clean_removes_what_no_generation_names(remote):
    write_store(remote, make_traces(3), commit_after=[0])
    before, objects = objects_of(remote), ObjectStore(remote)
    for path in ("segments/0123abcd/rows.zip", "segments/0123abcd/zarr.json", "index/0000000002-0badcafe.zip"):
        objects.put(path, b"left")
    assert clean_store(remote, older_than_s=3600).removed == []
    report = clean_store(remote, older_than_s=-5)
    assert sorted(report.removed) == ["index/0000000002-0badcafe.zip", "segments/0123abcd"] and report.num_bytes == 12
    assert objects_of(remote) == before
    with pytest.raises(UsageError, match="no such store"):
        clean_store(f"{remote}-not", older_than_s=0)


def test_extraction_writes_to_a_remote_store(remote, tmp_path):
    from tracestore.extract import extraction
    from tracestore.extract.questions import Question
    from tracestore.store.io.files import RemoteURL

    questions = [Question(f"q{k}", "?", ("a",)) for k in range(5)]
    traces = {t["question_id"]: t for t in make_traces(5)}
    asked = []

    def answer(chosen):
        asked.extend(q.question_id for q in chosen)
        return [dict(traces[q.question_id]) for q in chosen]

    for count in (2, 5):
        steps = extraction.extract_to_store(
            RemoteURL(remote), questions[:count], answer, attention="mean", batch_size=2
        )
        assert len(list(steps)) == count
    assert asked == [f"q{k}" for k in range(5)]
    with tracestore.open(remote) as store:
        assert list(store.question_ids) == asked


@pytest.mark.parametrize(
    ("content", "expected"), [(b"0000000004\n", False), (b"0000000005\n", True), (b"0000000006\n", True), (b"x", False)]
)
def test_a_writer_that_lists_late_puts_no_older_generation_back(content, expected):
    """Another writer may have committed and put manifest/newest since the listing."""
    target = RemoteTarget.__new__(RemoteTarget)
    target._newest, target._object_store = 5, SimpleNamespace(read=lambda _: content)
    assert target._names_newest() is expected
