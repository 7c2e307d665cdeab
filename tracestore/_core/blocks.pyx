# cython: language_level=3, binding=True
"""Reusable memory for batches.

A PooledMemory is a writable buffer. When its last reference is gone (tensors, views, arrays saved for
a backward pass), its block returns to its pool. All functions hold the GIL, which serves as the lock.
A forked child has its own copies of blocks and lists.
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


cdef class MemoryPool:
    """A pool of memory blocks.

    Parameters
    ----------
    max_bytes : int
        Limit of the total size; 0 means no limit.
    max_idle : int
        Number of idle blocks to keep.

    Attributes
    ----------
    used_bytes : int
        Size of the blocks in use.
    total_bytes : int
        Size of all blocks, in use and idle.
    """
    cdef list idle
    cdef readonly size_t max_bytes, used_bytes, total_bytes
    cdef public int max_idle

    def __cinit__(self, size_t max_bytes=0, int max_idle=4):
        self.idle = []
        self.max_bytes = max_bytes
        self.max_idle = max_idle

    def acquire(self, size_t num_bytes) -> "PooledMemory | None":
        """Return a buffer of `num_bytes` with undefined content, or None if the pool is full.

        Raises MemoryError if the system has no memory.
        """
        cdef _Block block, best = None
        cdef size_t size = ts_huge_size(num_bytes)
        for block in self.idle:
            if block.size >= size and (best is None or block.size < best.size):
                best = block
        if best is None:
            # All idle blocks are too small. Free them to stay within the limit.
            while self.idle and self.max_bytes and self.total_bytes + size > self.max_bytes:
                self._free(self.idle[0])
            if self.max_bytes and self.total_bytes + size > self.max_bytes:
                return None
            if len(self.idle) >= self.max_idle > 0:
                self._free(min(self.idle, key=_size_of))
            best = _Block(size)
            self.total_bytes += size
        else:
            self.idle.remove(best)
        self.used_bytes += best.size
        return PooledMemory(self, best, num_bytes)

    cdef void _free(self, _Block block):
        self.idle.remove(block)
        self.total_bytes -= block.size

    cdef void _release(self, _Block block):
        self.used_bytes -= block.size
        if len(self.idle) < self.max_idle:
            self.idle.append(block)
        else:
            self.total_bytes -= block.size

    def trim(self) -> None:
        """Free all idle blocks."""
        while self.idle:
            self._free(self.idle[0])


def _size_of(_Block block):
    return block.size


# No garbage collection in this module: objects cannot be part of a reference cycle, and __dealloc__
# reads the fields.
@cython.no_gc
cdef class _Block:
    cdef void *base
    cdef size_t size

    def __cinit__(self, size_t size):
        self.base = ts_huge_alloc(size)
        if self.base == NULL:
            raise MemoryError(f"cannot allocate {size:,} bytes for a batch")
        self.size = size

    def __dealloc__(self):
        ts_huge_free(self.base, self.size)


@cython.no_gc
cdef class PooledMemory:
    """A block of a MemoryPool as a writable buffer of `num_bytes`."""
    cdef MemoryPool pool
    cdef _Block block
    cdef size_t num_bytes

    def __cinit__(self, MemoryPool pool, _Block block, size_t num_bytes):
        self.pool, self.block, self.num_bytes = pool, block, num_bytes

    def __dealloc__(self):
        if self.pool is not None and self.block is not None:
            self.pool._release(self.block)

    def __len__(self):
        return self.num_bytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.block.base, <Py_ssize_t>self.num_bytes, 0, flags)


# The reference count of a shared block has a page of its own.
cdef size_t _PAGE = 4096


@cython.no_gc
cdef class SharedBlock:
    """Memory of `num_bytes` that processes share through a file descriptor, which the caller owns.

    The block is free while no process uses it. This process uses it by a SharedBuffer. Another process
    uses it from the call of `incref` here until its SharedBuffer, acquired with `received`, is gone.
    """
    cdef void *base
    cdef int num_buffers
    cdef readonly size_t num_bytes

    def __cinit__(self, int fd, size_t num_bytes):
        self.base = ts_shared_map(fd, num_bytes + _PAGE)
        if self.base == NULL:
            raise MemoryError(f"cannot map {num_bytes:,} bytes of shared memory for a batch")
        self.num_bytes = num_bytes

    @staticmethod
    def file_size(size_t num_bytes) -> int:
        """Return the required size of the file in bytes."""
        return num_bytes + _PAGE

    def __dealloc__(self):
        ts_shared_unmap(self.base, self.num_bytes + _PAGE)

    def is_free(self) -> bool:
        """Return whether no process uses the block."""
        return self.num_buffers == 0 and ts_shared_refcount(self.base) == 0

    def incref(self) -> None:
        """Count a process that the block is sent to."""
        ts_shared_incref(self.base)

    def acquire(self, bint received=False) -> SharedBuffer:
        """Return the block as a buffer. With `received`, releasing it undoes one `incref`."""
        self.num_buffers += 1
        return SharedBuffer(self, received)


@cython.no_gc
cdef class SharedBuffer:
    """A SharedBlock as a writable buffer."""
    cdef SharedBlock block
    cdef bint received

    def __cinit__(self, SharedBlock block, bint received):
        self.block, self.received = block, received

    def __dealloc__(self):
        if self.block is not None:
            self.block.num_buffers -= 1
            if self.received:
                ts_shared_decref(self.block.base)

    def __len__(self):
        return self.block.num_bytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, <char *>self.block.base + _PAGE, <Py_ssize_t>self.block.num_bytes, 0, flags)
