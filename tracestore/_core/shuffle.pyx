# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""The order of an epoch; data/order.py has the same in numpy."""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc

cdef extern from "shuffle.h" nogil:
    void ts_permute(const int64_t *positions, size_t count, uint64_t n, uint64_t key, int64_t *out)
    struct ts_shuffle_buffer:
        int64_t *window
        uint64_t n, size, key, step
    void ts_shuffle_buffer_init(ts_shuffle_buffer *buffer)
    void ts_shuffle_buffer_next(ts_shuffle_buffer *buffer, uint64_t count, int64_t *out)


def permute(const int64_t[::1] positions, uint64_t n, uint64_t key, int64_t[::1] out) -> None:
    """The keyed permutation of range(n), n below 2**62, at some positions, each in range(n)."""
    cdef Py_ssize_t k
    if out.shape[0] != positions.shape[0]:
        raise ValueError("out has another length than positions")
    if n >> 62:
        raise ValueError("n is 2**62 or more")
    for k in range(positions.shape[0]):
        if positions[k] < 0 or <uint64_t>positions[k] >= n:
            raise ValueError(f"position {positions[k]} outside 0 .. {n - 1}")
    if positions.shape[0]:
        with nogil:
            ts_permute(&positions[0], <size_t>positions.shape[0], n, key, &out[0])


cdef class ShuffleBuffer:
    """The ids of range(n) in the order of a shuffle buffer of `size` ids, which is all it holds."""
    cdef ts_shuffle_buffer buffer

    def __cinit__(self, uint64_t n, uint64_t size, uint64_t key):
        size = min(size, n)
        if n > 0 and size < 1:
            raise ValueError("a buffer of no ids")
        self.buffer.window = <int64_t *>malloc((size + 1) * sizeof(int64_t))
        if self.buffer.window == NULL:
            raise MemoryError()
        self.buffer.n, self.buffer.size, self.buffer.key = n, size, key
        ts_shuffle_buffer_init(&self.buffer)

    def __dealloc__(self):
        free(self.buffer.window)

    def read(self, uint64_t begin, int64_t[::1] out) -> None:
        """The ids at positions begin .. begin + len(out). Going on from where the last call
        ended costs nothing more; going back starts over. Holds the GIL, its lock."""
        cdef uint64_t count = <uint64_t>out.shape[0], passed
        if begin > self.buffer.n or count > self.buffer.n - begin:
            raise ValueError(f"positions {begin} .. {begin + count} of {self.buffer.n}")
        if count == 0:
            return
        if begin < self.buffer.step:
            ts_shuffle_buffer_init(&self.buffer)
        while begin > self.buffer.step:
            passed = min(begin - self.buffer.step, <uint64_t>1 << 22)
            ts_shuffle_buffer_next(&self.buffer, passed, NULL)
            PyErr_CheckSignals()
        ts_shuffle_buffer_next(&self.buffer, count, &out[0])
