# cython: language_level=3, binding=True
"""Lookup of trace keys and locations in mapped index parts.

A lookup that is given the MappedFile of its arrays raises CorruptStoreError if the file was truncated,
also if the truncation did not fault but gave zeros.
"""
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from tracestore._core.csrc cimport (
    TS_ERR_BOUNDS, TS_ERR_FAULT, ts_map, ts_map_is_intact, ts_sigbus_fault, ts_sigbus_guard, ts_sigbus_guard_again
)
from tracestore._core.mapping cimport MappedFile, allocate, raise_fault

cdef extern from "index.h" nogil:
    struct ts_index_part:
        uint64_t num_traces
        uint64_t table_size
        const uint32_t *table
        const int64_t *id_offsets
        const unsigned char *ids
        uint64_t id_bytes
        const int32_t *samples
    int TS_INDEX_CORRUPT
    int64_t ts_index_find(const ts_index_part *part, const unsigned char *id, size_t id_bytes, int32_t sample)
    int64_t ts_index_build(const ts_index_part *part, uint32_t *table)


def build_key_table(uint32_t[::1] table, const int64_t[::1] id_offsets, const unsigned char[::1] ids,
                    const int32_t[::1] samples) -> int:
    """Insert all keys into the hash table, zeros. Return -1, or the first row whose key is a duplicate."""
    cdef ts_index_part part
    cdef uint32_t *slots
    cdef int64_t duplicate
    cdef Py_ssize_t k, n = samples.shape[0], size = table.shape[0]
    if id_offsets.shape[0] != n + 1 or size <= n or size & (size - 1):
        raise ValueError("wrong size of the hash table, or of the offsets")
    for k in range(n):
        if not 0 <= id_offsets[k] <= id_offsets[k + 1] <= ids.shape[0]:
            raise ValueError("id offsets out of bounds")
    slots = &table[0]
    part.num_traces, part.table_size, part.id_offsets = n, size, &id_offsets[0]
    part.ids = &ids[0] if ids.shape[0] else NULL
    part.samples = &samples[0] if n else NULL
    with nogil:
        duplicate = ts_index_build(&part, slots)
    return duplicate


cdef struct _Part:
    const ts_map *map
    int64_t first, count, patches
    # Of the store of the part: the number of its first trace and segment, its segments, and the layouts it may have.
    int64_t first_trace, first_segment, num_segments
    uint32_t layouts
    ts_index_part keys
    const int32_t *graph_segment
    const int32_t *graph_row
    const int32_t *num_tokens
    const uint8_t *layout
    const int32_t *sequence_segment
    const int32_t *sequence_row
    const int64_t *patch_trace
    const uint8_t *patch_group
    const int32_t *patch_segment
    const int32_t *patch_row
    const int32_t *patch_num_tokens
    const uint8_t *patch_layout


cdef const void *_column(list owners, dict arrays, str name, Py_ssize_t count, Py_ssize_t itemsize) except? NULL:
    """Return the address of an array. Append the object that keeps it alive to `owners`."""
    cdef const unsigned char[::1] view
    array = arrays[name]
    if array.ndim != 1 or len(array) != count or array.itemsize != itemsize:
        raise ValueError(f"{name}: the size differs from that of the index part")
    if count == 0:
        return <const void *>1
    view = array.view("u1")
    owners.append(view)
    return &view[0]


cdef enum:
    _NO_TRACE = 1
    _CORRUPT = 2
    _CORRUPT_TABLE = 3
    # Limit of the tokens of a trace: the edges of 1,000,000 layers then fit into 64 bits.
    _MAX_TOKENS = 1 << 20


# The arguments and the result of a LocationTable call that runs under the guard. truncated: an address
# in a mapping whose file was truncated, or NULL; failed: the trace of an error.
cdef struct _Lookup:
    _Part *parts
    Py_ssize_t num_parts, n
    const int64_t *indices
    const void *truncated
    int64_t failed
    int64_t *out
    int64_t *begin  # first byte of each id in `ids`
    char *ids
    # The key that is searched, of n bytes, and its trace.
    const unsigned char *id
    int32_t sample
    int64_t found


