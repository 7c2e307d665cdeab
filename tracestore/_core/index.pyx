# cython: language_level=3, binding=True
"""Lookup of trace keys in mapped index parts."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

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
        cdef int64_t previous = 0
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
