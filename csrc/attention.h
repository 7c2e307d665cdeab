/* Attention matrices: packing causal triangles, head means, edges.
 *
 * A causal matrix of S tokens is stored as its lower triangle with the diagonal,
 * row by row: entry (i, j), j <= i, at i (i + 1) / 2 + j, S (S + 1) / 2 in all.
 * A square one is stored whole, S * S. */
#ifndef TS_ATTENTION_H
#define TS_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "half.h"

/* 1 if every entry above the diagonal of all `count` matrices (S, S) is zero
 * (either sign), else 0 with the flat position of the first in *where. */
int ts_is_causal(const void *in, enum ts_dtype dtype, size_t count, size_t S, size_t *where);

/* Copies the lower triangles of `count` matrices of itemsize 2, 4 or 8. */
void ts_pack_triangle(const void *in, size_t itemsize, size_t count, size_t S, void *out);

/* The inverse; entries above the diagonal are set to zero bytes. */
void ts_unpack_triangle(const void *in, size_t itemsize, size_t count, size_t S, void *out);

/* Mean over H rows of n values, row h starting at element h * stride, as float16.
 * Sums are taken in float64 (exact for float16 input in [0, 1]) and rounded
 * once. A mean that is NaN is 0x7e00. TS_ERR_RANGE if a finite mean is beyond float16. */
int ts_mean_rows(const void *in, enum ts_dtype dtype, size_t H, size_t stride, size_t n, uint16_t *out);

/* Its portable twin, for tests. */
int ts_mean_rows_portable(const void *in, enum ts_dtype dtype, size_t H, size_t stride, size_t n, uint16_t *out);

/* Mean over H heads of one layer (H, S, S), as float16, packed (causal = 1) or
 * square; otherwise as ts_mean_rows. */
int ts_head_mean(const void *in, enum ts_dtype dtype, size_t H, size_t S, int causal, uint16_t *out);

/* Which pairs become edges: all pairs with weight > threshold, or, where
 * top_k > 0, the top_k pairs with the largest weights, ties by position. */
struct ts_edge_rule {
    double threshold;
    double top_k_fraction; /* 0: use the threshold */
};

/* How many of n pairs a top-k rule keeps where none is NaN. */
size_t ts_top_k_count(size_t n, double fraction);

/* Marks the pairs of one layer (n weights as float32) that `rule` keeps.
 * keep[n] bytes 0 or 1; scratch[n] is written by a top-k rule only. Returns how many.
 * NaN is never kept. */
int64_t ts_select_pairs(const float *weights, size_t n, struct ts_edge_rule rule, unsigned char *keep, float *scratch);

#endif
