# Shared by the modules that take buffers: textually included, so that each has its own.
from cpython.buffer cimport PyObject_GetBuffer, PyBuffer_Release, PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer

cdef extern from "error.h":
    int TS_ERR_NOMEM, TS_ERR_RANGE, TS_ERR_BOUNDS, TS_ERR_NODE
    const char *ts_strerror(int code)


cdef class _View:
    """Holds one buffer of a Python object."""
    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, source, bint writable=False):
        self.held = False
        PyObject_GetBuffer(source, &self.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    cdef int need(self, size_t n_bytes, str what) except -1:
        if <size_t>self.view.len != n_bytes:
            raise ValueError(f"{what}: {self.view.len} bytes where {n_bytes} are needed")
        return 0


cdef inline int _raise(int code) except -1:
    message = ts_strerror(code).decode()
    if code == TS_ERR_NOMEM:
        raise MemoryError(message)
    if code == TS_ERR_RANGE:
        raise OverflowError(message)
    raise ValueError(message)
