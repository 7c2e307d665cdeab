# Access to the buffers of arguments. Modules include this file as text and have a copy each.
from cpython.buffer cimport PyObject_GetBuffer, PyBuffer_Release, PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer

cdef extern from "error.h":
    int TS_ERR_NOMEM, TS_ERR_RANGE, TS_ERR_BOUNDS, TS_ERR_NODE
    const char *ts_strerror(int code)


cdef class _View:
    """The buffer of a Python object, released with this object."""
    cdef Py_buffer view
    cdef bint is_held

    def __cinit__(self, source, bint writable=False):
        self.is_held = False
        PyObject_GetBuffer(source, &self.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.is_held = True

    def __dealloc__(self):
        if self.is_held:
            PyBuffer_Release(&self.view)

    cdef int require_size(self, size_t num_bytes, str name) except -1:
        if <size_t>self.view.len != num_bytes:
            raise ValueError(f"{name}: expected {num_bytes} bytes, found {self.view.len}")
        return 0


cdef inline int _raise(int code) except -1:
    """Raise the exception of an error code."""
    message = ts_strerror(code).decode()
    if code == TS_ERR_NOMEM:
        raise MemoryError(message)
    if code == TS_ERR_RANGE:
        raise OverflowError(message)
    raise ValueError(message)
