/* The hash table from a trace's key (question id, sample) to its row in one
 * index part, as it lies in the mapped file. */
#ifndef TS_INDEX_H
#define TS_INDEX_H

#include <stddef.h>
#include <stdint.h>

struct ts_index_part {
    uint64_t num_traces;
    uint64_t table_size;        /* a power of two, at least 2 * num_traces */
    const uint32_t *table;      /* 0: free, else row + 1; linear probing */
    const int64_t *id_offsets;  /* num_traces + 1 */
    const unsigned char *ids;
    uint64_t id_bytes;
    const int32_t *samples;     /* num_traces */
};

/* FNV-1a, 64 bits, over the id's bytes and then the sample as int32 little-endian,
 * mixed once so that the low bits depend on all of them. */
uint64_t ts_key_hash(const unsigned char *id, size_t id_bytes, int32_t sample);

enum { TS_INDEX_ABSENT = -1, TS_INDEX_DAMAGED = -2 };

/* The row of the key, TS_INDEX_ABSENT, or TS_INDEX_DAMAGED where a row of the table or the offsets
 * of an id on the way are out of bounds. */
int64_t ts_index_find(const struct ts_index_part *part, const unsigned char *id, size_t id_bytes, int32_t sample);

/* Fills table (zeroed by the caller) with every row. Returns the first row whose
 * key is already there, or -1 if all are distinct. */
int64_t ts_index_build(const struct ts_index_part *part, uint32_t *table);

#endif