cdef class LocationTable:
    """The keys and the locations of traces over all parts of an index.

    Parameters
    ----------
    parts : list of tuple
        For each part in order: its first trace, its arrays by column name, its MappedFile or None, and of its store,
        because several stores may be numbered as one, the numbers that its traces and its segments begin with, the
        number of its segments, and its layouts: bit k is set if attention of layout k is allowed.

    Raises
    ------
    ValueError
        If the sizes of columns disagree.
    """
    cdef _Part *parts
    cdef Py_ssize_t num_parts
    cdef list owners

    def __cinit__(self, list parts):
        cdef _Part *p
        cdef Py_ssize_t k
        self.owners = []
        self.num_parts = len(parts)
        self.parts = <_Part *>allocate(self.num_parts, sizeof(_Part))
        for k in range(self.num_parts):
            p = &self.parts[k]
            first, arrays, mapped, p.first_trace, p.first_segment, p.num_segments, p.layouts = parts[k]
            if mapped is not None:
                self.owners.append(mapped)
                p.map = &(<MappedFile?>mapped).map
            p.first, p.count, p.patches = first, len(arrays["layout"]), len(arrays["patch_trace"])
            p.graph_segment = <const int32_t *>_column(self.owners, arrays, "graph_segment", p.count, 4)
            p.graph_row = <const int32_t *>_column(self.owners, arrays, "graph_row", p.count, 4)
            p.num_tokens = <const int32_t *>_column(self.owners, arrays, "num_tokens", p.count, 4)
            p.layout = <const uint8_t *>_column(self.owners, arrays, "layout", p.count, 1)
            p.sequence_segment = <const int32_t *>_column(self.owners, arrays, "sequence_segment", p.count, 4)
            p.sequence_row = <const int32_t *>_column(self.owners, arrays, "sequence_row", p.count, 4)
            p.keys.num_traces, p.keys.table_size, p.keys.id_bytes = p.count, len(arrays["key_table"]), len(arrays["id"])
            if p.keys.table_size & (p.keys.table_size - 1) or p.keys.table_size < p.keys.num_traces:
                raise ValueError("wrong size of the hash table")
            p.keys.table = <const uint32_t *>_column(self.owners, arrays, "key_table", p.keys.table_size, 4)
            p.keys.id_offsets = <const int64_t *>_column(self.owners, arrays, "id_offsets", p.count + 1, 8)
            p.keys.ids = <const unsigned char *>_column(self.owners, arrays, "id", p.keys.id_bytes, 1)
            p.keys.samples = <const int32_t *>_column(self.owners, arrays, "sample", p.count, 4)
            p.patch_trace = <const int64_t *>_column(self.owners, arrays, "patch_trace", p.patches, 8)
            p.patch_group = <const uint8_t *>_column(self.owners, arrays, "patch_group", p.patches, 1)
            p.patch_segment = <const int32_t *>_column(self.owners, arrays, "patch_segment", p.patches, 4)
            p.patch_row = <const int32_t *>_column(self.owners, arrays, "patch_row", p.patches, 4)
            p.patch_num_tokens = <const int32_t *>_column(self.owners, arrays, "patch_num_tokens", p.patches, 4)
            p.patch_layout = <const uint8_t *>_column(self.owners, arrays, "patch_layout", p.patches, 1)

    def __dealloc__(self):
        free(self.parts)

    def find(self, bytes question_id, int32_t sample) -> int:
        """Return the number of the trace with a key, or -1. ValueError with the number of the part if that is corrupt."""
        cdef _Lookup call
        call.id, call.n, call.sample = question_id, len(question_id), sample
        self.run(_find, &call)
        return call.found

    def look_up(self, const int64_t[::1] indices, int64_t[:, ::1] out) -> None:
        """Write the locations of traces, with the patches of later parts applied.

        Parameters
        ----------
        indices : int64 (n,)
        out : int64 (n, 6)
            Columns graph_segment, graph_row, num_tokens, layout, sequence_segment and sequence_row. A
            segment of -1 means that the trace has no such data.

        Raises
        ------
        IndexError
            If an index is outside the store.
        ValueError
            If a location is invalid.
        """
        cdef _Lookup call
        if out.shape[0] != indices.shape[0] or out.shape[1] != 6:
            raise ValueError(f"out: expected shape ({indices.shape[0]}, 6), found ({out.shape[0]}, {out.shape[1]})")
        if indices.shape[0]:
            call.out, call.indices, call.n = &out[0, 0], &indices[0], indices.shape[0]
            self.run(_look_up, &call)

    def question_ids(self, const int64_t[::1] indices) -> list[str]:
        """Return the question ids of traces.

        Raises IndexError for an index outside the store and ValueError for corrupt ids.
        """
        cdef _Lookup call
        cdef list found = []
        cdef Py_ssize_t k, n = indices.shape[0]
        if n == 0:
            return found
        call.begin, call.ids = <int64_t *>allocate(n + 1, sizeof(int64_t)), NULL
        call.indices, call.n = &indices[0], n
        try:
            self.run(_measure_ids, &call)
            call.ids = <char *>allocate(call.begin[n], 1)
            self.run(_copy_ids, &call, True)
            for k in range(n):
                found.append(PyUnicode_DecodeUTF8(
                    call.ids + call.begin[k], <Py_ssize_t>(call.begin[k + 1] - call.begin[k]), "surrogatepass"))
        finally:
            free(call.begin)
            free(call.ids)
        return found

    cdef int run(self, int (*work)(void *) noexcept nogil, _Lookup *call, bint is_again=False) except -1:
        """Run one of the functions below."""
        cdef int ret
        call.parts, call.num_parts, call.truncated = self.parts, self.num_parts, NULL
        ret = ts_sigbus_guard_again(work, call) if is_again else ts_sigbus_guard(work, call)
        if call.truncated == NULL:
            call.truncated = ts_sigbus_fault() if ret == TS_ERR_FAULT else NULL
        if call.truncated != NULL:
            raise_fault(call.truncated)
        if ret == _NO_TRACE:
            raise IndexError(f"trace {call.failed}")
        if ret == _CORRUPT:
            raise ValueError(f"trace {call.failed}: invalid location")
        if ret == _CORRUPT_TABLE:
            raise ValueError("the hash table is corrupt", call.failed)
        if ret != 0:
            raise ValueError("id offsets out of bounds")
        return 0


