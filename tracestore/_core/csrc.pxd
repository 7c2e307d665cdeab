# cython: language_level=3
"""Declarations of csrc/ that several modules use."""

cdef extern from "error.h" nogil:
    int TS_ERR_NOMEM, TS_ERR_IO, TS_ERR_SIZE, TS_ERR_RANGE, TS_ERR_BOUNDS, TS_ERR_FAULT, TS_ERR_NODE
    const char *ts_strerror(int code)

cdef extern from "float_convert.h" nogil:
    ctypedef enum ts_dtype "enum ts_dtype":
        TS_F16
        TS_BF16
        TS_F32
        TS_F64
    size_t ts_dtype_bytes(ts_dtype dtype)

cdef extern from "map.h" nogil:
    struct ts_map:
        const unsigned char *base
        size_t size
    int ts_map_is_intact(const ts_map *map)

cdef extern from "sigbus_guard.h" nogil:
    int ts_sigbus_guard(int (*work)(void *) noexcept, void *context)
    int ts_sigbus_guard_again(int (*work)(void *) noexcept, void *context)
    const void *ts_sigbus_fault()
