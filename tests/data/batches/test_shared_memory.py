"""Batches from worker processes: equal values, reused memory, no files or processes left."""

import contextlib
import gc
import os

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import tracestore
from tests.data.expected_batches import assert_same_batches
from tests.helpers import make_traces, write_store
from tests.machine import wait_until
from tracestore.data.batches import shared_memory

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def store(tmp_path):
    write_store(tmp_path / "s.zarr", make_traces(40, layers=4, dim=64), score=0.3)
    return tmp_path / "s.zarr"


def batches(store, view, **options):
    dataset = tracestore.TraceIterableDataset(store, view, batch_size=4, shuffle="global", seed=2)
    return DataLoader(dataset, batch_size=None, **options)


@pytest.mark.parametrize(
    ("view", "context"),
    [
        ("sequence", "fork"),
        ("graph", "fork"),
        pytest.param("graph", "spawn", marks=pytest.mark.long),
        pytest.param("sequence", "forkserver", marks=pytest.mark.long),
    ],
)
def test_batches_of_workers_keep_their_values(store, view, context):
    """A slot whose batch is held is not overwritten while the workers continue."""
    expected = batches(store, view)
    loader = batches(store, view, num_workers=2, multiprocessing_context=context)
    # Each epoch has new workers; a process that is not forked starts for seconds.
    epochs = [list(loader) for _ in range(2 if context == "fork" else 1)]
    for held in epochs:
        assert len(held) == 10
        assert_same_batches(held, expected)
    if view == "graph":
        assert len(epochs[0][0].to_data_list()) == 16


def test_slots_are_reused(store):
    """A held batch keeps its slot; after it dies, the next batch uses the slot."""
    slots = shared_memory.SlotPool()
    one = slots.acquire(1000)
    lease = one.lease()
    two = slots.acquire(1000)
    assert two is not one
    del lease
    assert slots.acquire(500) in (one, two) and len(slots.slots) == 2
    one.memory.incref()  # sent to another process
    assert not one.memory.is_free()
    received = shared_memory.SharedBlock(one.fd, one.memory.num_bytes).acquire(received=True)
    memoryview(received)[0:1] = b"x"
    assert not one.memory.is_free()
    del received
    assert one.memory.is_free() and bytes(memoryview(one.lease())[0:1]) == b"x"


class Changed(torch.utils.data.IterableDataset):
    """A user's dataset that changes batches in the worker."""

    def __init__(self, store):
        self.inner = tracestore.TraceIterableDataset(store, "graph", batch_size=4, shuffle="none")

    def __iter__(self):
        for batch in self.inner:
            batch.x = batch.x.float() * 2
            yield batch


def test_changes_made_in_the_worker_arrive(store):
    plain = list(tracestore.TraceLoader(store, "graph", batch_size=4, shuffle="none"))
    changed = list(DataLoader(Changed(store), batch_size=None, num_workers=1))
    assert all(torch.equal(a.x, b.x.float() * 2) for a, b in zip(changed, plain, strict=True))


def _stopped_early(store):
    """Leave an epoch over two workers early. Return the ids of all processes of it."""
    pids = [os.getpid()]
    for k, _ in enumerate(batches(store, "graph", num_workers=2)):
        if k == 3:
            pids += [p.pid for p in psutil.Process().children()]
            break
    return pids


def _open_files():
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own, closed by now
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


@pytest.mark.long
def test_no_file_or_process_is_left(store):
    # The first epoch starts processes that exist once, such as multiprocessing's tracker.
    _stopped_early(store)
    gc.collect()
    before = set(_open_files().values())
    children = set(psutil.Process().children())
    pids = _stopped_early(store)
    gc.collect()
    # The feeder threads of multiprocessing's queues close their pipes later.
    wait_until(lambda: not [n for n in os.listdir("/dev/shm") if any(f"_{pid}_" in n for pid in pids)])
    wait_until(lambda: not set(_open_files().values()) - before)
    wait_until(lambda: not set(psutil.Process().children()) - children)