cdef int _check_maps(_Lookup *call, int ret) noexcept nogil:
    """Set call.truncated if a file was truncated. Returns `ret`."""
    cdef Py_ssize_t k
    for k in range(call.num_parts):
        if call.parts[k].map != NULL:
            call.truncated = call.parts[k].map.base
            if not ts_map_is_intact(call.parts[k].map):
                return ret
    call.truncated = NULL
    return ret


cdef int _find(void *context) noexcept nogil:
    cdef _Lookup *call = <_Lookup *>context
    cdef Py_ssize_t k
    cdef int64_t row
    call.found = -1
    for k in range(call.num_parts):
        row = ts_index_find(&call.parts[k].keys, call.id, call.n, call.sample)
        if row == TS_INDEX_CORRUPT:
            call.failed = k
            return _check_maps(call, _CORRUPT_TABLE)
        if row >= 0:
            call.found = call.parts[k].first + row
            call.num_parts = k + 1  # the maps of later parts were not read
            break
    return _check_maps(call, 0)


cdef int _look_up(void *context) noexcept nogil:
    cdef _Lookup *call = <_Lookup *>context
    cdef Py_ssize_t k, i, part
    cdef int64_t row
    cdef int64_t *out = call.out
    cdef _Part *p
    for k in range(call.n):
        part = _part_of(call, call.indices[k])
        if part < 0:
            return _check_maps(call, _NO_TRACE)
        p = &call.parts[part]
        row = call.indices[k] - p.first
        out[0], out[1] = p.graph_segment[row], p.graph_row[row]
        out[2], out[3] = p.num_tokens[row], p.layout[row]
        out[4], out[5] = p.sequence_segment[row], p.sequence_row[row]
        for i in range(part + 1, call.num_parts):
            if call.parts[i].first_trace != p.first_trace:
                break  # a part of the next store
            if call.parts[i].patches:
                _apply_patches(&call.parts[i], call.indices[k] - p.first_trace, out)
        if not _is_valid(p, out):
            call.failed = call.indices[k]
            return _check_maps(call, _CORRUPT)
        out[0] += p.first_segment if out[0] >= 0 else 0
        out[4] += p.first_segment if out[4] >= 0 else 0
        out += 6
    return _check_maps(call, 0)


