# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Checksums, conversions and attention packing.

Every function takes C-contiguous buffers and releases the GIL while it works.
Element types are named by the codes F16, BF16, F32 and F64. A wrong size is a
ValueError raised before anything is written.
"""
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

include "view.pxi"

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

F16 = <int>TS_F16
BF16 = <int>TS_BF16
F32 = <int>TS_F32
F64 = <int>TS_F64


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


def strerror(int code) -> str:
    """The core's description of an error code."""
    return ts_strerror(code).decode()
