# cython: language_level=3, binding=True
"""Copies of memory that is changed in place again and again."""
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

include "view.pxi"

cdef extern from "spans.h" nogil:
    struct ts_span:
        const unsigned char *src
        unsigned char *dst
        size_t num_items, item_bytes

    int ts_copy_spans(const ts_span *spans, size_t n, int num_threads)

cdef size_t _LINE = 64


cdef inline size_t _whole_lines(size_t num_bytes) noexcept:
    return (num_bytes + _LINE - 1) // _LINE * _LINE


def room_for(list sources) -> int:
    """Bytes that the copies of buffers take (SpanCopies)."""
    return sum(_whole_lines(len(source)) for source in sources) + _LINE


cdef class SpanCopies:
    """Copies of `sources` (buffers of bytes, of items of item_bytes[k]) in `room`, a writable
    buffer of room_for(sources) bytes; each begins at a multiple of 64 bytes of memory. begins:
    where in `room`. All buffers are held. ValueError where they do not fit."""
    cdef list held
    cdef ts_span *spans
    cdef size_t n
    cdef readonly list begins

    def __cinit__(self, list sources, list item_bytes, room):
        cdef _View to = _View(room, True), view
        cdef size_t i, at = <size_t>(-<uintptr_t>to.view.buf) % _LINE
        self.held, self.begins, self.n = [to], [], len(sources)
        self.spans = <ts_span *>calloc(self.n + 1, sizeof(ts_span))
        if self.spans == NULL:
            raise MemoryError()
        for i in range(self.n):
            view = _View(sources[i])
            if at > <size_t>to.view.len or <size_t>view.view.len > <size_t>to.view.len - at:
                raise ValueError(f"room: {to.view.len} bytes where {room_for(sources)} are needed")
            self.spans[i].src = <const unsigned char *>view.view.buf
            self.spans[i].dst = <unsigned char *>to.view.buf + at
            self.spans[i].item_bytes = <size_t>item_bytes[i]
            if self.spans[i].item_bytes == 0 or <size_t>view.view.len % self.spans[i].item_bytes:
                raise ValueError(f"item_bytes: {view.view.len} bytes are no items of {self.spans[i].item_bytes}")
            self.spans[i].num_items = <size_t>view.view.len // self.spans[i].item_bytes
            self.held.append(view)
            self.begins.append(at)
            at += _whole_lines(<size_t>view.view.len)

    def __dealloc__(self):
        free(self.spans)

    def take(self, int num_threads=1) -> int:
        """Copies all of them, in num_threads (as many as torch has) threads of the OpenMP runtime
        that is loaded. -> how many there were; 1 where all are small or no runtime is found."""
        cdef int found
        with nogil:
            found = ts_copy_spans(self.spans, self.n, num_threads)
        return found
