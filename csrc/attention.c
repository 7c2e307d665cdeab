#include "attention.h"

#include <math.h>
#include <string.h>

#include "error.h"
#include "simd.h"

#define BLOCK 256

/* Return 1 if one of n values is neither zero nor minus zero. */
static int any_nonzero(const unsigned char *values, size_t itemsize, size_t n)
{
    uint64_t any = 0;
    size_t bytes = n * itemsize;
    if (bytes < 8)
        memcpy(&any, values, bytes);
    else {
        for (size_t k = 0; k < bytes / 8; k++)
            any |= ((const ts_u64_unaligned *)values)[k];
        any |= *(const ts_u64_unaligned *)(values + bytes - 8); /* may overlap the previous ones */
    }
    return (any & (itemsize == 2 ? 0x7fff7fff7fff7fffu : itemsize == 4 ? 0x7fffffff7fffffffu : INT64_MAX)) != 0;
}

/* Return 1 if every entry above the diagonal of a matrix is zero. */
static int is_causal(const unsigned char *in, size_t itemsize, size_t S)
{
    for (size_t i = 0; i + 1 < S; i++)
        if (any_nonzero(in + (i * S + i + 1) * itemsize, itemsize, S - i - 1))
            return 0;
    return 1;
}

static int is_causal_f16_generic(const ts_u16_unaligned *in, size_t S)
{
    return is_causal((const unsigned char *)in, 2, S);
}

#if defined(__x86_64__)
#include <immintrin.h>

TS_TARGET_AVX512 static int is_causal_f16_avx512(const ts_u16_unaligned *in, size_t S)
{
    __m512i any = _mm512_setzero_si512();
    for (size_t i = 0; i + 1 < S; i++) {
        const ts_u16_unaligned *row = in + i * S + i + 1;
        size_t n = S - i - 1;
        for (; n >= 32; row += 32, n -= 32)
            any = _mm512_or_si512(any, _mm512_loadu_si512(row));
        any = _mm512_or_si512(any, _mm512_maskz_loadu_epi16((1u << n) - 1, row));
    }
    return _mm512_test_epi16_mask(any, _mm512_set1_epi16(0x7fff)) == 0;
}
#endif

int ts_is_causal(const void *in, enum ts_dtype dtype, size_t count, size_t S)
{
    size_t itemsize = ts_dtype_bytes(dtype);
    for (size_t m = 0; m < count; m++) {
        const unsigned char *matrix = (const unsigned char *)in + m * S * S * itemsize;
        if (!(dtype == TS_F16 ? TS_KERNEL(is_causal_f16)((const ts_u16_unaligned *)matrix, S) : is_causal(matrix, itemsize, S)))
            return 0;
    }
    return 1;
}

void ts_pack_triangle(const void *in, size_t itemsize, size_t count, size_t S, void *out)
{
    const unsigned char *src = in;
    unsigned char *dst = out;
    for (size_t m = 0; m < count; m++)
        for (size_t i = 0; i < S; i++, src += S * itemsize) {
            memcpy(dst, src, (i + 1) * itemsize);
            dst += (i + 1) * itemsize;
        }
}

void ts_unpack_triangle(const void *in, size_t itemsize, size_t count, size_t S, void *out)
{
    const unsigned char *src = in;
    unsigned char *dst = out;
    for (size_t m = 0; m < count; m++)
        for (size_t i = 0; i < S; i++, dst += S * itemsize) {
            memcpy(dst, src, (i + 1) * itemsize);
            memset(dst + (i + 1) * itemsize, 0, (S - i - 1) * itemsize);
            src += (i + 1) * itemsize;
        }
}

static void add_row(const void *row, enum ts_dtype dtype, size_t n, float *scratch, double *sum)
{
    const ts_f32_unaligned *values = scratch;
    if (dtype == TS_F64) {
        const ts_f64_unaligned *wide = row;
        for (size_t j = 0; j < n; j++)
            sum[j] += wide[j];
        return;
    }
    if (dtype == TS_F32)
        values = row;
    else
        ts_to_f32(row, dtype, scratch, n);
    for (size_t j = 0; j < n; j++)
        sum[j] += (double)values[j];
}

