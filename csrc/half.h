/* Conversions between float16 (IEEE 754 binary16), bfloat16, float32 and float64.
 * All round to nearest, ties to even. Inputs may lie at any address (an array of a mapped
 * pickle does), outputs are aligned to their element; they do not overlap; nothing is kept. */
#ifndef TS_HALF_H
#define TS_HALF_H

#include <stddef.h>
#include <stdint.h>

typedef uint16_t ts_u16_unaligned __attribute__((aligned(1)));
typedef uint32_t ts_u32 __attribute__((aligned(1)));
typedef uint64_t ts_u64 __attribute__((aligned(1)));
typedef float ts_f32 __attribute__((aligned(1)));
typedef double ts_f64 __attribute__((aligned(1)));

enum ts_dtype { TS_F16 = 0, TS_BF16 = 1, TS_F32 = 2, TS_F64 = 3 };

size_t ts_dtype_bytes(enum ts_dtype dtype); /* 0 for an unknown one */

void ts_f16_to_f32(const ts_u16_unaligned *in, float *out, size_t n);
void ts_f32_to_f16(const ts_f32 *in, uint16_t *out, size_t n);
void ts_bf16_to_f32(const ts_u16_unaligned *in, float *out, size_t n);

/* float64 to float16 in one rounding (through float32 rounded to odd). */
uint16_t ts_f64_to_f16(double value);

/* Any dtype to float16. Returns TS_ERR_RANGE, and the position in *where, at
 * the first finite value that would become infinite. float16 is copied. */
int ts_to_f16(const void *in, enum ts_dtype dtype, uint16_t *out, size_t n, size_t *where);

/* How many of n values are NaN or infinite. */
size_t ts_count_nonfinite(const void *in, enum ts_dtype dtype, size_t n);

/* Portable twins of the dispatched functions, for tests. */
float ts_f16_to_f32_portable(uint16_t h);
uint16_t ts_f32_to_f16_portable(float f);

#endif
