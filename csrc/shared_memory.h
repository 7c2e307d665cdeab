/**
 * File mappings that several processes share.
 *
 * The first int of a mapping counts the processes that use it; the caller keeps its data on the
 * pages after the first. All functions are safe across threads and processes.
 */
#ifndef TS_SHARED_MEMORY_H
#define TS_SHARED_MEMORY_H

#include <stddef.h>

/**
 * Map a file for reading and writing.
 *
 * @param fd    descriptor of the file, which stays open and belongs to the caller
 * @param size  bytes to map
 * @return the mapping, to be released by ts_shared_unmap(), or NULL with errno set
 */
void *ts_shared_map(int fd, size_t size);

/** Release a mapping of ts_shared_map(); `base` may be NULL. */
void ts_shared_unmap(void *base, size_t size);

/** Increment the reference count of a mapping. */
void ts_shared_incref(void *base);

/** Decrement the reference count of a mapping. */
void ts_shared_decref(void *base);

/** Return the reference count of a mapping. */
int ts_shared_refcount(const void *base);

#endif
