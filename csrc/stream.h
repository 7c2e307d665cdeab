/* Copies that do not pass through the cache: for a batch, which is written once
 * and larger than the cache, a plain copy reads every destination line first. */
#ifndef TS_STREAM_H
#define TS_STREAM_H

#include <stddef.h>

/* memcpy with streaming stores where the machine has them. Call ts_stream_fence
 * before another thread reads dst. */
void ts_stream_copy(void *dst, const void *src, size_t n);

/* Makes streamed bytes visible to threads that synchronise with the caller. */
void ts_stream_fence(void);

#endif
