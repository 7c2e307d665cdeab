# cython: language_level=3, binding=True
"""Memory for batches that is used again.

A Lease is a writable buffer; when nothing refers to it any more (no tensor, no
view, no array saved for a backward pass) its block goes back to the pool it came
from. Everything here runs with the GIL, which is the lock. A forked child has its
own copies of blocks and lists.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo, Py_buffer

cdef extern from "huge_alloc.h" nogil:
    size_t ts_huge_size(size_t n_bytes)
    void *ts_huge_alloc(size_t n_bytes)
    void ts_huge_free(void *memory, size_t n_bytes)

cdef extern from "shared_memory.h" nogil:
    void *ts_shared_map(int fd, size_t size)
    void ts_shared_unmap(void *base, size_t size)
    void ts_shared_incref(void *base)
    void ts_shared_decref(void *base)
    int ts_shared_refcount(const void *base)


cdef class BlockPool:
    """Blocks of at most max_bytes in all (0: no limit), of which up to max_idle wait
    for their next use.

    leased_bytes: in use; held_bytes: in use and idle, what the pool takes from the system.
    """
    cdef list idle
    cdef readonly size_t max_bytes, leased_bytes, held_bytes
    cdef public int max_idle

    def __cinit__(self, size_t max_bytes=0, int max_idle=4):
        self.idle = []
        self.max_bytes = max_bytes
        self.max_idle = max_idle

    def lease(self, size_t num_bytes) -> "Lease | None":
        """A block of at least num_bytes, its bytes those of its last use, or None where max_bytes
        does not allow it now. MemoryError where the system has none."""
        cdef _Block block, chosen = None
        cdef size_t size = ts_huge_size(num_bytes)
        for block in self.idle:
            if block.size >= size and (chosen is None or block.size < chosen.size):
                chosen = block
        if chosen is None:
            # Idle blocks are too small to be of use: they make room.
            while self.idle and self.max_bytes and self.held_bytes + size > self.max_bytes:
                self._drop(self.idle[0])
            if self.max_bytes and self.held_bytes + size > self.max_bytes:
                return None
            if len(self.idle) >= self.max_idle > 0:
                self._drop(min(self.idle, key=_size_of))
            chosen = _Block(size)
            self.held_bytes += size
        else:
            self.idle.remove(chosen)
        self.leased_bytes += chosen.size
        return Lease(self, chosen, num_bytes)

    cdef void _drop(self, _Block block):
        self.idle.remove(block)
        self.held_bytes -= block.size

    cdef void _give_back(self, _Block block):
        self.leased_bytes -= block.size
        if len(self.idle) < self.max_idle:
            self.idle.append(block)
        else:
            self.held_bytes -= block.size

    def trim(self) -> None:
        """Gives idle blocks back to the system."""
        while self.idle:
            self._drop(self.idle[0])


def _size_of(_Block block):
    return block.size


# Without garbage collection: neither can be part of a cycle, and __dealloc__ reads the fields.
@cython.no_gc
cdef class _Block:
    cdef void *base
    cdef size_t size

    def __cinit__(self, size_t size):
        self.base = ts_huge_alloc(size)
        if self.base == NULL:
            raise MemoryError(f"{size:,} bytes for a batch")
        self.size = size

    def __dealloc__(self):
        ts_huge_free(self.base, self.size)


@cython.no_gc
cdef class Lease:
    """A block of a pool as a writable buffer of num_bytes."""
    cdef BlockPool pool
    cdef _Block block
    cdef size_t num_bytes

    def __cinit__(self, BlockPool pool, _Block block, size_t num_bytes):
        self.pool, self.block, self.num_bytes = pool, block, num_bytes

    def __dealloc__(self):
        if self.pool is not None and self.block is not None:
            self.pool._give_back(self.block)

    def __len__(self):
        return self.num_bytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.block.base, <Py_ssize_t>self.num_bytes, 0, flags)


cdef size_t _PAGE = 4096


@cython.no_gc
cdef class SharedSlot:
    """num_bytes of memory that processes share, under a file descriptor which the caller
    owns. It is free while no process uses it: this one by a SlotLease, another one
    after `hold` here, until its lease there ends."""
    cdef void *base
    cdef int leases
    cdef readonly size_t num_bytes

    def __cinit__(self, int fd, size_t num_bytes):
        self.base = ts_shared_map(fd, num_bytes + _PAGE)
        if self.base == NULL:
            raise MemoryError(f"{num_bytes:,} bytes of shared memory for a batch")
        self.num_bytes = num_bytes

    @staticmethod
    def file_bytes(size_t num_bytes) -> int:
        """The size that the file must have."""
        return num_bytes + _PAGE

    def __dealloc__(self):
        ts_shared_unmap(self.base, self.num_bytes + _PAGE)

    def is_free(self) -> bool:
        return self.leases == 0 and ts_shared_refcount(self.base) == 0

    def hold(self) -> None:
        """Counts a process that the slot is sent to."""
        ts_shared_incref(self.base)

    def lease(self, bint received=False) -> SlotLease:
        """Use by this process; `received`: the end of it takes one `hold` back."""
        self.leases += 1
        return SlotLease(self, received)


@cython.no_gc
cdef class SlotLease:
    """A SharedSlot as a writable buffer."""
    cdef SharedSlot slot
    cdef bint received

    def __cinit__(self, SharedSlot slot, bint received):
        self.slot, self.received = slot, received

    def __dealloc__(self):
        if self.slot is not None:
            self.slot.leases -= 1
            if self.received:
                ts_shared_decref(self.slot.base)

    def __len__(self):
        return self.slot.num_bytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, <char *>self.slot.base + _PAGE, <Py_ssize_t>self.slot.num_bytes, 0, flags)
