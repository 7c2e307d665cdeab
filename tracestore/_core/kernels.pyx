# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Checksums, conversions, attention packing and batch building.

Every function takes C-contiguous buffers and releases the GIL while it works.
Element types are named by the codes F16, BF16, F32 and F64. A wrong size is a
ValueError raised before anything is written.
"""
from cpython.buffer cimport PyObject_GetBuffer, PyBuffer_Release, PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

cdef extern from "error.h":
    int TS_ERR_NOMEM, TS_ERR_RANGE
    const char *ts_strerror(int code)

cdef extern from "crc32c.h" nogil:
    uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n)
    uint32_t ts_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)

cdef extern from "half.h" nogil:
    ctypedef enum ts_dtype "enum ts_dtype":
        TS_F16
        TS_BF16
        TS_F32
        TS_F64
    size_t ts_dtype_bytes(ts_dtype dtype)
    int ts_to_f16(const void *src, ts_dtype dtype, uint16_t *out, size_t n, size_t *where)
    size_t ts_count_nonfinite(const void *src, ts_dtype dtype, size_t n)

cdef extern from "attention.h" nogil:
    int ts_is_causal(const void *src, ts_dtype dtype, size_t count, size_t S, size_t *where)
    void ts_pack_triangle(const void *src, size_t itemsize, size_t count, size_t S, void *out)
    void ts_unpack_triangle(const void *src, size_t itemsize, size_t count, size_t S, void *out)
    int ts_mean_rows(const void *src, ts_dtype dtype, size_t H, size_t stride, size_t n, uint16_t *out)
    int ts_head_mean(const void *src, ts_dtype dtype, size_t H, size_t S, int causal, uint16_t *out)
    struct ts_edge_rule:
        double threshold
        double top_k_fraction
    int64_t ts_select_pairs(const float *weights, size_t n, ts_edge_rule rule, unsigned char *keep)

cdef extern from "gather.h" nogil:
    struct ts_copy:
        const unsigned char *src
        unsigned char *dst
        size_t bytes
    void ts_copy_many(const ts_copy *copies, size_t n, int num_threads)
    struct ts_layer:
        const unsigned char *weights
        size_t num_tokens
        int causal
        int64_t first_node
        int64_t num_edges
        int64_t first_edge
    int ts_count_edges(ts_layer *layers, size_t n, ts_dtype dtype, ts_edge_rule rule, int num_threads)
    int ts_fill_edges(const ts_layer *layers, size_t n, ts_dtype dtype, ts_edge_rule rule, int num_threads,
                      int64_t *source, int64_t *target, unsigned char *weight)

F16 = <int>TS_F16
BF16 = <int>TS_BF16
F32 = <int>TS_F32
F64 = <int>TS_F64


cdef class _View:
    """Holds one buffer of a Python object for the length of a call."""
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


cdef int _raise(int code) except -1:
    message = ts_strerror(code).decode()
    if code == TS_ERR_NOMEM:
        raise MemoryError(message)
    if code == TS_ERR_RANGE:
        raise OverflowError(message)
    raise ValueError(message)


def crc32c(data, uint32_t value=0) -> int:
    """CRC-32C of `data` (any contiguous buffer), continuing from `value`."""
    cdef _View v = _View(data)
    with nogil:
        value = ts_crc32c(value, v.view.buf, <size_t>v.view.len)
    return value


def crc32c_combine(uint32_t first, uint32_t second, uint64_t second_bytes) -> int:
    """CRC-32C of A followed by B, from both checksums and the length of B."""
    return ts_crc32c_combine(first, second, second_bytes)


def to_float16(source, int dtype, out) -> int:
    """Rounds `source` into `out` (float16); returns -1, or the position of the
    first finite value that float16 cannot hold."""
    cdef _View v = _View(source), o = _View(out, True)
    cdef size_t where = 0, n = <size_t>v.view.len // ts_dtype_bytes(<ts_dtype>dtype)
    cdef int ret
    o.need(n * 2, "out")
    with nogil:
        ret = ts_to_f16(v.view.buf, <ts_dtype>dtype, <uint16_t *>o.view.buf, n, &where)
    if ret == TS_ERR_RANGE:
        return <int64_t>where
    if ret != 0:
        _raise(ret)
    return -1


def count_nonfinite(source, int dtype) -> int:
    """How many values are NaN or infinite."""
    cdef _View v = _View(source)
    cdef size_t n = <size_t>v.view.len // ts_dtype_bytes(<ts_dtype>dtype), count
    with nogil:
        count = ts_count_nonfinite(v.view.buf, <ts_dtype>dtype, n)
    return count


def first_above_diagonal(source, int dtype, size_t num_matrices, size_t num_tokens) -> int:
    """Flat position of the first value other than zero above a diagonal, or -1
    where all matrices (num_matrices, S, S) are causal."""
    cdef _View v = _View(source)
    cdef size_t where = 0
    cdef int causal
    v.need(num_matrices * num_tokens * num_tokens * ts_dtype_bytes(<ts_dtype>dtype), "source")
    with nogil:
        causal = ts_is_causal(v.view.buf, <ts_dtype>dtype, num_matrices, num_tokens, &where)
    return -1 if causal else <int64_t>where


def pack_triangle(source, size_t itemsize, size_t num_matrices, size_t num_tokens, out) -> None:
    """(num_matrices, S, S) -> (num_matrices, S (S + 1) / 2): lower triangles, row by row."""
    cdef _View v = _View(source), o = _View(out, True)
    v.need(num_matrices * num_tokens * num_tokens * itemsize, "source")
    o.need(num_matrices * (num_tokens * (num_tokens + 1) // 2) * itemsize, "out")
    with nogil:
        ts_pack_triangle(v.view.buf, itemsize, num_matrices, num_tokens, o.view.buf)


def unpack_triangle(source, size_t itemsize, size_t num_matrices, size_t num_tokens, out) -> None:
    """The inverse of pack_triangle, zeros above the diagonal."""
    cdef _View v = _View(source), o = _View(out, True)
    o.need(num_matrices * num_tokens * num_tokens * itemsize, "out")
    v.need(num_matrices * (num_tokens * (num_tokens + 1) // 2) * itemsize, "source")
    with nogil:
        ts_unpack_triangle(v.view.buf, itemsize, num_matrices, num_tokens, o.view.buf)


def head_mean(source, int dtype, size_t num_heads, size_t num_tokens, bint causal, out) -> None:
    """Mean over the heads of one layer (H, S, S) as float16: the packed lower
    triangle if causal, else (S, S). OverflowError where float16 cannot hold it."""
    cdef _View v = _View(source), o = _View(out, True)
    cdef size_t pairs = num_tokens * (num_tokens + 1) // 2 if causal else num_tokens * num_tokens
    cdef int ret
    v.need(num_heads * num_tokens * num_tokens * ts_dtype_bytes(<ts_dtype>dtype), "source")
    o.need(pairs * 2, "out")
    with nogil:
        ret = ts_head_mean(v.view.buf, <ts_dtype>dtype, num_heads, num_tokens, causal, <uint16_t *>o.view.buf)
    if ret != 0:
        _raise(ret)


def mean_rows(source, int dtype, size_t num_rows, size_t row_length, out) -> None:
    """Mean over the rows of (num_rows, row_length) as float16, summed in float64."""
    cdef _View v = _View(source), o = _View(out, True)
    cdef int ret
    v.need(num_rows * row_length * ts_dtype_bytes(<ts_dtype>dtype), "source")
    o.need(row_length * 2, "out")
    with nogil:
        ret = ts_mean_rows(v.view.buf, <ts_dtype>dtype, num_rows, row_length, row_length, <uint16_t *>o.view.buf)
    if ret != 0:
        _raise(ret)


def select_pairs(weights, double threshold, double top_k_fraction, keep) -> int:
    """Marks in `keep` (uint8) which of the float32 `weights` of one layer become
    edges: those above the threshold, or, where top_k_fraction > 0, that fraction
    with the largest weights, ties by position. Returns how many."""
    cdef _View v = _View(weights), o = _View(keep, True)
    cdef size_t n = <size_t>v.view.len // 4
    cdef ts_edge_rule rule
    cdef int64_t kept
    o.need(n, "keep")
    rule.threshold = threshold
    rule.top_k_fraction = top_k_fraction
    with nogil:
        kept = ts_select_pairs(<const float *>v.view.buf, n, rule, <unsigned char *>o.view.buf)
    if kept < 0:
        _raise(<int>kept)
    return kept


def gather(list sources, out, int num_threads=1) -> None:
    """Copies the buffers of `sources` one behind the other into `out`, which they fill exactly."""
    cdef _View o = _View(out, True), v
    cdef size_t n = len(sources), i, done = 0
    cdef list views = [_View(s) for s in sources]
    cdef ts_copy *copies = <ts_copy *>calloc(n + 1, sizeof(ts_copy))
    if copies == NULL:
        raise MemoryError()
    try:
        for i in range(n):
            v = <_View>views[i]
            copies[i].src = <const unsigned char *>v.view.buf
            copies[i].dst = <unsigned char *>o.view.buf + done
            copies[i].bytes = <size_t>v.view.len
            done += <size_t>v.view.len
            if done > <size_t>o.view.len:
                break
        o.need(done, "out")
        with nogil:
            ts_copy_many(copies, n, num_threads)
    finally:
        free(copies)


cdef class EdgeBuilder:
    """Edges of a batch, in two steps: count, then fill.

    `traces` holds, trace after trace, (weights buffer, S, causal): the L layers'
    packed triangles (or squares) one behind the other. Graph g = trace * L + layer
    owns nodes first_node[g] .. of the batch. `num_edges` is the total, `ptr`
    filled with the (num_graphs + 1) offsets.
    """
    cdef list views
    cdef ts_layer *layers
    cdef size_t num_layers
    cdef int dtype, num_threads
    cdef ts_edge_rule rule
    cdef readonly int64_t num_edges

    def __cinit__(self, list traces, size_t layers_per_trace, int dtype, double threshold,
                  double top_k_fraction, int num_threads=1):
        cdef size_t i = 0, k, S, pairs, itemsize = ts_dtype_bytes(<ts_dtype>dtype)
        cdef int64_t node = 0
        cdef _View v
        cdef int ret
        self.views = []
        self.num_layers = len(traces) * layers_per_trace
        self.dtype = dtype
        self.num_threads = num_threads
        self.rule.threshold = threshold
        self.rule.top_k_fraction = top_k_fraction
        self.layers = <ts_layer *>calloc(self.num_layers + 1, sizeof(ts_layer))
        if self.layers == NULL:
            raise MemoryError()
        for weights, num_tokens, causal in traces:
            v = _View(weights)
            self.views.append(v)
            S = num_tokens
            pairs = S * (S + 1) // 2 if causal else S * S
            v.need(layers_per_trace * pairs * itemsize, "weights")
            for k in range(layers_per_trace):
                self.layers[i].weights = <const unsigned char *>v.view.buf + k * pairs * itemsize
                self.layers[i].num_tokens = S
                self.layers[i].causal = causal
                self.layers[i].first_node = node
                node += <int64_t>S
                i += 1
        with nogil:
            ret = ts_count_edges(self.layers, self.num_layers, <ts_dtype>dtype, self.rule, num_threads)
        if ret != 0:
            _raise(ret)
        self.num_edges = 0
        for i in range(self.num_layers):
            self.layers[i].first_edge = self.num_edges
            self.num_edges += self.layers[i].num_edges

    def __dealloc__(self):
        free(self.layers)

    def fill(self, int64_t[:, ::1] edge_index, weights, int64_t[::1] ptr) -> None:
        """Writes edge_index (2, E): sources, targets; weights (E,), bits as stored; ptr (G + 1,)."""
        cdef _View o = _View(weights, True)
        cdef size_t i
        cdef int ret
        cdef int64_t *source
        cdef int64_t *target
        if edge_index.shape[0] != 2 or edge_index.shape[1] != self.num_edges:
            raise ValueError("edge_index has another shape than (2, num_edges)")
        if <size_t>ptr.shape[0] != self.num_layers + 1:
            raise ValueError("ptr has another length than num_graphs + 1")
        o.need(<size_t>self.num_edges * ts_dtype_bytes(<ts_dtype>self.dtype), "weights")
        for i in range(self.num_layers):
            ptr[i] = self.layers[i].first_edge
        ptr[self.num_layers] = self.num_edges
        if self.num_edges == 0:
            return
        source = &edge_index[0, 0]
        target = &edge_index[1, 0]
        with nogil:
            ret = ts_fill_edges(self.layers, self.num_layers, <ts_dtype>self.dtype, self.rule, self.num_threads,
                                source, target, <unsigned char *>o.view.buf)
        if ret != 0:
            _raise(ret)


def strerror(int code) -> str:
    """The core's description of an error code."""
    return ts_strerror(code).decode()
