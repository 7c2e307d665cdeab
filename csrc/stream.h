/**
 * Copies that bypass the CPU cache. A batch is written once and exceeds the cache; a plain copy
 * would first read every destination line. All functions are thread safe.
 */
#ifndef TS_STREAM_H
#define TS_STREAM_H

#include <stddef.h>

/** Copy n bytes with non-temporal stores where available. Call ts_stream_fence() before another thread reads dst. */
void ts_stream_copy(void *dst, const void *src, size_t n);

/** Make streamed bytes visible to threads that synchronize with the caller. */
void ts_stream_fence(void);

#endif
