"""Verification of remote stores."""

import os
from dataclasses import replace

import pytest

import tracestore
from tests.helpers import command, make_traces, segment_of
from tests.malicious_inputs.stores import Store
from tests.store.remote.stores import upload
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.store.maintain.clean import clean_store
from tracestore.store.maintain.verify import repair_store, verify_store
from tracestore.store.remote.object_store import ObjectStore


@pytest.mark.long
def test_every_damaged_object_is_found(own_remote_store, local_store, tmp_path):
    assert verify_store(own_remote_store) == replace(verify_store(local_store), leftovers=[])
    assert not verify_store(own_remote_store, quick=True).damaged
    objects = ObjectStore(own_remote_store)
    for path in (
        f"{segment_of(local_store, 1)}/attention/c/0",
        f"{segment_of(local_store, 2)}/rows.zip",
        "zarr.json",
        f"index/{sorted(os.listdir(local_store / 'index'))[-1]}",
    ):
        data = objects.read(path)
        objects.put(path, data[:-1] + bytes([data[-1] ^ 1]))
        assert set(verify_store(own_remote_store).damaged) == {path}
        objects.delete([path])
        assert verify_store(own_remote_store, quick=True).damaged[path] == "missing"
        objects.put(path, data)
    objects.put("segments/00000099/x", b"leftover")
    assert "segments/00000099/x" in command("verify", own_remote_store, check=0).stdout
    with pytest.raises(UsageError, match="on this machine"):
        repair_store(own_remote_store)
    with pytest.raises(UsageError, match="no such store"):
        verify_store(f"{own_remote_store}-not")


@pytest.mark.long
def test_a_lost_newest_manifest_is_found_by_its_copy(remote):
    """`clean` refuses then: it would take the commit for one that never happened."""
    with tracestore.create(remote) as writer:
        for trace in make_traces(3):
            writer.append(trace)
            writer.flush()
    objects, name = ObjectStore(remote), "manifest/0000000003"
    data = objects.read(name)
    objects.delete([name])
    before = objects.list_recursive("")
    with pytest.raises(CorruptStoreError, match=f"{name}: missing, but its copy .*copy {remote}/index/.* to {remote}/"):
        clean_store(remote, older_than_s=0)
    assert name in verify_store(remote).damaged and objects.list_recursive("") == before
    objects.put(name, data)
    assert verify_store(remote).damaged == {}


@pytest.mark.long
def test_contradictions_with_correct_checksums_are_found(local_store, remote):
    for name in sorted(os.listdir(local_store / "manifest"))[:-1]:
        (local_store / "manifest" / name).unlink()  # An older generation has the part with its first checksum.
    store = Store(local_store)
    arrays = store.part(0)
    arrays["num_tokens"][0] += 1
    store.set_part(0, arrays)
    store.seal()
    upload(local_store, remote)
    expected = verify_store(local_store).damaged
    assert any("num_tokens" in reason for reason in expected.values())
    assert verify_store(remote).damaged == expected
