/* The arrays of one trace on their way into a store: checked, packed and summed in one
 * pass each, while they lie in the cache. */
#ifndef TS_PACK_H
#define TS_PACK_H

#include <stddef.h>
#include <stdint.h>

#include "half.h"

struct ts_checksum_scan {
    size_t nonfinite; /* values so far that are NaN or infinite */
    uint32_t crc;     /* crc32c of their bytes */
};

/* Adds n values, and copies them to `out` unless it is NULL. */
void ts_checksum_scan(struct ts_checksum_scan *scan, const void *in, enum ts_dtype dtype, size_t n, void *out);

/* Attention of all layers. The caller owns every buffer. */
struct ts_pack {
    const void *const *sources; /* L layers (H, S, S) of source_dtype, as the source has them */
    const void *const *stored;  /* the same in stored_dtype; not read where mean is set */
    enum ts_dtype source_dtype, stored_dtype;
    size_t L, H, S;
    int causal; /* lower triangles are wanted; becomes 0 where a layer is not causal */
    int mean;   /* the mean over the heads, as float16, instead of `stored` */
    void *out;  /* L layers of 1 or H triangles or squares; NULL: `stored` is as wanted, and scanned only */
    size_t layer; /* where TS_ERR_RANGE was found */
    struct ts_checksum_scan scan; /* of what is packed */
};

/* TS_ERR_RANGE where a head mean is beyond float16. Where `causal` has become 0, what was
 * packed is of no use. */
int ts_pack_attention(struct ts_pack *pack);

#endif
