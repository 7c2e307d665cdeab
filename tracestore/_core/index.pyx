# cython: language_level=3, binding=True
"""Lookup of trace keys in mapped index parts."""
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

cdef extern from "index.h" nogil:
    struct ts_index_part:
        uint64_t num_traces
        uint64_t table_size
        const uint32_t *table
        const int64_t *id_offsets
        const unsigned char *ids
        const int32_t *samples
    int64_t ts_index_find(const ts_index_part *part, const unsigned char *id, size_t id_bytes, int32_t sample)
    int64_t ts_index_build(const ts_index_part *part, uint32_t *table)


cdef class KeyTable:
    """The keys (question id, sample) of one index part. Holds its arrays:
    table uint32 (a power of two, or empty), id_offsets int64 (n + 1), ids uint8,
    samples int32 (n). ValueError where their sizes do not fit together."""
    cdef ts_index_part part
    cdef const uint32_t[::1] table
    cdef const int64_t[::1] id_offsets
    cdef const unsigned char[::1] ids
    cdef const int32_t[::1] samples

    def __cinit__(self, const uint32_t[::1] table, const int64_t[::1] id_offsets,
                  const unsigned char[::1] ids, const int32_t[::1] samples):
        cdef Py_ssize_t n = samples.shape[0], i
        self.table, self.id_offsets, self.ids, self.samples = table, id_offsets, ids, samples
        if id_offsets.shape[0] != n + 1 or id_offsets[0] != 0 or id_offsets[n] != ids.shape[0]:
            raise ValueError("id offsets do not fit the ids")
        if table.shape[0] & (table.shape[0] - 1) or (n > 0 and table.shape[0] < n):
            raise ValueError("hash table of a wrong size")
        for i in range(n):
            if id_offsets[i + 1] < id_offsets[i]:
                raise ValueError("id offsets decrease")
        self.part.num_traces = <uint64_t>n
        self.part.table_size = <uint64_t>table.shape[0]
        self.part.table = &table[0] if table.shape[0] else NULL
        self.part.id_offsets = &id_offsets[0]
        self.part.ids = &ids[0] if ids.shape[0] else NULL
        self.part.samples = &samples[0] if n else NULL

    def find(self, bytes question_id, int32_t sample=0) -> int:
        """The row of the key, or -1."""
        cdef const unsigned char *data = question_id
        return ts_index_find(&self.part, data, <size_t>len(question_id), sample)

    def build(self, uint32_t[::1] table) -> int:
        """Fills the zeroed `table`; returns -1, or the first row whose key repeats one before it."""
        cdef int64_t duplicate
        self.part.table_size = <uint64_t>table.shape[0]
        if table.shape[0] == 0 or table.shape[0] & (table.shape[0] - 1) or table.shape[0] < self.samples.shape[0] + 1:
            raise ValueError("hash table of a wrong size")
        self.part.table = &table[0]
        with nogil:
            duplicate = ts_index_build(&self.part, &table[0])
        self.part.table = &self.table[0] if self.table.shape[0] else NULL
        self.part.table_size = <uint64_t>self.table.shape[0]
        return duplicate


def find_key(list tables, bytes question_id, int32_t sample=0) -> tuple[int, int]:
    """(number of the KeyTable, row) of a key, or (-1, -1) where none has it."""
    cdef const unsigned char *data = question_id
    cdef size_t size = len(question_id), part
    cdef int64_t row
    cdef KeyTable table
    for part in range(len(tables)):
        table = <KeyTable>tables[part]
        row = ts_index_find(&table.part, data, size, sample)
        if row >= 0:
            return part, row
    return -1, -1


cdef struct _Part:
    int64_t first, count, patches
    const int32_t *graph_segment
    const int64_t *hidden_row
    const int64_t *attention_start
    const int32_t *num_tokens
    const uint8_t *layout
    const int32_t *sequence_segment
    const int32_t *last_token_row
    const int64_t *id_offsets
    const char *ids
    int64_t id_bytes
    const int64_t *patch_trace
    const uint8_t *patch_group
    const int32_t *patch_segment
    const int64_t *patch_hidden_row
    const int64_t *patch_attention_start
    const int32_t *patch_num_tokens
    const uint8_t *patch_layout
    const int32_t *patch_last_token_row


cdef const void *_column(list held, dict arrays, str name, Py_ssize_t count, Py_ssize_t itemsize) except? NULL:
    """The array's address; the array itself is kept in `held`."""
    cdef const unsigned char[::1] view
    array = arrays[name]
    if array.ndim != 1 or len(array) != count or array.itemsize != itemsize:
        raise ValueError(f"{name}: another size than the part's")
    if count == 0:
        return <const void *>1
    view = array.view("u1")
    held.append(view)
    return &view[0]


