# cython: language_level=3, binding=True
"""Read-only file mappings as Python buffers, and what other modules share: buffers, memory, guard, exceptions.

Touching the missing pages of a truncated file ends the process. All code of the core that reads
mappings runs under a guard (csrc/sigbus_guard.h) and raises instead, with the name of the file:
CorruptStoreError for a file of a store, else TruncatedFileError. Python code that reads the buffer
of a mapping directly has no such guard.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport errno
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc

from tracestore._core.csrc cimport (
    TS_ERR_FAULT, TS_ERR_IO, TS_ERR_NOMEM, TS_ERR_RANGE, TS_ERR_SIZE, ts_map, ts_map_is_intact,
    ts_sigbus_fault, ts_sigbus_guard, ts_strerror
)

import os

from tracestore.errors import TruncatedFileError, CorruptStoreError

cdef extern from "map.h" nogil:
    int ts_map_open(ts_map *map, int fd, int64_t expected_size)
    void ts_map_close(ts_map *map)
    int ts_map_copy(const ts_map *map, size_t start, size_t num_bytes, void *out)

cdef unsigned char _empty = 0

# The addresses of all MappedFiles of the process. The GIL protects them.
cdef set _maps = set()


# No garbage collection: objects cannot be part of a reference cycle, and __dealloc__ reads the fields.
@cython.no_gc
cdef class _View:
    """The C-contiguous buffer of a Python object, released with this object."""

    def __cinit__(self, source, bint writable=False):
        PyObject_GetBuffer(source, &self.view, PyBUF_C_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0))

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef int require_size(self, size_t num_bytes, str name) except -1:
        if <size_t>self.view.len != num_bytes:
            raise ValueError(f"{name}: expected {num_bytes} bytes, found {self.view.len}")
        return 0


cdef void *allocate(size_t count, size_t size) except NULL:
    """Return zeroed memory for `count` items, to be released by free()."""
    cdef void *memory = calloc(count + 1, size)
    if memory == NULL:
        raise MemoryError()
    return memory


cdef int raise_error(int code) except -1:
    """Raise the exception of an error code. A fault is the last one of this thread."""
    message = ts_strerror(code).decode()
    if code == TS_ERR_FAULT:
        raise_fault(ts_sigbus_fault())
    if code == TS_ERR_NOMEM:
        raise MemoryError(message)
    if code == TS_ERR_RANGE:
        raise OverflowError(message)
    raise ValueError(message)


cdef int run_guarded(int (*work)(void *) noexcept nogil, void *context) except? -100 nogil:
    """Return the result of work(context), or raise the exception of a fault."""
    cdef int ret = ts_sigbus_guard(work, context)
    if ret == TS_ERR_FAULT:
        with gil:
            raise_fault(ts_sigbus_fault())
    return ret


cdef int raise_fault(const void *address) except -1:
    """Raise the exception of the truncated file that is mapped at an address."""
    cdef MappedFile mapped
    for link in list(_maps):
        mapped = <MappedFile><void *><size_t>link
        if <const unsigned char *>address >= mapped.map.base and (
                <size_t>(<const unsigned char *>address - mapped.map.base) < mapped.map.size):
            mapped.raise_truncated()
    raise TruncatedFileError("a mapped file was truncated while it was read")


cdef int _check_tail(void *context) noexcept nogil:
    return ts_map_is_intact(<ts_map *>context)


# No garbage collection: objects cannot be part of a reference cycle, and __dealloc__ reads the fields.
@cython.no_gc
cdef class MappedFile:
    """A whole file, mapped read-only as long as this object or a buffer of it exists.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file; used in messages only if `fd` is given.
    expected_size : int
        Size in bytes, or -1 to accept any size.
    name : str, optional
        Path of the file in its store, for error messages. None if the file belongs to no store.
    fd : int
        Descriptor of the file, open for reading; it stays open. -1 opens `path`.

    Raises
    ------
    OSError
        If the file cannot be opened.
    ValueError
        If the size of the file is not `expected_size`.
    """

    def __cinit__(self, path, int64_t expected_size=-1, str name=None, int fd=-1):
        cdef bytes encoded = os.fsencode(path)
        cdef int ret, opened = fd
        self.path, self.is_in_store = encoded, name is not None
        self.name = os.fsdecode(encoded) if name is None else name
        if fd < 0:  # O_NONBLOCK: the path may be that of a FIFO
            opened = os.open(os.fsdecode(encoded), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with nogil:
                ret = ts_map_open(&self.map, opened, expected_size)
            if ret == TS_ERR_IO:
                raise OSError(errno, os.strerror(errno), os.fsdecode(encoded))
            if ret == TS_ERR_SIZE:
                raise ValueError(f"expected {expected_size} bytes, found {os.fstat(opened).st_size}")
        finally:
            if fd < 0:
                os.close(opened)
        self.size = self.map.size
        _maps.add(<size_t><void *>self)
        if ret != 0:
            self.raise_truncated()

    def __dealloc__(self):
        _maps.discard(<size_t><void *>self)
        ts_map_close(&self.map)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef void *base = <void *>self.map.base if self.map.base != NULL else <void *>&_empty
        PyBuffer_FillInfo(view, self, base, <Py_ssize_t>self.map.size, 1, flags)

    cdef int raise_truncated(self) except -1:
        """Raise the exception of a truncated file."""
        try:
            found = f"{os.stat(self.path).st_size} bytes where there were {self.size}"
        except OSError as error:
            found = error.strerror
        text = f"{self.name}: cut short while it was read ({found})"
        if self.is_in_store:
            raise CorruptStoreError(text)
        raise TruncatedFileError(text)

    def read(self, size_t begin, size_t end) -> bytes:
        """Return a copy of the bytes begin .. end.

        Raises
        ------
        IndexError
            If the range lies outside the file.
        CorruptStoreError, TruncatedFileError
            If the file was truncated.
        """
        cdef bytes out
        cdef char *data
        cdef int ret
        if begin > end or end > self.map.size:
            raise IndexError(f"bytes {begin} to {end} of {self.map.size}")
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(end - begin))
        data = PyBytes_AS_STRING(out)
        if end - begin > 65536:  # a large copy lets other threads run
            with nogil:
                ret = ts_map_copy(&self.map, begin, end - begin, data)
        else:
            ret = ts_map_copy(&self.map, begin, end - begin, data)
        if ret != 0:
            raise_error(ret)
        return out

    def check_intact(self) -> None:
        """Raise as `read` does if the file was truncated, so that views read before may hold zeros."""
        if self.map.base != NULL and ts_sigbus_guard(_check_tail, &self.map) != 1:
            self.raise_truncated()
