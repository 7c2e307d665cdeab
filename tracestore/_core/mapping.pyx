# cython: language_level=3, binding=True
"""Read-only file maps as Python buffers."""
from cpython.buffer cimport PyBuffer_FillInfo, Py_buffer
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t

import os

cdef extern from "error.h":
    int TS_ERR_IO, TS_ERR_SIZE
    const char *ts_strerror(int code)

cdef extern from "map.h" nogil:
    struct ts_map:
        const unsigned char *base
        size_t size
    int ts_map_open(ts_map *map, const char *path, int64_t expected_size)
    void ts_map_close(ts_map *map)
    int ts_shard_check(const unsigned char *base, size_t size, uint64_t num_chunks, uint64_t chunk_bytes)

cdef unsigned char _empty = 0


cdef class MappedFile:
    """A whole file mapped read-only, for as long as this object or a buffer of it
    lives. OSError where it cannot be opened, ValueError where its size is not
    expected_size (-1 takes any)."""
    cdef ts_map map
    cdef readonly size_t size

    def __cinit__(self, path, int64_t expected_size=-1):
        cdef bytes encoded = os.fsencode(path)
        cdef const char *name = encoded
        cdef int ret
        with nogil:
            ret = ts_map_open(&self.map, name, expected_size)
        if ret == TS_ERR_IO:
            raise OSError(errno, os.strerror(errno), os.fsdecode(encoded))
        if ret == TS_ERR_SIZE:
            found = os.stat(encoded).st_size
            raise ValueError(f"{found} bytes where {expected_size} are expected")
        self.size = self.map.size

    def __dealloc__(self):
        ts_map_close(&self.map)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef void *base = <void *>self.map.base if self.map.base != NULL else <void *>&_empty
        PyBuffer_FillInfo(view, self, base, <Py_ssize_t>self.map.size, 1, flags)

    def check_shard(self, uint64_t num_chunks, uint64_t chunk_bytes) -> None:
        """ValueError unless this is an uncompressed Zarr shard of num_chunks inner
        chunks of chunk_bytes, one behind the other, with a sound index."""
        cdef int ret
        with nogil:
            ret = ts_shard_check(self.map.base, self.map.size, num_chunks, chunk_bytes)
        if ret != 0:
            raise ValueError(f"shard: {ts_strerror(ret).decode()}")
