"""Batches of DataLoader workers in shared memory that is reused and never copied, and the epoch that they share.

A worker gathers into a slot and sends where the tensors lie in it. The parent maps the slot. When
the last tensor on it dies in the parent, the slot is free for the worker's next batch. A slot is an
unnamed file, so nothing is left behind when a process is killed.
"""

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from typing import Any

import torch
from torch.utils.data import get_worker_info

from tracestore._core.blocks import SharedBlock
from tracestore.data.batches.batch import BatchLayout, TensorBatch
from tracestore.data.batches.buffers import BatchBuffer
from tracestore.platform_support import create_memory_file, open_file_of_process

_SIZE_STEP = 4 << 20
# A worker keeps this many idle slots: what a DataLoader fetches ahead by default, and a reserve.
_MAX_IDLE = 4
# Attribute of a batch that lies in a slot.
_HANDLE = "_shared_handle"
# Processes and iterations of workers that a SharedEpoch tells apart at a time.
_EPOCH_ROWS = 1021


class Slot:
    """A SharedBlock and the file under it."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = create_memory_file("tracestore")
        try:
            os.ftruncate(self.fd, SharedBlock.file_size(num_bytes))
            self.memory = SharedBlock(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "memory"):
            close(self.fd)  # modules may be gone already

    def lease(self) -> Any:
        """Return the memory of the slot, which is in use until the result dies."""
        return self.memory.acquire()


class SlotPool:
    """The slots of this process."""

    def __init__(self) -> None:
        self.pid, self.slots = os.getpid(), list[Slot]()

    def acquire(self, num_bytes: int) -> Slot:
        """Return an idle slot of at least num_bytes, a new one if there is none."""
        if self.pid != os.getpid():  # a forked process must not write into its parent's slots
            self.pid, self.slots = os.getpid(), []
        idle = [s for s in self.slots if s.memory.is_free()]
        fitting = [s for s in idle if s.memory.num_bytes >= num_bytes]
        if fitting:
            return min(fitting, key=lambda s: s.memory.num_bytes)
        if len(idle) >= _MAX_IDLE:
            self.slots.remove(min(idle, key=lambda s: s.memory.num_bytes))
        # Batches differ in size. The extra half takes no memory before it is written.
        slot = Slot(-(-num_bytes * 3 // 2 // _SIZE_STEP) * _SIZE_STEP)
        self.slots.append(slot)
        return slot


slots = SlotPool()


def shared_batch(slot: Slot, layout: BatchLayout, metadata: dict[str, Any]) -> Any:
    """Return the batch that lies in a slot.

    It is an ordinary batch, except that its pickle for another process names the slot. If a field
    was replaced in the meantime, the batch is pickled like any other.
    """
    batch = layout.batch(BatchBuffer(slot.lease()), metadata)
    reduction.ForkingPickler.register(type(batch), _reduce)
    batch.__dict__[_HANDLE] = (slot, layout, metadata, dict(_fields(batch)))
    return batch


def _fields(batch: Any) -> dict[str, Any]:
    if isinstance(batch, TensorBatch):
        return {k: v for k, v in batch.__dict__.items() if k != _HANDLE}
    mapping: dict[str, Any] = batch._store._mapping
    return mapping


def _reduce(batch: Any) -> Any:
    handle = batch.__dict__.get(_HANDLE)
    if handle is None:
        return batch.__reduce_ex__(2)
    slot, layout, metadata, original = handle
    fields = _fields(batch)
    if fields.keys() != original.keys() or any(fields[k] is not original[k] for k in original):
        del batch.__dict__[_HANDLE]
        return batch.__reduce_ex__(2)
    slot.memory.incref()
    return _receive, (os.getpid(), slot.fd, slot.memory.num_bytes, layout, metadata)


def _receive(pid: int, fd_of_worker: int, num_bytes: int, layout: BatchLayout, metadata: dict[str, Any]) -> Any:
    # Opening through the worker's file table needs no handshake, in which a dying worker could
    # leave the parent waiting.
    try:
        fd = open_file_of_process(pid, fd_of_worker)
    except OSError as error:
        raise RuntimeError(f"DataLoader worker (pid {pid}) has ended, and its batch is lost: {error}") from None
    try:
        memory = SharedBlock(fd, num_bytes)
    finally:
        os.close(fd)
    return layout.batch(BatchBuffer(memory.acquire(received=True)), metadata)


class SharedEpoch:
    """The epoch of an iterable dataset, which the workers of a DataLoader share with their parent, and with no other process."""

    def __init__(self) -> None:
        self._creator, self._num_begun = os.getpid(), 0
        # Of each process that iterates: its id and the epoch of its next iteration.
        self._next = torch.full((_EPOCH_ROWS, 2), -1)
        self._next[self._creator % _EPOCH_ROWS] = torch.tensor([self._creator, 0])
        # Iterations of workers: number, epoch, serial; serials that were given; the last serial of each worker's id.
        self._begun = torch.full((_EPOCH_ROWS, 3), -1)
        self._serial, self._last = torch.zeros(1, dtype=torch.int64), torch.full((_EPOCH_ROWS,), -1)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()  # a copy of its own, unless it was sent to a worker

    def _share(self) -> None:
        with suppress(RuntimeError):  # Without /dev/shm, a DataLoader cannot have workers.
            for values in (self._next, self._begun, self._serial, self._last):
                values.share_memory_()

    @staticmethod
    def _owner() -> int:
        parent = multiprocessing.parent_process()
        return os.getpid() if get_worker_info() is None or parent is None else int(parent.pid or 0)

    @property
    def next(self) -> int:
        """The epoch of the next iteration."""
        for process in (self._owner(), self._creator):
            found, epoch = self._next[process % _EPOCH_ROWS].tolist()
            if found == process:
                return int(epoch)
        return 0

    @next.setter
    def next(self, epoch: int) -> None:
        owner = self._owner()
        self._next[owner % _EPOCH_ROWS, 1] = epoch
        self._next[owner % _EPOCH_ROWS, 0] = owner

    def begin(self) -> int:
        """Return the epoch of an iteration that begins, and advance to the next one."""
        info, epoch, serial = get_worker_info(), self.next, int(self._serial)
        if info is not None:
            # The workers of an iteration share a random seed, and kept ones have begun equally many. A seed that was
            # set again gives the same number: then this worker's id has begun with the serial of the row before.
            number = (info.seed - info.id + self._num_begun + (info.num_workers << 40)) & (2**63 - 1)
            self._num_begun += 1
            row, worker = self._begun[number % _EPOCH_ROWS], info.id % _EPOCH_ROWS
            # Epoch and serial are read before the row and written after it: a worker that finds another number is early.
            if int(row[0]) == number and int(row[2]) != int(self._last[worker]):
                self._last[worker] = row[2]
                return int(row[1])
            row[1], row[2] = epoch, serial
            row[0] = number
            self._last[worker], self._serial[0] = serial, serial + 1
        self.next = epoch + 1
        return epoch
