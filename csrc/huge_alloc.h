/**
 * Large zeroed allocations in huge pages, for batches. All functions are thread safe.
 */
#ifndef TS_HUGE_ALLOC_H
#define TS_HUGE_ALLOC_H

#include <stddef.h>

/** Return the size of the mapping that ts_huge_alloc(bytes) makes: `bytes`, rounded up. */
size_t ts_huge_size(size_t bytes);

/**
 * Map zeroed private memory of ts_huge_size(bytes) bytes.
 *
 * Memory of 2 MiB and more is aligned to 2 MiB and requested in huge pages; smaller memory is
 * aligned to a page.
 *
 * @return the memory, to be freed by ts_huge_free(), or NULL with errno set
 */
void *ts_huge_alloc(size_t bytes);

/**
 * Unmap memory of ts_huge_alloc().
 *
 * @param memory  the memory, or NULL
 * @param bytes   the argument of ts_huge_alloc()
 */
void ts_huge_free(void *memory, size_t bytes);

#endif
