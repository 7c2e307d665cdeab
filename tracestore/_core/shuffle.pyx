# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""The order of an epoch, for data/order.py."""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free

from tracestore._core.mapping cimport allocate

cdef extern from "shuffle.h" nogil:
    void ts_permute(const int64_t *positions, size_t count, uint64_t n, uint64_t key, int64_t *out)
    struct ts_shuffle_buffer:
        int64_t *window
        uint64_t n, size, key, step
    void ts_shuffle_buffer_init(ts_shuffle_buffer *buffer)
    void ts_shuffle_buffer_next(ts_shuffle_buffer *buffer, uint64_t count, int64_t *out)


def permute(const int64_t[::1] positions, uint64_t n, uint64_t key, int64_t[::1] out) -> None:
    """Write the keyed permutation of range(n), n < 2**62, at some positions of range(n) to `out`."""
    cdef Py_ssize_t k
    if out.shape[0] != positions.shape[0]:
        raise ValueError(f"out: expected {positions.shape[0]} values, found {out.shape[0]}")
    if n >> 62:
        raise ValueError("n must be below 2**62")
    for k in range(positions.shape[0]):
        if positions[k] < 0 or <uint64_t>positions[k] >= n:
            raise ValueError(f"position {positions[k]} is outside 0 .. {n - 1}")
    if positions.shape[0]:
        with nogil:
            ts_permute(&positions[0], <size_t>positions.shape[0], n, key, &out[0])


cdef class ShuffleBuffer:
    """The ids of range(n) in the order of a shuffle buffer of `size` ids, the only ids in memory."""
    cdef ts_shuffle_buffer buffer

    def __cinit__(self, uint64_t n, uint64_t size, uint64_t key):
        size = min(size, n)
        if n > 0 and size < 1:
            raise ValueError("the size of the buffer must be positive")
        self.buffer.window = <int64_t *>allocate(size, sizeof(int64_t))
        self.buffer.n, self.buffer.size, self.buffer.key = n, size, key
        ts_shuffle_buffer_init(&self.buffer)

    def __dealloc__(self):
        free(self.buffer.window)

    def read(self, uint64_t begin, int64_t[::1] out) -> None:
        """Write the ids at the positions begin .. begin + len(out).

        Continuing at the end of the last call costs nothing extra; going back starts over. The GIL
        serves as the lock.
        """
        cdef uint64_t count = <uint64_t>out.shape[0], skipped
        if begin > self.buffer.n or count > self.buffer.n - begin:
            raise ValueError(f"positions {begin} .. {begin + count} are outside 0 .. {self.buffer.n}")
        if count == 0:
            return
        if begin < self.buffer.step:
            ts_shuffle_buffer_init(&self.buffer)
        while begin > self.buffer.step:
            skipped = min(begin - self.buffer.step, <uint64_t>1 << 22)
            ts_shuffle_buffer_next(&self.buffer, skipped, NULL)
            PyErr_CheckSignals()
        ts_shuffle_buffer_next(&self.buffer, count, &out[0])
