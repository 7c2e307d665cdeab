/**
 * Attention matrices: packed causal triangles and means over heads.
 *
 * A causal matrix of S tokens is stored as its lower triangle with the diagonal, row by row:
 * entry (i, j), j <= i, at position i (i + 1) / 2 + j; S (S + 1) / 2 entries. A square matrix is
 * stored as S * S entries.
 *
 * All buffers belong to the caller. Inputs may be unaligned, outputs are aligned to their element
 * type, and inputs and outputs do not overlap. All functions are thread safe.
 */
#ifndef TS_ATTENTION_H
#define TS_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"
#include "float_convert.h"

/**
 * Check whether matrices are causal: every entry above the diagonal is zero, of either sign.
 *
 * @param in  count matrices (S, S) of type dtype
 * @return 1 if all matrices are causal, else 0
 */
int ts_is_causal(const void *in, enum ts_dtype dtype, size_t count, size_t S);

/**
 * Copy the lower triangles of matrices.
 *
 * @param in        count matrices (S, S)
 * @param itemsize  2, 4 or 8 bytes
 * @param out       count packed triangles
 */
void ts_pack_triangle(const void *in, size_t itemsize, size_t count, size_t S, void *out);

/**
 * Expand packed triangles into matrices with zeros above the diagonal: the inverse of
 * ts_pack_triangle().
 *
 * @param in        count packed triangles
 * @param itemsize  2, 4 or 8 bytes
 * @param out       count matrices (S, S)
 */
void ts_unpack_triangle(const void *in, size_t itemsize, size_t count, size_t S, void *out);

/**
 * Compute the mean over rows as float16.
 *
 * Sums are float64, which is exact for float16 input in [0, 1], and the mean is rounded once. A
 * NaN mean is stored as 0x7e00.
 *
 * @param in      H rows of n values; row h starts at element h * stride
 * @param out     n float16 values
 * @return TS_ERR_RANGE if a finite mean overflows float16
 */
TS_WARN_UNUSED
int ts_mean_rows(const void *in, enum ts_dtype dtype, size_t H, size_t stride, size_t n, uint16_t *out);

/**
 * Compute the mean over the H heads of one layer as float16.
 *
 * @param in      matrices (H, S, S)
 * @param causal  1: write the packed lower triangle; 0: write (S, S)
 * @return TS_ERR_RANGE if a finite mean overflows float16
 */
TS_WARN_UNUSED
int ts_head_mean(const void *in, enum ts_dtype dtype, size_t H, size_t S, int causal, uint16_t *out);

#endif
