# cython: freethreading_compatible=True
"""Arrays over bytes of a pickle that are there already: the plain case of what
ingest.builders checks, made without its words for what is wrong."""

from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_GET_BUFFER

import numpy as np

cdef object _ndarray = np.ndarray
cdef Py_ssize_t _MAX_NDIM = 16
cdef Py_ssize_t _MAX_BYTES = 1 << 62


def plain_array(tuple state, object dtype, Py_ssize_t itemsize):
    """The array of an ndarray's state (version, shape, _, is_fortran, data), read-only, where
    the shape is a tuple of integers, data a read-only view of exactly the bytes that it needs,
    and these are some; None where anything is otherwise. `dtype` has `itemsize` bytes, any of
    which may stand there."""
    cdef Py_ssize_t needed = itemsize, n
    cdef tuple shape
    if len(state) != 5 or type(state[1]) is not tuple or type(state[3]) is not bool:
        return None
    if not PyMemoryView_Check(state[4]):
        return None
    shape = <tuple> state[1]
    if len(shape) > _MAX_NDIM or itemsize <= 0:
        return None
    for item in shape:
        if type(item) is not int or not 0 < item < _MAX_BYTES:
            return None
        n = item
        if needed > _MAX_BYTES // n:
            return None
        needed *= n
    view = PyMemoryView_GET_BUFFER(state[4])
    if view.len != needed or not view.readonly or view.ndim != 1 or view.itemsize != 1:
        return None
    return _ndarray(shape, dtype, state[4], 0, None, "F" if state[3] else "C")
