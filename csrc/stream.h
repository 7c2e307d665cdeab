/**
 * Copies that bypass the CPU cache. A batch is written once and exceeds the cache; a plain copy
 * would first read every destination line. All functions are thread safe.
 */
#ifndef TS_STREAM_H
#define TS_STREAM_H

#include <stddef.h>
#include <stdint.h>

/**
 * Copy n bytes with non-temporal stores where available. Call ts_stream_fence() before another thread
 * reads dst.
 *
 * @param dst  n bytes that do not overlap src; both belong to the caller
 */
void ts_stream_copy(void *dst, const void *src, size_t n);

/**
 * Copy as ts_stream_copy() does, and prefetch n bytes for a later copy into the second-level cache.
 *
 * The prefetches of ts_stream_copy() share the buffers of the first-level cache with its loads and
 * stores. That suffices where the processor itself prefetches a long source, not where sources of a
 * few KiB lie in random pages.
 *
 * @param later  source of a later copy; only a hint, it need not be mapped
 */
void ts_stream_copy_ahead(void *dst, const void *src, size_t n, const void *later);

/** Prefetch n bytes into the second-level cache. Only a hint, src need not be mapped. */
void ts_prefetch(const void *src, size_t n);

/**
 * Write first + index[k] to out[k] with non-temporal stores where available, as ts_stream_copy() does.
 *
 * @param index  n values, where n is a multiple of 8
 * @param out    n values, aligned to 64 bytes
 */
void ts_stream_add_offset(const int32_t *index, size_t n, int64_t first, int64_t *out);

/** Make streamed bytes visible to threads that synchronize with the caller. */
void ts_stream_fence(void);

#endif
