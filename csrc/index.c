#include "index.h"

#include <string.h>

uint64_t ts_key_hash(const unsigned char *id, size_t id_bytes, int32_t sample)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < id_bytes; i++)
        hash = (hash ^ id[i]) * 0x100000001b3ull;
    uint32_t s = (uint32_t)sample;
    for (int i = 0; i < 4; i++, s >>= 8)
        hash = (hash ^ (s & 255u)) * 0x100000001b3ull;
    hash ^= hash >> 32;
    return hash * 0x9e3779b97f4a7c15ull ^ hash >> 29;
}

static int id_is_inside(const struct ts_index_part *part, uint64_t row)
{
    int64_t begin = part->id_offsets[row], end = part->id_offsets[row + 1];
    return begin >= 0 && begin <= end && (uint64_t)end <= part->id_bytes;
}

static int same_key(const struct ts_index_part *part, uint64_t row, const unsigned char *id, size_t id_bytes, int32_t sample)
{
    int64_t begin = part->id_offsets[row], end = part->id_offsets[row + 1];
    return part->samples[row] == sample && (uint64_t)(end - begin) == id_bytes
        && memcmp(part->ids + begin, id, id_bytes) == 0;
}

int64_t ts_index_find(const struct ts_index_part *part, const unsigned char *id, size_t id_bytes, int32_t sample)
{
    if (part->table_size == 0)
        return TS_INDEX_ABSENT;
    uint64_t mask = part->table_size - 1, slot = ts_key_hash(id, id_bytes, sample) & mask;
    for (uint64_t probes = 0; probes < part->table_size; probes++, slot = (slot + 1) & mask) {
        uint32_t entry = part->table[slot];
        if (entry == 0)
            return TS_INDEX_ABSENT;
        if (entry > part->num_traces || !id_is_inside(part, entry - 1))
            return TS_INDEX_CORRUPT;
        if (same_key(part, entry - 1, id, id_bytes, sample))
            return (int64_t)entry - 1;
    }
    return TS_INDEX_CORRUPT; /* a valid table has free slots */
}

int64_t ts_index_build(const struct ts_index_part *part, uint32_t *table)
{
    uint64_t mask = part->table_size - 1;
    for (uint64_t row = 0; row < part->num_traces; row++) {
        const unsigned char *id = part->ids + part->id_offsets[row];
        size_t id_bytes = (size_t)(part->id_offsets[row + 1] - part->id_offsets[row]);
        uint64_t slot = ts_key_hash(id, id_bytes, part->samples[row]) & mask;
        for (; table[slot] != 0; slot = (slot + 1) & mask)
            if (same_key(part, table[slot] - 1, id, id_bytes, part->samples[row]))
                return (int64_t)row;
        table[slot] = (uint32_t)row + 1;
    }
    return -1;
}
