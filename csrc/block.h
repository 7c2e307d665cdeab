/* Large blocks of private memory for batches. */
#ifndef TS_BLOCK_H
#define TS_BLOCK_H

#include <stddef.h>

/* Rounds up to what ts_block_alloc takes from the system. */
size_t ts_block_size(size_t bytes);

/* Zeroed memory of ts_block_size(bytes), aligned to 2 MiB where it is that large and
 * asked for in huge pages, else to a page; NULL with errno where there is none. */
void *ts_block_alloc(size_t bytes);
void ts_block_free(void *block, size_t bytes);

/* Maps size bytes of a file that processes share; NULL with errno. A page at its front
 * counts the processes that hold what lies behind it. */
void *ts_shared_map(int fd, size_t size);
void ts_shared_unmap(void *base, size_t size);
void ts_shared_incref(void *base);
void ts_shared_decref(void *base);
int ts_shared_refcount(const void *base);

#endif
