/**
 * Parallel copies with conversion, for batches: outputs are written with non-temporal stores.
 *
 * Sources and destinations belong to the caller and do not overlap. Functions may run concurrently
 * on different outputs.
 */
#ifndef TS_COPY_H
#define TS_COPY_H

#include <stddef.h>

#include "error.h"
#include "float_convert.h"

/** One contiguous copy. */
struct ts_copy {
    const unsigned char *src;
    unsigned char *dst;
    size_t items;
};

/** Return 1 if items can be copied from type `in` to `out`: the same type, or TS_F32 for TS_F16 and TS_BF16. */
int ts_can_copy(enum ts_dtype in, enum ts_dtype out);

/**
 * Copy n items, converting their type. Call ts_stream_fence() before another thread reads dst.
 *
 * @param in   type of the source
 * @param out  type of the destination; ts_can_copy(in, out) must be 1
 */
void ts_copy_items(unsigned char *dst, const unsigned char *src, size_t n, enum ts_dtype in, enum ts_dtype out);

/**
 * Run copies in several threads. Sources may lie in file mappings.
 *
 * @param copies  n copies
 * @return TS_ERR_DTYPE unless ts_can_copy(in, out), TS_ERR_NOMEM, TS_ERR_FAULT if a file was
 *         truncated during the call (see sigbus_guard.h); the output is undefined then
 */
TS_WARN_UNUSED
int ts_copy_many(const struct ts_copy *copies, size_t n, enum ts_dtype in, enum ts_dtype out, int num_threads);

#endif
