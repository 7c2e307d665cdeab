/**
 * Read-only file mappings and the validation of Zarr shards.
 *
 * A mapping may be read from several threads; opening, closing and recording the tail of one
 * mapping must not run concurrently with other uses of it.
 */
#ifndef TS_MAP_H
#define TS_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"

struct ts_map {
    const unsigned char *base; /* page aligned; NULL for an empty file; valid until ts_map_close() */
    size_t size;
    const unsigned char *tail; /* last non-zero byte of the last page; NULL before ts_map_record_tail() */
    unsigned char tail_byte;
};

/**
 * Map a whole regular file. The file descriptor is closed before the function returns.
 *
 * @param map            set to the mapping, to be released by ts_map_close(); empty on failure
 * @param path           path of the file
 * @param expected_size  size in bytes, or -1 to accept any size
 * @return TS_ERR_SIZE if the size differs, TS_ERR_IO with errno set
 */
TS_WARN_UNUSED
int ts_map_open(struct ts_map *map, const char *path, int64_t expected_size);

/**
 * Map a file that is open for reading.
 *
 * @param map            as for ts_map_open()
 * @param fd             descriptor of the file, which stays open and belongs to the caller
 * @param expected_size  as for ts_map_open()
 * @return TS_ERR_SIZE if the size differs, TS_ERR_IO with errno set
 */
TS_WARN_UNUSED
int ts_map_descriptor(struct ts_map *map, int fd, int64_t expected_size);

/** Release a mapping. Closing an empty one is allowed. */
void ts_map_close(struct ts_map *map);

/**
 * Record a byte at the end of the file for ts_map_is_intact().
 *
 * @return TS_ERR_FAULT if the file was truncated
 */
TS_WARN_UNUSED
int ts_map_record_tail(struct ts_map *map);

/**
 * Check that no byte read before this call was affected by a truncation of the file.
 *
 * Beyond the new end of a truncated file the rest of its page reads as zeros and later pages are
 * missing. The recorded byte reveals both, unless only zeros were cut off. May fault: call it
 * under ts_sigbus_guard().
 *
 * @return 1 if the file is intact, else 0
 */
int ts_map_is_intact(const struct ts_map *map);

/**
 * Copy bytes out of a mapping.
 *
 * @param out  receives the bytes [offset, offset + bytes), which must lie inside the mapping
 * @return TS_ERR_FAULT if the file was truncated, before or after the end of the range
 */
TS_WARN_UNUSED
int ts_map_copy(const struct ts_map *map, size_t offset, size_t bytes, void *out);

/**
 * Load the pages of a range into memory and wait for them; on Linux before 5.14 only a hint to
 * the kernel.
 */
void ts_map_prefetch(const void *begin, size_t bytes);

/** Drop the pages of a range, also from the page cache if no other process maps them. */
void ts_map_evict(const void *begin, size_t bytes);

/**
 * Validate an uncompressed shard (Zarr v3 sharding codec, index at the end, with crc32c): its
 * inner chunks must be contiguous from offset 0, in order.
 *
 * @param base         the shard
 * @param size         its size in bytes
 * @param num_chunks   number of inner chunks
 * @param chunk_bytes  size of an inner chunk
 * @return TS_ERR_SIZE, TS_ERR_CHECKSUM or TS_ERR_LAYOUT
 */
TS_WARN_UNUSED
int ts_shard_check(const unsigned char *base, size_t size, uint64_t num_chunks, uint64_t chunk_bytes);

#endif
