# cython: language_level=3, binding=True
"""Read-only file maps as Python buffers.

A file that is cut short while it is mapped ends the process where its lost pages are
touched. What reads maps here and in the other modules of the core runs under a guard
(csrc/sigbus_guard.h) and raises instead: CorruptStoreError for a file of a store, else
TruncatedFileError, with the file's name. A buffer of a map that Python code reads itself has
no such guard.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo, Py_buffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t

import os

from tracestore.errors import TruncatedFileError, CorruptStoreError

cdef extern from "error.h":
    int TS_ERR_IO, TS_ERR_SIZE, TS_ERR_FAULT
    const char *ts_strerror(int code)

cdef extern from "sigbus_guard.h" nogil:
    ctypedef int ts_sigbus_guard_runner(int (*work)(void *) noexcept, void *context, const void **fault, int is_again)
    ts_sigbus_guard_runner *ts_sigbus_guard_own()
    int ts_sigbus_guard(int (*work)(void *) noexcept, void *context)
    const void *ts_sigbus_fault()

cdef extern from "map.h" nogil:
    int ts_map_open(ts_map *map, const char *path, int64_t expected_size)
    int ts_map_descriptor(ts_map *map, int fd, int64_t expected_size)
    void ts_map_close(ts_map *map)
    int ts_map_record_tail(ts_map *map)
    int ts_map_copy(const ts_map *map, size_t start, size_t num_bytes, void *out)
    int ts_shard_check(const unsigned char *base, size_t size, uint64_t num_chunks, uint64_t chunk_bytes)

cdef unsigned char _empty = 0

# The maps of this process, linked through them; the GIL is the lock.
cdef void *_maps = NULL


cdef void *guard_runner() noexcept:
    return <void *>ts_sigbus_guard_own()


cdef int raise_fault(const void *address) except -1:
    cdef void *at = _maps
    cdef MappedFile mapped
    while at != NULL:
        mapped = <MappedFile>at
        if <const unsigned char *>address >= mapped.map.base and (
                <size_t>(<const unsigned char *>address - mapped.map.base) < mapped.map.size):
            mapped.lose()
        at = mapped.next_map
    raise TruncatedFileError("memory that was read is gone: the file behind it was cut short")


cdef struct _Shard:
    const unsigned char *base
    size_t size
    uint64_t num_chunks, chunk_bytes


cdef int _check_shard(void *context) noexcept nogil:
    cdef _Shard *s = <_Shard *>context
    return ts_shard_check(s.base, s.size, s.num_chunks, s.chunk_bytes)


cdef int _check_tail(void *context) noexcept nogil:
    return ts_map_is_intact(<ts_map *>context)


# Without garbage collection: it cannot be part of a cycle, and __dealloc__ reads the fields.
@cython.no_gc
cdef class MappedFile:
    """A whole file mapped read-only, for as long as this object or a buffer of it
    lives. OSError where it cannot be opened, ValueError where its size is not
    expected_size (-1 takes any). name: the path in its store that errors give; without
    it the file is of no store. fd: the file, open to be read, which stays open; without it
    the one at `path` is opened."""

    def __cinit__(self, path, int64_t expected_size=-1, str name=None, int fd=-1):
        cdef bytes encoded = os.fsencode(path)
        cdef const char *file = encoded
        cdef int ret
        self.path, self.is_of_store = encoded, name is not None
        self.name = os.fsdecode(encoded) if name is None else name
        with nogil:
            if fd >= 0:
                ret = ts_map_descriptor(&self.map, fd, expected_size)
            else:
                ret = ts_map_open(&self.map, file, expected_size)
        if ret == TS_ERR_IO:
            raise OSError(errno, os.strerror(errno), os.fsdecode(encoded))
        if ret == TS_ERR_SIZE:
            found = (os.fstat(fd) if fd >= 0 else os.stat(encoded)).st_size
            raise ValueError(f"{found} bytes where {expected_size} are expected")
        self.size = self.map.size
        self.link()
        with nogil:
            ret = ts_map_record_tail(&self.map)
        if ret != 0:
            self.lose()

    cdef void link(self) noexcept:
        global _maps
        self.next_map = _maps
        if _maps != NULL:
            (<MappedFile>_maps).previous_map = <void *>self
        _maps = <void *>self

    def __dealloc__(self):
        global _maps
        if self.next_map != NULL:
            (<MappedFile>self.next_map).previous_map = self.previous_map
        if self.previous_map != NULL:
            (<MappedFile>self.previous_map).next_map = self.next_map
        elif _maps == <void *>self:
            _maps = self.next_map
        ts_map_close(&self.map)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef void *base = <void *>self.map.base if self.map.base != NULL else <void *>&_empty
        PyBuffer_FillInfo(view, self, base, <Py_ssize_t>self.map.size, 1, flags)

    cdef int lose(self) except -1:
        # Raises what a fault in this map is.
        try:
            found = f"{os.stat(self.path).st_size} bytes where there were {self.size}"
        except OSError as error:
            found = error.strerror
        text = f"{self.name}: cut short while it was read ({found})"
        if self.is_of_store:
            raise CorruptStoreError(text)
        raise TruncatedFileError(text)

    def read(self, size_t begin, size_t end) -> bytes:
        """Bytes begin .. end as a copy, right also if the file is cut short during the call:
        then CorruptStoreError or TruncatedFileError. IndexError outside the file."""
        cdef bytes out
        cdef char *to
        cdef int ret
        if begin > end or end > self.map.size:
            raise IndexError(f"bytes {begin} to {end} of {self.map.size}")
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(end - begin))
        to = PyBytes_AS_STRING(out)
        if end - begin > 65536:
            with nogil:
                ret = ts_map_copy(&self.map, begin, end - begin, to)
        else:
            ret = ts_map_copy(&self.map, begin, end - begin, to)
        if ret != 0:
            raise_fault(ts_sigbus_fault())
        return out

    def check(self) -> None:
        """After views of it were read: raises as `read` does if the file has been cut
        short, so that what was read may be zeros."""
        if self.map.base != NULL and ts_sigbus_guard(_check_tail, &self.map) != 1:
            self.lose()

    def check_shard(self, uint64_t num_chunks, uint64_t chunk_bytes) -> None:
        """ValueError unless this is an uncompressed Zarr shard of num_chunks inner
        chunks of chunk_bytes, one behind the other, with a sound index."""
        cdef _Shard shard
        cdef int ret
        shard.base, shard.size, shard.num_chunks, shard.chunk_bytes = (
            self.map.base, self.map.size, num_chunks, chunk_bytes)
        with nogil:
            ret = ts_sigbus_guard(_check_shard, &shard)
        if ret == TS_ERR_FAULT:
            self.lose()
        if ret != 0:
            raise ValueError(f"shard: {ts_strerror(ret).decode()}")
