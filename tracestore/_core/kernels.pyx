# cython: language_level=3, binding=True, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Checksums, conversions and packing of attention.

Functions take C-contiguous buffers and release the GIL while they work. F16, BF16, F32 and F64 are the
codes of element types. A buffer of the wrong size raises ValueError before anything is written. If a
source is a view of a MappedFile whose file is truncated during the call, the functions raise
CorruptStoreError for a file of a store, else TruncatedFileError.
"""
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free

from tracestore._core.csrc cimport TS_BF16, TS_ERR_RANGE, TS_F16, TS_F32, TS_F64, ts_dtype, ts_dtype_bytes
from tracestore._core.mapping cimport _View, allocate, raise_error, run_guarded

cdef extern from "crc32c.h" nogil:
    uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n)
    uint32_t ts_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)

cdef extern from "simd.h" nogil:
    int ts_simd_level()
    const char *ts_simd_name(int level)

cdef extern from "float_convert.h" nogil:
    int ts_to_f16(const void *src, ts_dtype dtype, uint16_t *out, size_t n, size_t *position)

cdef extern from "attention.h" nogil:
    void ts_unpack_triangle(const void *src, size_t itemsize, size_t count, size_t S, void *out)
    int ts_mean_rows(const void *src, ts_dtype dtype, size_t H, size_t stride, size_t n, uint16_t *out)

cdef extern from "pack.h" nogil:
    ctypedef struct ts_scan_t "struct ts_checksum_scan":
        size_t nonfinite
        uint32_t crc
        uint32_t *layer_crcs
    void ts_checksum_scan(ts_scan_t *scan, const void *data, ts_dtype dtype, size_t n, void *out)
    ctypedef struct ts_pack "struct ts_pack":
        const void *const *sources
        const void *const *stored
        ts_dtype source_dtype, stored_dtype
        size_t L, H, S, layer
        int causal, mean
        void *out
        ts_scan_t scan
    int ts_pack_attention(ts_pack *pack)

F16 = <int>TS_F16
BF16 = <int>TS_BF16
F32 = <int>TS_F32
F64 = <int>TS_F64


cdef enum:
    CRC, TO_F16, UNPACK, MEAN_ROWS


# The arguments and the result of a call that runs under the guard.
cdef struct _Call:
    int function
    const void *source
    void *out
    ts_dtype dtype
    size_t n, size, itemsize, position
    uint32_t crc


cdef int _run(void *context) noexcept nogil:
    cdef _Call *c = <_Call *>context
    if c.function == CRC:
        c.crc = ts_crc32c(c.crc, c.source, c.n)
    elif c.function == TO_F16:
        return ts_to_f16(c.source, c.dtype, <uint16_t *>c.out, c.n, &c.position)
    elif c.function == UNPACK:
        ts_unpack_triangle(c.source, c.itemsize, c.n, c.size, c.out)
    else:
        return ts_mean_rows(c.source, c.dtype, c.n, c.size, c.size, <uint16_t *>c.out)
    return 0


cdef int _call(_Call *c, int function, _View source, _View out) except? -100:
    """Run a function under the guard. Returns 0 or an error code."""
    c.function, c.source = function, source.view.buf
    c.out = NULL if out is None else out.view.buf
    with nogil:
        return run_guarded(_run, c)


def simd_level():
    """Return the level of vector instructions in use.

    Returns
    -------
    int
        1 for the baseline of the processor family. x86-64: 2 (SSE4.2), 3 (AVX2), 4 (AVX-512).
        aarch64: 2 (NEON), 3 (NEON and CRC32). The environment variable TRACESTORE_SIMD_LEVEL
        limits it.
    """
    return ts_simd_level()


def simd_name() -> str:
    """Return the name of the level of vector instructions in use."""
    return ts_simd_name(ts_simd_level()).decode()


def crc32c(data, uint32_t value=0) -> int:
    """Return the CRC-32C of `data`, continuing from `value`."""
    cdef _View v = _View(data)
    cdef _Call c
    c.n, c.crc = <size_t>v.view.len, value
    _call(&c, CRC, v, None)
    return c.crc


def crc32c_combine(uint32_t first, uint32_t second, uint64_t second_bytes) -> int:
    """Return the CRC-32C of A followed by B from both checksums and the length of B in bytes."""
    return ts_crc32c_combine(first, second, second_bytes)


def to_float16(source, int dtype, out) -> int:
    """Convert `source` to float16 in `out`.

    Returns
    -------
    int
        -1, or the position of the first finite value that overflows float16.
    """
    cdef _View v = _View(source), o = _View(out, True)
    cdef _Call c
    cdef int ret
    c.dtype, c.n, c.position = <ts_dtype>dtype, <size_t>v.view.len // ts_dtype_bytes(<ts_dtype>dtype), 0
    o.require_size(c.n * 2, "out")
    ret = _call(&c, TO_F16, v, o)
    if ret == TS_ERR_RANGE:
        return <int64_t>c.position
    if ret != 0:
        raise_error(ret)
    return -1


def unpack_triangle(source, size_t itemsize, size_t num_matrices, size_t num_tokens, out) -> None:
    """Expand lower triangles, packed row by row in (num_matrices, S (S + 1) / 2), to (num_matrices, S, S) with
    zeros above the diagonal."""
    cdef _View v = _View(source), o = _View(out, True)
    cdef _Call c
    o.require_size(num_matrices * num_tokens * num_tokens * itemsize, "out")
    v.require_size(num_matrices * (num_tokens * (num_tokens + 1) // 2) * itemsize, "source")
    c.itemsize, c.n, c.size = itemsize, num_matrices, num_tokens
    _call(&c, UNPACK, v, o)


def mean_rows(source, int dtype, size_t num_rows, size_t row_length, out) -> None:
    """Write the mean over the rows of (num_rows, row_length) as float16, summed in float64.

    Raises OverflowError if a finite mean overflows float16.
    """
    cdef _View v = _View(source), o = _View(out, True)
    cdef _Call c
    cdef int ret
    v.require_size(num_rows * row_length * ts_dtype_bytes(<ts_dtype>dtype), "source")
    o.require_size(row_length * 2, "out")
    c.dtype, c.n, c.size = <ts_dtype>dtype, num_rows, row_length
    ret = _call(&c, MEAN_ROWS, v, o)
    if ret != 0:
        raise_error(ret)


cdef class _Views:
    """The buffers of several objects, all of one size."""
    cdef list views
    cdef const void **data
    cdef size_t count

    def __cinit__(self, sources, size_t num_bytes):
        cdef _View view
        self.views, self.count = [], len(sources)
        self.data = <const void **>allocate(self.count, sizeof(void *))
        for k, source in enumerate(sources):
            view = _View(source)
            view.require_size(num_bytes, f"layer {k}")
            self.views.append(view)
            self.data[<size_t>k] = view.view.buf

    def __dealloc__(self):
        free(self.data)


cdef struct _Scan:
    const void **arrays
    unsigned char *out
    size_t count, n
    ts_dtype dtype
    ts_scan_t scan


cdef int _run_scan(void *context) noexcept nogil:
    cdef _Scan *s = <_Scan *>context
    cdef size_t k, n_bytes = s.n * ts_dtype_bytes(s.dtype)
    for k in range(s.count):
        ts_checksum_scan(&s.scan, s.arrays[k], s.dtype, s.n, NULL if s.out == NULL else s.out + k * n_bytes)
    return 0


cdef _View _layer_crcs(layer_crcs, size_t count, ts_scan_t *scan):
    """Let a scan write the checksums of layers into a buffer, or None. Returns the view that holds it."""
    cdef _View view = None
    scan.nonfinite, scan.crc, scan.layer_crcs = 0, 0, NULL
    if layer_crcs is not None:
        view = _View(layer_crcs, True)
        view.require_size(count * sizeof(uint32_t), "layer_crcs")
        scan.layer_crcs = <uint32_t *>view.view.buf
    return view


cdef int _run_pack(void *context) noexcept nogil:
    return ts_pack_attention(<ts_pack *>context)


def checksum_scan(arrays, int dtype, size_t num_values, out=None, layer_crcs=None) -> tuple[int, int]:
    """Count non-finite values and compute the checksum of arrays in one pass.

    Parameters
    ----------
    arrays : sequence of buffers
        Arrays of `num_values` values each.
    out : buffer, optional
        Receives a copy of the arrays, one after another.
    layer_crcs : buffer, optional
        Receives the CRC-32C of each array, uint32.

    Returns
    -------
    tuple of int
        The number of values that are NaN or infinite, and the CRC-32C of the concatenated arrays.
    """
    cdef _Views views = _Views(arrays, num_values * ts_dtype_bytes(<ts_dtype>dtype))
    cdef _View o, crcs
    cdef _Scan s
    s.out = NULL
    if out is not None:
        o = _View(out, True)
        o.require_size(views.count * num_values * ts_dtype_bytes(<ts_dtype>dtype), "out")
        s.out = <unsigned char *>o.view.buf
    s.arrays, s.count, s.n, s.dtype = views.data, views.count, num_values, <ts_dtype>dtype
    crcs = _layer_crcs(layer_crcs, views.count, &s.scan)
    with nogil:
        run_guarded(_run_scan, &s)
    return s.scan.nonfinite, s.scan.crc


def pack_attention(
    sources, int source_dtype, stored, int stored_dtype, size_t num_heads, size_t num_tokens, bint causal, out,
    layer_crcs=None
) -> tuple[bool, int, int]:
    """Pack the attention of L layers (H, S, S), layer after layer.

    Parameters
    ----------
    sources : sequence of L buffers
        The layers as the source holds them.
    stored : sequence of L buffers or None
        The layers in the stored type, to be packed with every head. None packs the mean over the
        heads of `sources` as float16.
    causal : bool
        Pack lower triangles instead of squares.
    out : buffer or None
        Receives the packed layers. None only scans `stored`, which must be packed already.
    layer_crcs : buffer, optional
        Receives the CRC-32C of each packed layer, uint32.

    Returns
    -------
    tuple
        False if `causal` was set but a layer of `sources` is not causal, which leaves `out` undefined;
        the number of packed values that are NaN or infinite; the CRC-32C of the packed values.

    Raises
    ------
    OverflowError
        With the number of the layer, if a finite mean overflows float16.
    """
    cdef size_t square = num_tokens * num_tokens
    cdef size_t pairs = num_tokens * (num_tokens + 1) // 2 if causal else square
    cdef _Views source_views = _Views(sources, num_heads * square * ts_dtype_bytes(<ts_dtype>source_dtype))
    cdef _Views stored_views = None
    cdef _View o = None, crcs
    cdef ts_pack p
    cdef int ret
    p.mean = stored is None
    if stored is not None:
        stored_views = _Views(stored, num_heads * square * ts_dtype_bytes(<ts_dtype>stored_dtype))
        if stored_views.count != source_views.count:
            raise ValueError(f"stored: expected {source_views.count} layers, found {stored_views.count}")
    p.out = NULL
    if out is not None:
        o = _View(out, True)
        o.require_size(source_views.count * pairs * (2 if p.mean else num_heads * ts_dtype_bytes(<ts_dtype>stored_dtype)), "out")
        p.out = o.view.buf
    elif p.mean or causal:
        raise ValueError("out is required to pack")
    p.sources, p.stored = source_views.data, NULL if stored_views is None else stored_views.data
    p.source_dtype, p.stored_dtype = <ts_dtype>source_dtype, <ts_dtype>stored_dtype
    p.L, p.H, p.S, p.causal, p.layer = source_views.count, num_heads, num_tokens, causal, 0
    crcs = _layer_crcs(layer_crcs, source_views.count, &p.scan)
    with nogil:
        ret = run_guarded(_run_pack, &p)
    if ret == TS_ERR_RANGE:
        raise OverflowError(p.layer)
    if ret != 0:
        raise_error(ret)
    return bool(p.causal) == bool(causal), p.scan.nonfinite, p.scan.crc