cdef bint _is_valid(const _Part *p, const int64_t *location) noexcept nogil:
    """Return whether the values of a location are in range. Row numbers are checked when rows are read."""
    if not (-1 <= location[0] < p.num_segments and -1 <= location[4] < p.num_segments):
        return False
    if location[1] < 0 or location[5] < 0 or not 0 <= location[2] <= _MAX_TOKENS:
        return False
    if location[0] < 0 and location[4] < 0 or location[0] >= 0 and location[2] == 0:
        return False
    return location[3] < 32 and p.layouts >> location[3] & 1


cdef int _measure_ids(void *context) noexcept nogil:
    cdef _Lookup *call = <_Lookup *>context
    cdef Py_ssize_t k, part
    cdef int64_t row, begin, end
    cdef _Part *p
    call.begin[0] = 0
    for k in range(call.n):
        part = _part_of(call, call.indices[k])
        if part < 0:
            return _check_maps(call, _NO_TRACE)
        p = &call.parts[part]
        row = call.indices[k] - p.first
        begin, end = p.keys.id_offsets[row], p.keys.id_offsets[row + 1]
        if not 0 <= begin <= end <= <int64_t>p.keys.id_bytes:
            return _check_maps(call, TS_ERR_BOUNDS)
        call.begin[k + 1] = call.begin[k] + end - begin
    return _check_maps(call, 0)


cdef int _copy_ids(void *context) noexcept nogil:
    cdef _Lookup *call = <_Lookup *>context
    cdef Py_ssize_t k
    cdef int64_t begin, length
    cdef _Part *p
    for k in range(call.n):
        p = &call.parts[_part_of(call, call.indices[k])]
        begin, length = p.keys.id_offsets[call.indices[k] - p.first], call.begin[k + 1] - call.begin[k]
        if begin < 0 or begin > <int64_t>p.keys.id_bytes - length:
            return _check_maps(call, TS_ERR_BOUNDS)
        memcpy(call.ids + call.begin[k], p.keys.ids + begin, <size_t>length)
    return _check_maps(call, 0)


cdef Py_ssize_t _part_of(_Lookup *call, int64_t index) noexcept nogil:
    """Return the part that holds a trace, or -1."""
    cdef Py_ssize_t lo = 0, hi = call.num_parts, middle
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if call.parts[middle].first <= index:
            lo = middle
        else:
            hi = middle
    # Skip parts that hold only patches: they start where the traces before them end.
    while lo > 0 and call.parts[lo].count == 0:
        lo -= 1
    if call.num_parts == 0 or index < call.parts[lo].first or index - call.parts[lo].first >= call.parts[lo].count:
        call.failed = index
        return -1
    return lo


cdef void _apply_patches(_Part *p, int64_t index, int64_t *out) noexcept nogil:
    cdef int64_t lo = 0, hi = p.patches, middle
    while lo < hi:
        middle = (lo + hi) // 2
        if p.patch_trace[middle] < index:
            lo = middle + 1
        else:
            hi = middle
    while lo < p.patches and p.patch_trace[lo] == index:
        if p.patch_group[lo] == 0:
            out[0], out[1] = p.patch_segment[lo], p.patch_row[lo]
            out[2], out[3] = p.patch_num_tokens[lo], p.patch_layout[lo]
        else:
            out[4], out[5] = p.patch_segment[lo], p.patch_row[lo]
        lo += 1