static int mean_rows_of_any(const void *in, enum ts_dtype dtype, size_t H, size_t stride, size_t n, uint16_t *out)
{
    size_t itemsize = ts_dtype_bytes(dtype);
    double sum[BLOCK];
    float scratch[BLOCK];
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        size_t count = n - begin < BLOCK ? n - begin : BLOCK;
        memset(sum, 0, count * sizeof *sum);
        for (size_t h = 0; h < H; h++)
            add_row((const unsigned char *)in + (h * stride + begin) * itemsize, dtype, count, scratch, sum);
        for (size_t j = 0; j < count; j++) {
            double mean = sum[j] / (double)H;
            uint16_t half = ts_f64_to_f16(mean);
            if ((half & 0x7fffu) == 0x7c00u && isfinite(mean))
                return TS_ERR_RANGE;
            /* A single NaN, because sign and payload of a computed NaN depend on the processor. */
            out[begin + j] = isnan(mean) ? 0x7e00u : half;
        }
    }
    return TS_OK;
}

/* Means over float16 rows, as ts_mean_rows(). Means of finite float16 values are finite. The variants
 * return 0 if a mean is NaN or there are too few columns; mean_rows_of_any() handles both. */
static int mean_rows_f16_generic(const ts_u16_unaligned *in, size_t H, size_t stride, size_t n, uint16_t *out)
{
    return mean_rows_of_any(in, TS_F16, H, stride, n, out) == TS_OK;
}

#if defined(__x86_64__)
/* Convert four doubles to float32, rounding to odd. Rounding the result once more, to float16, then
 * equals a single rounding. */
TS_TARGET_AVX2 static inline __m128 to_odd_floats(__m256d values)
{
    const __m256d magnitude = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7fffffffffffffffll));
    __m128 nearest = _mm256_cvtpd_ps(values);
    __m256d back = _mm256_cvtps_pd(nearest);
    __m256d inexact = _mm256_cmp_pd(back, values, _CMP_NEQ_OQ); /* false for NaN */
    __m256d is_larger = _mm256_cmp_pd(_mm256_and_pd(back, magnitude), _mm256_and_pd(values, magnitude), _CMP_GT_OQ);
    const __m256i even = _mm256_set_epi32(6, 4, 2, 0, 6, 4, 2, 0); /* low halves of the masks */
    __m128i is_inexact = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(_mm256_castpd_si256(inexact), even));
    __m128i steps_down = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(_mm256_castpd_si256(is_larger), even));
    __m128i bits = _mm_add_epi32(_mm_castps_si128(nearest), steps_down); /* one step toward zero */
    return _mm_castsi128_ps(_mm_or_si128(bits, _mm_and_si128(is_inexact, _mm_set1_epi32(1))));
}

#define TARGET_EIGHT TS_TARGET_AVX2
TARGET_EIGHT static inline int mean_of_eight(const ts_u16_unaligned *in, size_t H, size_t stride, uint16_t *out)
{
    __m256d low = _mm256_setzero_pd(), high = low, heads = _mm256_set1_pd((double)H);
    for (size_t h = 0; h < H; h++) {
        __m256 row = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + h * stride)));
        low = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(row)), low);
        high = _mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(row, 1)), high);
    }
    __m256 means = _mm256_set_m128(to_odd_floats(_mm256_div_pd(high, heads)), to_odd_floats(_mm256_div_pd(low, heads)));
    _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph(means, _MM_FROUND_TO_NEAREST_INT));
    return _mm256_movemask_ps(_mm256_cmp_ps(means, means, _CMP_UNORD_Q)) == 0;
}

/* Convert eight doubles to float32, rounding to odd. */
TS_TARGET_AVX512 static inline __m256 to_odd_floats_avx512(__m512d values)
{
    __m256 truncated = _mm512_cvt_roundpd_ps(values, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(truncated), values, _CMP_NEQ_OQ); /* false for NaN */
    __m256i bits = _mm256_castps_si256(truncated);
    return _mm256_castsi256_ps(_mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1)));
}

