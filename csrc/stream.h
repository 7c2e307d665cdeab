/* Copies that do not pass through the cache: for a batch, which is written once
 * and larger than the cache, a plain copy reads every destination line first. */
#ifndef TS_STREAM_H
#define TS_STREAM_H

#include <stddef.h>

/* memcpy with streaming stores where the machine has them. Call ts_stream_fence
 * before another thread reads dst. */
void ts_stream_copy(void *dst, const void *src, size_t n);

/* The same, at several places of the source at a time: what a processor reads ahead by itself ends
 * with each page, and where pages are small it waits for the next one. It takes more of
 * the memory's time from other threads. */
void ts_stream_copy_spread(void *dst, const void *src, size_t n);

/* Makes streamed bytes visible to threads that synchronise with the caller. */
void ts_stream_fence(void);

#endif
