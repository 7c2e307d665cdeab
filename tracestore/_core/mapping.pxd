# cython: language_level=3
from cpython.buffer cimport Py_buffer

from tracestore._core.csrc cimport ts_map


cdef class MappedFile:
    cdef ts_map map
    cdef readonly size_t size
    cdef readonly str name
    cdef bint is_in_store
    cdef bytes path
    cdef int raise_truncated(self) except -1


cdef class _View:
    cdef Py_buffer view
    cdef int require_size(self, size_t num_bytes, str name) except -1


cdef void *allocate(size_t count, size_t size) except NULL
cdef int raise_error(int code) except -1
cdef int raise_fault(const void *address) except -1
cdef int run_guarded(int (*work)(void *) noexcept nogil, void *context) except? -100 nogil
