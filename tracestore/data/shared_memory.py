"""Batches from a DataLoader's worker to its parent without a copy, in memory used again.

The worker gathers into a slot of shared memory and sends where the tensors lie in it;
the parent maps the slot, and when the last tensor on it dies there, the slot is free
for the worker's next batch. A slot is a file without a name: nothing is left behind,
whichever process is killed.
"""

import os
from multiprocessing import reduction
from typing import Any

from tracestore._core.blocks import SharedSlot
from tracestore.data.batch import BatchMetadata, GraphBatch, Layout, SequenceBatch
from tracestore.data.buffers import PooledBuffer
from tracestore.platform_support import create_memory_file, has_memory_files, open_file_of_process

_ROUND = 4 << 20
# How many idle slots a worker keeps: what DataLoader fetches ahead by default, and some.
_MAX_IDLE = 4


class Slot:
    """A SharedSlot and the file under it."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = create_memory_file("tracestore")
        try:
            os.ftruncate(self.fd, SharedSlot.file_bytes(num_bytes))
            self.memory = SharedSlot(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            os.close(self.fd)

    def lease(self) -> Any:
        return self.memory.lease()


class _Slots:
    """The slots of one process."""

    def __init__(self) -> None:
        self.pid, self.slots = os.getpid(), list[Slot]()

    def free(self, num_bytes: int) -> Slot:
        idle = [s for s in self.slots if s.memory.is_free()]
        fitting = [s for s in idle if s.memory.num_bytes >= num_bytes]
        if fitting:
            return min(fitting, key=lambda s: s.memory.num_bytes)
        if len(idle) >= _MAX_IDLE:
            self.slots.remove(min(idle, key=lambda s: s.memory.num_bytes))
        # Half as much again, which costs nothing before it is written: batches differ in size.
        slot = Slot(-(-num_bytes * 3 // 2 // _ROUND) * _ROUND)
        self.slots.append(slot)
        return slot


_mine = _Slots()


def is_available() -> bool:
    """Whether this system has what it takes; elsewhere torch's own sharing does it."""
    return has_memory_files()


def free_slot(num_bytes: int) -> Slot:
    """A slot of this process that nobody uses."""
    global _mine
    if _mine.pid != os.getpid():
        _mine = _Slots()
    return _mine.free(num_bytes)


def shared_batch(slot: Slot, layout: Layout, values: BatchMetadata) -> Any:
    """The batch in a slot. It is an ordinary one; between processes it goes by its slot,
    unless a field of it was replaced meanwhile."""
    batch = layout.batch(PooledBuffer(slot.lease()), values)
    reduction.ForkingPickler.register(type(batch), _reduce)
    batch.__dict__["_sendable"] = (slot, layout, values, dict(_fields(batch)))
    return batch


def _fields(batch: Any) -> dict[str, Any]:
    if isinstance(batch, SequenceBatch | GraphBatch):
        return {k: v for k, v in batch.__dict__.items() if k != "_sendable"}
    mapping: dict[str, Any] = batch._store._mapping
    return mapping


def _reduce(batch: Any) -> Any:
    sent = batch.__dict__.get("_sendable")
    if sent is None:
        return batch.__reduce_ex__(2)
    slot, layout, values, fields = sent
    found = _fields(batch)
    if found.keys() != fields.keys() or any(found[k] is not fields[k] for k in fields):
        del batch.__dict__["_sendable"]
        return batch.__reduce_ex__(2)
    slot.memory.hold()
    return _receive, (os.getpid(), slot.fd, slot.memory.num_bytes, layout, values)


def _receive(pid: int, number: int, num_bytes: int, layout: Layout, values: BatchMetadata) -> Any:
    # Opened through the worker's table of files: no handshake that a dying worker could
    # leave the parent waiting in.
    try:
        fd = open_file_of_process(pid, number)
    except OSError as error:
        raise RuntimeError(f"DataLoader worker (pid {pid}) is gone, and the batch it sent with it: {error}") from None
    try:
        memory = SharedSlot(fd, num_bytes)
    finally:
        os.close(fd)
    return layout.batch(PooledBuffer(memory.lease(received=True)), values)