/* Sixteen columns at a time. */
TS_TARGET_AVX512 static int mean_rows_f16_avx512(const ts_u16_unaligned *in, size_t H, size_t stride, size_t n, uint16_t *out)
{
    __m512d heads = _mm512_set1_pd((double)H);
    __mmask16 nan = 0;
    for (size_t j = 0; j < n; j += 16) {
        __mmask16 valid = (__mmask16)((1u << (n - j < 16 ? n - j : 16)) - 1);
        __m512d low = _mm512_setzero_pd(), high = low;
        for (size_t h = 0; h < H; h++) {
            __m512 row = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(valid, in + h * stride + j));
            low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(row)));
            high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(row, 1)));
        }
        __m256 first = to_odd_floats_avx512(_mm512_div_pd(low, heads)), second = to_odd_floats_avx512(_mm512_div_pd(high, heads));
        __m512 means = _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
        _mm256_mask_storeu_epi16(out + j, valid, _mm512_cvtps_ph(means, _MM_FROUND_TO_NEAREST_INT));
        nan |= _mm512_mask_cmp_ps_mask(valid, means, means, _CMP_UNORD_Q);
    }
    return nan == 0;
}
#elif defined(__aarch64__)
#include <arm_neon.h>

#define TARGET_EIGHT
TARGET_EIGHT static inline int mean_of_eight(const ts_u16_unaligned *in, size_t H, size_t stride, uint16_t *out)
{
    float64x2_t sums[4] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)};
    for (size_t h = 0; h < H; h++) {
        float16x8_t row;
        memcpy(&row, in + h * stride, sizeof row);
        float32x4_t low = vcvt_f32_f16(vget_low_f16(row)), high = vcvt_high_f32_f16(row);
        sums[0] = vaddq_f64(sums[0], vcvt_f64_f32(vget_low_f32(low)));
        sums[1] = vaddq_f64(sums[1], vcvt_high_f64_f32(low));
        sums[2] = vaddq_f64(sums[2], vcvt_f64_f32(vget_low_f32(high)));
        sums[3] = vaddq_f64(sums[3], vcvt_high_f64_f32(high));
    }
    float64x2_t heads = vdupq_n_f64((double)H);
    uint32x4_t is_number = vdupq_n_u32(UINT32_MAX);
    for (int k = 0; k < 4; k += 2) { /* vcvtx rounds to odd */
        float32x2_t first = vcvtx_f32_f64(vdivq_f64(sums[k], heads));
        float32x4_t means = vcvtx_high_f32_f64(first, vdivq_f64(sums[k + 1], heads));
        is_number = vandq_u32(is_number, vceqq_f32(means, means));
        vst1_u16(out + 2 * k, vreinterpret_u16_f16(vcvt_f16_f32(means)));
    }
    return vminvq_u32(is_number) != 0;
}
#endif

#if defined(TARGET_EIGHT)
/* Eight columns at a time; the last eight may overlap the previous ones. */
TARGET_EIGHT static int mean_rows_f16_eight(const ts_u16_unaligned *in, size_t H, size_t stride, size_t n, uint16_t *out)
{
    if (n < 8)
        return 0;
    int is_done = mean_of_eight(in + n - 8, H, stride, out + n - 8);
    for (size_t j = 0; j + 8 <= n; j += 8)
        is_done &= mean_of_eight(in + j, H, stride, out + j);
    return is_done;
}
#endif

int ts_mean_rows(const void *in, enum ts_dtype dtype, size_t H, size_t stride, size_t n, uint16_t *out)
{
    if (dtype == TS_F16 && TS_KERNEL(mean_rows_f16)(in, H, stride, n, out))
        return TS_OK;
    return mean_rows_of_any(in, dtype, H, stride, n, out);
}

int ts_head_mean(const void *in, enum ts_dtype dtype, size_t H, size_t S, int causal, uint16_t *out)
{
    size_t row_bytes = S * ts_dtype_bytes(dtype);
    for (size_t i = 0; i < S; i++) {
        size_t n = causal ? i + 1 : S;
        int ret = ts_mean_rows((const unsigned char *)in + i * row_bytes, dtype, H, S * S, n, out);
        if (ret != TS_OK)
            return ret;
        out += n;
    }
    return TS_OK;
}
