/* Read-only file maps and the check of a Zarr shard. */
#ifndef TS_MAP_H
#define TS_MAP_H

#include <stddef.h>
#include <stdint.h>

struct ts_map {
    const unsigned char *base; /* page aligned; NULL for an empty file; lives until ts_map_close */
    size_t size;
    const unsigned char *tail; /* the last byte of the last page that is not zero; NULL before ts_map_record_tail */
    unsigned char tail_byte;
};

/* Maps the regular file at `path` whole. expected_size < 0 accepts any size,
 * otherwise another size is TS_ERR_SIZE. TS_ERR_IO leaves errno. The file
 * descriptor is closed before the function returns. */
int ts_map_open(struct ts_map *map, const char *path, int64_t expected_size);
/* The same of a file that is open for reading, which stays open. */
int ts_map_descriptor(struct ts_map *map, int fd, int64_t expected_size);
void ts_map_close(struct ts_map *map);

/* Remembers a byte at the end of the file, for ts_map_is_intact. TS_ERR_FAULT. */
int ts_map_record_tail(struct ts_map *map);

/* Whether no byte that was read before this call is other than it was at ts_map_record_tail for the
 * file having been cut short. Behind the new end of a file the rest of its page reads as
 * zeros and the pages after it are gone: either is seen at the marked byte, unless only
 * zeros were cut off. May fault: under ts_sigbus_guard. */
int ts_map_is_intact(const struct ts_map *map);

/* Copies bytes out of a map; TS_ERR_FAULT where the file was cut short, whether before
 * their end or behind it. */
int ts_map_copy(const struct ts_map *map, size_t from, size_t bytes, void *out);

/* Brings a range of a map into memory, waiting for the disk; a hint where the kernel is
 * older than Linux 5.14. Ranges are widened to pages. */
void ts_map_prefetch(const void *from, size_t bytes);

/* Lets go of the pages of a range, also in the page cache if no other process maps them. */
void ts_map_evict(const void *from, size_t bytes);

/* Major faults (those that waited for a disk) of the calling thread so far; see platform.h. */
int64_t ts_major_faults(void);

/* Checks an uncompressed shard (Zarr v3 sharding codec, index at the end with
 * crc32c): num_chunks inner chunks of chunk_bytes each must lie one behind the
 * other from offset 0. TS_ERR_SIZE, TS_ERR_CHECKSUM or TS_ERR_LAYOUT. */
int ts_shard_check(const unsigned char *base, size_t size, uint64_t num_chunks, uint64_t chunk_bytes);

#endif
