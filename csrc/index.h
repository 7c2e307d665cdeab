/**
 * The hash table of one index part, which maps a key (question id, sample) to a row. The table is
 * used in place in the mapped file. Lookups are thread safe.
 */
#ifndef TS_INDEX_H
#define TS_INDEX_H

#include <stddef.h>
#include <stdint.h>

/** One index part. All pointers are borrowed. */
struct ts_index_part {
    uint64_t num_traces;
    uint64_t table_size;        /* a power of two, at least 2 * num_traces */
    const uint32_t *table;      /* 0: free slot, else row + 1; linear probing */
    const int64_t *id_offsets;  /* (num_traces + 1,) */
    const unsigned char *ids;
    uint64_t id_bytes;
    const int32_t *samples;     /* (num_traces,) */
};

/**
 * Return the hash of a key: 64-bit FNV-1a over the bytes of the id and then of the sample (int32,
 * little-endian), mixed so that the low bits depend on all bits.
 */
uint64_t ts_key_hash(const unsigned char *id, size_t id_bytes, int32_t sample);

enum { TS_INDEX_ABSENT = -1, TS_INDEX_CORRUPT = -2 };

/**
 * Find a key.
 *
 * @param id      id_bytes bytes
 * @return the row of the key, TS_INDEX_ABSENT, or TS_INDEX_CORRUPT if a table entry or the offsets
 *         of an id on the probe path are out of bounds
 */
int64_t ts_index_find(const struct ts_index_part *part, const unsigned char *id, size_t id_bytes, int32_t sample);

/**
 * Insert every row into a table.
 *
 * @param table  part->table_size zeros
 * @return the first row whose key is in the table already, or -1 if all keys are distinct
 */
int64_t ts_index_build(const struct ts_index_part *part, uint32_t *table);

#endif