cdef class PlaceTable:
    """Where traces lie, over the parts of an index. parts: (first trace, arrays by
    column name) in order. ValueError where columns do not fit together."""
    cdef _Part *parts
    cdef Py_ssize_t num_parts
    cdef list held

    def __cinit__(self, list parts):
        cdef _Part *p
        cdef Py_ssize_t k
        self.held = []
        self.num_parts = len(parts)
        self.parts = <_Part *>calloc(self.num_parts + 1, sizeof(_Part))
        if self.parts == NULL:
            raise MemoryError()
        for k in range(self.num_parts):
            p = &self.parts[k]
            first, arrays = parts[k]
            p.first, p.count, p.patches = first, len(arrays["layout"]), len(arrays["patch_trace"])
            p.graph_segment = <const int32_t *>_column(self.held, arrays, "graph_segment", p.count, 4)
            p.hidden_row = <const int64_t *>_column(self.held, arrays, "hidden_row", p.count, 8)
            p.attention_start = <const int64_t *>_column(self.held, arrays, "attention_start", p.count, 8)
            p.num_tokens = <const int32_t *>_column(self.held, arrays, "num_tokens", p.count, 4)
            p.layout = <const uint8_t *>_column(self.held, arrays, "layout", p.count, 1)
            p.sequence_segment = <const int32_t *>_column(self.held, arrays, "sequence_segment", p.count, 4)
            p.last_token_row = <const int32_t *>_column(self.held, arrays, "last_token_row", p.count, 4)
            p.id_bytes = len(arrays["id"])
            p.id_offsets = <const int64_t *>_column(self.held, arrays, "id_offsets", p.count + 1, 8)
            p.ids = <const char *>_column(self.held, arrays, "id", p.id_bytes, 1)
            p.patch_trace = <const int64_t *>_column(self.held, arrays, "patch_trace", p.patches, 8)
            p.patch_group = <const uint8_t *>_column(self.held, arrays, "patch_group", p.patches, 1)
            p.patch_segment = <const int32_t *>_column(self.held, arrays, "patch_segment", p.patches, 4)
            p.patch_hidden_row = <const int64_t *>_column(self.held, arrays, "patch_hidden_row", p.patches, 8)
            p.patch_attention_start = <const int64_t *>_column(self.held, arrays, "patch_attention_start", p.patches, 8)
            p.patch_num_tokens = <const int32_t *>_column(self.held, arrays, "patch_num_tokens", p.patches, 4)
            p.patch_layout = <const uint8_t *>_column(self.held, arrays, "patch_layout", p.patches, 1)
            p.patch_last_token_row = <const int32_t *>_column(self.held, arrays, "patch_last_token_row", p.patches, 4)

    def __dealloc__(self):
        free(self.parts)

    def look_up(self, const int64_t[::1] indices, int64_t[:, ::1] out) -> None:
        """out (n, 7): graph_segment, hidden_row, attention_start, num_tokens, layout,
        sequence_segment, last_token_row of each trace, patches of later parts applied.
        A segment of -1: no such place. IndexError outside the store."""
        cdef Py_ssize_t k, i, part
        cdef int64_t row
        cdef _Part *p
        if out.shape[0] != indices.shape[0] or out.shape[1] != 7:
            raise ValueError("out has another shape than (n, 7)")
        for k in range(indices.shape[0]):
            part = self.part_of(indices[k])
            p = &self.parts[part]
            row = indices[k] - p.first
            out[k, 0], out[k, 1], out[k, 2] = p.graph_segment[row], p.hidden_row[row], p.attention_start[row]
            out[k, 3], out[k, 4] = p.num_tokens[row], p.layout[row]
            out[k, 5], out[k, 6] = p.sequence_segment[row], p.last_token_row[row]
            for i in range(part + 1, self.num_parts):
                if self.parts[i].patches:
                    _apply(&self.parts[i], indices[k], out, k)

    def question_ids(self, const int64_t[::1] indices) -> list[str]:
        """The question ids of some traces. IndexError outside the store, ValueError where
        the ids are damaged."""
        cdef list found = []
        cdef Py_ssize_t k
        cdef int64_t row, begin, end
        cdef _Part *p
        for k in range(indices.shape[0]):
            p = &self.parts[self.part_of(indices[k])]
            row = indices[k] - p.first
            begin, end = p.id_offsets[row], p.id_offsets[row + 1]
            if not 0 <= begin <= end <= p.id_bytes:
                raise ValueError("id offsets out of bounds")
            found.append(PyUnicode_DecodeUTF8(p.ids + begin, <Py_ssize_t>(end - begin), "surrogatepass"))
        return found

    cdef Py_ssize_t part_of(self, int64_t index) except -1:
        cdef Py_ssize_t lo = 0, hi = self.num_parts, middle
        while hi - lo > 1:
            middle = (lo + hi) // 2
            if self.parts[middle].first <= index:
                lo = middle
            else:
                hi = middle
        # Parts of patches only begin where the traces before them end.
        while lo > 0 and self.parts[lo].count == 0:
            lo -= 1
        if self.num_parts == 0 or index < self.parts[lo].first or index - self.parts[lo].first >= self.parts[lo].count:
            raise IndexError(f"trace {index}")
        return lo


cdef void _apply(_Part *p, int64_t index, int64_t[:, ::1] out, Py_ssize_t k):
    cdef int64_t lo = 0, hi = p.patches, middle
    while lo < hi:
        middle = (lo + hi) // 2
        if p.patch_trace[middle] < index:
            lo = middle + 1
        else:
            hi = middle
    while lo < p.patches and p.patch_trace[lo] == index:
        if p.patch_group[lo] == 0:
            out[k, 0], out[k, 1] = p.patch_segment[lo], p.patch_hidden_row[lo]
            out[k, 2], out[k, 3] = p.patch_attention_start[lo], p.patch_num_tokens[lo]
            out[k, 4] = p.patch_layout[lo]
        else:
            out[k, 5], out[k, 6] = p.patch_segment[lo], p.patch_last_token_row[lo]
        lo += 1
