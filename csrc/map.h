/**
 * Read-only file mappings.
 *
 * A mapping may be read from several threads; opening and closing one
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
    const unsigned char *tail; /* last non-zero byte of the last page; NULL without bytes */
    unsigned char tail_byte;
};

/**
 * Map a whole regular file that is open for reading.
 *
 * @param map            set to the mapping, to be released by ts_map_close()
 * @param fd             descriptor of the file, which stays open and belongs to the caller
 * @param expected_size  size in bytes, or -1 to accept any size
 * @return TS_ERR_SIZE if the size differs, TS_ERR_IO with errno set, both with an empty mapping; TS_ERR_FAULT if the
 *         file was truncated meanwhile
 */
TS_WARN_UNUSED
int ts_map_open(struct ts_map *map, int fd, int64_t expected_size);

/** Release a mapping. Closing an empty one is allowed. */
void ts_map_close(struct ts_map *map);

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

#endif
