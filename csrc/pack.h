/**
 * Packing of the arrays of one trace for a store: validated, packed and checksummed in one pass,
 * while they are in the cache. All buffers belong to the caller. Functions are thread safe on
 * distinct arguments.
 */
#ifndef TS_PACK_H
#define TS_PACK_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"
#include "float_convert.h"

/** Running statistics of a byte stream; zero at the beginning. */
struct ts_checksum_scan {
    size_t nonfinite; /* number of values that are NaN or infinite */
    uint32_t crc;     /* crc32c of the bytes */
    uint32_t *layer_crcs; /* receives the crc32c of each layer, or NULL */
};

/**
 * Add the values of a layer to a scan. Advances layer_crcs.
 *
 * @param in   n values of type dtype
 * @param out  receives a copy of the values, or NULL
 */
void ts_checksum_scan(struct ts_checksum_scan *scan, const void *in, enum ts_dtype dtype, size_t n, void *out);

/** Arguments and results of ts_pack_attention(). */
struct ts_pack {
    const void *const *sources; /* L layers (H, S, S) of source_dtype, as the source holds them */
    const void *const *stored;  /* the same layers in stored_dtype; ignored if mean is set */
    enum ts_dtype source_dtype, stored_dtype;
    size_t L, H, S;
    int causal; /* pack lower triangles; set to 0 if a layer is not causal */
    int mean;   /* write the mean over the heads as float16 instead of `stored` */
    void *out;  /* L layers of 1 or H triangles or squares; NULL: only scan `stored` */
    size_t layer; /* result: the layer of TS_ERR_RANGE */
    struct ts_checksum_scan scan; /* result: statistics of the packed values; layer_crcs is an argument */
};

/**
 * Pack the attention of all layers. If `causal` is 0 on return although it was 1, the output is
 * undefined.
 *
 * @return TS_ERR_RANGE if a mean over heads overflows float16
 */
TS_WARN_UNUSED
int ts_pack_attention(struct ts_pack *pack);

#endif
