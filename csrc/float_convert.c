#include "float_convert.h"

#include <math.h>
#include <string.h>

#include "error.h"
#include "simd.h"

size_t ts_dtype_bytes(enum ts_dtype dtype)
{
    switch (dtype) {
    case TS_F16: case TS_BF16: return 2;
    case TS_F32: return 4;
    case TS_F64: return 8;
    }
    return 0;
}

static uint32_t float_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static float bits_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

float ts_f16_to_f32_portable(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 31)
        return bits_float(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0));
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return bits_float(sign | float_bits(magnitude));
    }
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t ts_f32_to_f16_portable(float f)
{
    uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u) /* values of 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) {
        /* Subnormal or zero: adding 0.5 moves the value to a binade where the spacing of float32
         * is 2^-24, the spacing of float16 subnormals. */
        float shifted = bits_float(a) + 0.5f;
        return (uint16_t)(sign | (float_bits(shifted) - 0x3f000000u));
    }
    uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

uint16_t ts_f64_to_f16(double value)
{
#if defined(__aarch64__)
    __fp16 half = (__fp16)value; /* one instruction, which rounds once */
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
#else
    uint64_t u;
    memcpy(&u, &value, 8);
    uint32_t exponent = (uint32_t)(u >> 52) & 2047u;
    /* Values outside the normal range of float32 become zero, infinity or NaN in float16, so that
     * an inexact conversion to float32 does not matter. */
    if (exponent <= 1023 - 126 || exponent >= 1023 + 127)
        return ts_f32_to_f16_portable((float)value);
    uint32_t sign = (uint32_t)(u >> 63) << 31;
    uint64_t mantissa = u & 0xfffffffffffffull;
    uint32_t odd = (uint32_t)(mantissa >> 29) | ((mantissa & 0x1fffffffull) != 0);
    return ts_f32_to_f16_portable(bits_float(sign | (exponent - 1023 + 127) << 23 | odd));
#endif
}

void ts_bf16_to_f32(const ts_u16_unaligned *in, float *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = bits_float((uint32_t)in[i] << 16);
}

static void f16_to_f32_generic(const ts_u16_unaligned *in, float *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = ts_f16_to_f32_portable(in[i]);
}

static void f32_to_f16_generic(const ts_f32_unaligned *in, uint16_t *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = ts_f32_to_f16_portable(in[i]);
}

#if defined(__x86_64__)
#include <immintrin.h>

TS_TARGET_AVX2 static void f16_to_f32_avx2(const ts_u16_unaligned *in, float *out, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
    f16_to_f32_generic(in + i, out + i, n - i);
}

TS_TARGET_AVX2 static void f32_to_f16_avx2(const ts_f32_unaligned *in, uint16_t *out, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps((const float *)(const void *)(in + i)), 0));
    f32_to_f16_generic(in + i, out + i, n - i);
}
#elif defined(__aarch64__)
#include <arm_neon.h>

static void f16_to_f32_neon(const ts_u16_unaligned *in, float *out, size_t n)
{
    typedef __fp16 half_unaligned __attribute__((aligned(1), may_alias));
    for (size_t i = 0; i < n; i++) /* compilers vectorize this conversion */
        out[i] = (float)((const half_unaligned *)in)[i];
}

static void f32_to_f16_neon(const ts_f32_unaligned *in, uint16_t *out, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) { /* and Clang this one, but not GCC 12 */
        float32x4_t values;
        memcpy(&values, in + i, sizeof values);
        vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(values)));
    }
    f32_to_f16_generic(in + i, out + i, n - i);
}
#endif

void ts_f16_to_f32(const ts_u16_unaligned *in, float *out, size_t n)
{
    TS_KERNEL(f16_to_f32)(in, out, n);
}

void ts_f32_to_f16(const ts_f32_unaligned *in, uint16_t *out, size_t n)
{
    TS_KERNEL(f32_to_f16)(in, out, n);
}

void ts_to_f32(const void *in, enum ts_dtype dtype, float *out, size_t n)
{
    if (dtype == TS_F16)
        ts_f16_to_f32(in, out, n);
    else if (dtype == TS_BF16)
        ts_bf16_to_f32(in, out, n);
    else
        memcpy(out, in, n * sizeof *out);
}

#define BLOCK 512
#define MAX_COUNT 32768 /* values that a 16-bit counter can count */

int ts_to_f16(const void *in, enum ts_dtype dtype, uint16_t *out, size_t n, size_t *position)
{
    float buffer[BLOCK];
    if (dtype == TS_F16) {
        memcpy(out, in, n * 2);
        return TS_OK;
    }
    if (dtype == TS_F64) {
        const ts_f64_unaligned *values = in;
        for (size_t i = 0; i < n; i++) {
            out[i] = ts_f64_to_f16(values[i]);
            if ((out[i] & 0x7fffu) == 0x7c00u && isfinite(values[i])) {
                *position = i;
                return TS_ERR_RANGE;
            }
        }
        return TS_OK;
    }
    if (dtype != TS_F32 && dtype != TS_BF16)
        return TS_ERR_DTYPE;
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        size_t count = n - begin < BLOCK ? n - begin : BLOCK;
        const ts_f32_unaligned *values = (const ts_f32_unaligned *)in + begin;
        if (dtype == TS_BF16) {
            ts_bf16_to_f32((const ts_u16_unaligned *)in + begin, buffer, count);
            values = buffer;
        }
        ts_f32_to_f16(values, out + begin, count);
        int overflow = 0;
        for (size_t i = 0; i < count; i++)
            overflow |= (out[begin + i] & 0x7fffu) == 0x7c00u;
        for (size_t i = 0; overflow && i < count; i++)
            if ((out[begin + i] & 0x7fffu) == 0x7c00u && isfinite(values[i])) {
                *position = begin + i;
                return TS_ERR_RANGE;
            }
    }
    return TS_OK;
}

/* Count values whose exponent bits are all set. Counters as wide as the values take a third of the time. */
TS_INLINE size_t count_exponent_body(const ts_u16_unaligned *v, uint16_t exponent, size_t n)
{
    size_t count = 0;
    for (size_t begin = 0; begin < n; begin += MAX_COUNT) {
        size_t block = n - begin < MAX_COUNT ? n - begin : MAX_COUNT;
        uint16_t found = 0;
        for (size_t i = 0; i < block; i++)
            found = (uint16_t)(found + ((v[begin + i] & exponent) == exponent));
        count += found;
    }
    return count;
}

TS_DEFINE_KERNEL(size_t, count_exponent, (const ts_u16_unaligned *v, uint16_t exponent, size_t n), (v, exponent, n))

size_t ts_count_nonfinite(const void *in, enum ts_dtype dtype, size_t n)
{
    size_t count = 0;
    if (dtype == TS_F16 || dtype == TS_BF16)
        return TS_KERNEL(count_exponent)(in, dtype == TS_F16 ? 0x7c00u : 0x7f80u, n);
    if (dtype == TS_F32) {
        const ts_u32_unaligned *v = in;
        for (size_t i = 0; i < n; i++)
            count += (v[i] & 0x7f800000u) == 0x7f800000u;
    } else {
        const ts_u64_unaligned *v = in;
        for (size_t i = 0; i < n; i++)
            count += (v[i] & 0x7ff0000000000000ull) == 0x7ff0000000000000ull;
    }
    return count;
}
