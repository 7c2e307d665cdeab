"""Readers while writers are killed, and pinned generations."""

import errno
import fcntl
import json
import os
import pickle
import subprocess
import sys

import pytest

import tracestore
from tests.fault_injection.conftest import ALL
from tests.helpers import ROOT, make_trace, make_traces, read_all, write_store
from tracestore.store.io import fsio
from tracestore.store.maintain.verify import verify_store

KILLS, SECONDS = (200, 600) if ALL else (6, 6)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_eight_readers_while_writers_are_killed(memory_folder):
    store = memory_folder / "shared.zarr"

    def start(*args, **options):
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fault_injection.reader_writer", *map(str, args)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            **options,
        )

    write_store(store, make_traces(1, tokens=2, dim=32))
    readers = [start("read", store, seed, stdin=subprocess.PIPE) for seed in range(8)]
    writing = start("write", store, KILLS, SECONDS, "0")
    output, errors = writing.communicate()
    done = [r.communicate() for r in readers]
    assert writing.returncode == 0, errors
    assert [r.returncode for r in readers] == [0] * 8, "\n".join(e for _, e in done if e)
    counts = [json.loads(out) for out, _ in done]
    print(output.strip(), {name: sum(c[name] for c in counts) for name in ("opened", "reopened", "verified")})
    assert all(c["opened"] > 0 for c in counts) and sum(c["reopened"] for c in counts) > 0
    assert verify_store(store).damaged == {}


def append(store, first, count):
    """Append traces, one commit each."""
    with tracestore.create(store, append=True) as writer:
        for k in range(first, first + count):
            writer.append(make_trace(k))
            writer.flush()


def files_of(store, generation):
    """Return whether manifest, index and columns of a generation exist."""
    names = [f"manifest/{generation:010d}", f"index/{generation:010d}-*.zip", f"columns/{generation:010d}-*.zip"]
    return [len(list(store.glob(name))) == 1 for name in names]


def test_a_pinned_generation_stays_until_it_is_released(tmp_path):
    store = tmp_path / "s.zarr"
    append(store, 0, 1)
    pinned = tracestore.open(store)
    append(store, 1, 7)
    assert files_of(store, 1) == [True] * 3
    assert files_of(store, 5) == [False] * 3 and files_of(store, 7)[0]
    assert verify_store(store).damaged == {} and verify_store(store).leftovers == []
    again = pickle.loads(pickle.dumps(pinned))
    assert again.generation == 1 and read_all(again)[0]["hidden"] == read_all(pinned)[0]["hidden"]
    pinned.close()
    append(store, 8, 1)
    assert files_of(store, 1)[0]  # the second reader pins it as well
    del again
    append(store, 9, 1)
    assert files_of(store, 1) == [False] * 3


def test_a_forked_child_keeps_its_pin(tmp_path):
    store = tmp_path / "s.zarr"
    append(store, 0, 1)
    pinned = tracestore.open(store)
    gate, leave = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(leave)
        os.read(gate, 1)
        os._exit(0 if len(pinned) == 1 and pinned[0].hidden_states.size else 1)
    os.close(gate)
    pinned.close()
    append(store, 1, 3)
    assert files_of(store, 1)[0]
    os.close(leave)
    assert os.waitpid(child, 0)[1] == 0
    append(store, 4, 1)
    assert files_of(store, 1) == [False] * 3


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Readers open the store; a writer refuses, because it cannot exclude other writers."""
    store = tmp_path / "s.zarr"
    append(store, 0, 1)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with tracestore.open(store) as opened:
        assert len(opened) == 1
    assert verify_store(store).damaged == {}
    with pytest.raises(tracestore.TracestoreError, match="No locks"):
        tracestore.create(store, append=True)


@pytest.mark.parametrize("where", ["fsync of the manifest folder", "zarr.json"])
def test_a_commit_that_fails_after_its_rename_is_kept(tmp_path, monkeypatch, where):
    """The generation is visible and may be in use, so its files must stay."""
    store = tmp_path / "s.zarr"
    append(store, 0, 1)
    original, opened = fsio.fsync_path, []

    def fail(path, *args):
        committed = (store / "manifest/0000000002").exists()
        if committed and not opened and (path.name == "manifest") == (where != "zarr.json"):
            opened.append(tracestore.open(store))
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return original(path, *args)

    with tracestore.create(store, append=True) as writer:
        # Attention that is not causal changes zarr.json, which is written after the manifest.
        writer.append(make_trace(1, tokens=3, causal=False))
        monkeypatch.setattr(fsio, "fsync_path", fail)
        with pytest.raises(tracestore.errors.StorageError, match="Input/output error"):
            writer.flush()
        monkeypatch.undo()
        assert verify_store(store).damaged == {}
        writer.append(make_trace(2))
    (reader,) = opened
    assert len(read_all(reader)) == 2 and reader.generation == 2
    with tracestore.open(store) as newest:
        assert newest.question_ids == ["q0", "q1", "q2"] and newest.attention_layout == "square"
    assert verify_store(store).damaged == {} and verify_store(store).leftovers == []
