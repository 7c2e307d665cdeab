/**
 * Conversions between float16 (IEEE 754 binary16), bfloat16, float32 and float64.
 *
 * All conversions round to nearest, ties to even. Inputs may be unaligned, as arrays of a mapped
 * pickle are; outputs are aligned to their element type; inputs and outputs do not overlap. All
 * buffers belong to the caller. All functions are thread safe.
 */
#ifndef TS_FLOAT_CONVERT_H
#define TS_FLOAT_CONVERT_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"

typedef uint16_t ts_u16_unaligned __attribute__((aligned(1)));
typedef uint32_t ts_u32_unaligned __attribute__((aligned(1)));
typedef uint64_t ts_u64_unaligned __attribute__((aligned(1)));
typedef float ts_f32_unaligned __attribute__((aligned(1)));
typedef double ts_f64_unaligned __attribute__((aligned(1)));

/** Element types. */
enum ts_dtype { TS_F16 = 0, TS_BF16 = 1, TS_F32 = 2, TS_F64 = 3 };

/** Return the size of an element in bytes, 0 for an unknown type. */
size_t ts_dtype_bytes(enum ts_dtype dtype);

/** Convert n values from float16 to float32. */
void ts_f16_to_f32(const ts_u16_unaligned *in, float *out, size_t n);

/** Convert n values from float32 to float16. */
void ts_f32_to_f16(const ts_f32_unaligned *in, uint16_t *out, size_t n);

/** Convert n values from bfloat16 to float32. */
void ts_bf16_to_f32(const ts_u16_unaligned *in, float *out, size_t n);

/**
 * Convert n values to float32.
 *
 * @param dtype  type of the input: TS_F16, TS_BF16 or TS_F32
 */
void ts_to_f32(const void *in, enum ts_dtype dtype, float *out, size_t n);

/** Return a float64 value as float16, rounded once. */
uint16_t ts_f64_to_f16(double value);

/**
 * Convert n values of any type to float16.
 *
 * @param dtype     type of the input
 * @param position  set to the position of the first finite value that overflows float16
 * @return TS_ERR_RANGE if a finite value overflows float16, TS_ERR_DTYPE for an unknown type
 */
TS_WARN_UNUSED
int ts_to_f16(const void *in, enum ts_dtype dtype, uint16_t *out, size_t n, size_t *position);

/** Return how many of n values are NaN or infinite. */
size_t ts_count_nonfinite(const void *in, enum ts_dtype dtype, size_t n);

/** Return a float16 value as float32: the generic variant of ts_f16_to_f32(), public for tests. */
float ts_f16_to_f32_portable(uint16_t h);

/** Return a float32 value as float16: the generic variant of ts_f32_to_f16(), public for tests. */
uint16_t ts_f32_to_f16_portable(float f);

#endif
