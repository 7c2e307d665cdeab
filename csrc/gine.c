#include "gine.h"

#include <string.h>

#include "error.h"
#include "parallel.h"
#include "simd.h"

#define MAX_SLOTS 64
/* Columns are processed in blocks of at most four vectors per row: a block stays in the L1 or L2 cache,
 * the accumulators of a row stay in registers. */
#define BLOCK_ROW_BYTES 256

static size_t round_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static int num_slots(const struct ts_gine *g)
{
    size_t n = g->num_threads < 1 ? 1 : (size_t)g->num_threads;
    n = n < g->num_graphs ? n : g->num_graphs;
    return n < MAX_SLOTS ? (int)n : MAX_SLOTS;
}

int ts_gine_check(const struct ts_gine *g)
{
    if (g->node_ptr[0] < 0 || g->weight_ptr[0] < 0 || g->num_channels < 1 || (g->source && g->num_channels > 1))
        return TS_ERR_BOUNDS;
    for (size_t k = 0; k < g->num_graphs; k++) {
        int64_t S = -1, n = -1;
        if (g->node_ptr[k + 1] >= g->node_ptr[k])
            S = g->node_ptr[k + 1] - g->node_ptr[k];
        if (g->weight_ptr[k + 1] >= g->weight_ptr[k])
            n = g->weight_ptr[k + 1] - g->weight_ptr[k];
        if (S < 0 || n < 0 || S > INT32_MAX ||
            (g->source == NULL && (uint64_t)n / g->num_channels < (uint64_t)(S * (S + 1) / 2)))
            return TS_ERR_BOUNDS;
    }
    if ((uint64_t)(g->node_ptr[g->num_graphs] - g->node_ptr[0]) != g->num_rows ||
        (uint64_t)g->weight_ptr[g->num_graphs] > g->num_weights)
        return TS_ERR_BOUNDS;
    return TS_OK;
}

/* Sizes in bytes of the arrays in a slot, the workspace of one thread: the edges of a graph, grouped by
 * target (forward) or by source (backward), and one block of columns. With several channels, the edges
 * of one row at a time, and blocks of w and its gradient. */
struct slot_sizes {
    size_t ptr, index, value, rows, sums, columns; /* sums and columns: with several channels only */
};

static size_t num_pairs(const struct ts_gine *g, size_t k)
{
    size_t S = (size_t)(g->node_ptr[k + 1] - g->node_ptr[k]);
    return g->source ? (size_t)(g->weight_ptr[k + 1] - g->weight_ptr[k]) : S * (S + 1) / 2;
}

static size_t slot_bytes(const struct ts_gine *g, size_t real_bytes, struct slot_sizes *sizes)
{
    size_t tokens = 1, edges = 1;
    for (size_t k = 0; k < g->num_graphs; k++) {
        size_t S = (size_t)(g->node_ptr[k + 1] - g->node_ptr[k]), n = num_pairs(g, k);
        tokens = S > tokens ? S : tokens;
        edges = n > edges ? n : edges;
    }
    size_t C = g->num_channels;
    if (C > 1)
        *sizes = (struct slot_sizes){
            .index = round_up(tokens * sizeof(uint32_t)), .value = round_up(C * tokens * real_bytes),
            .rows = 3 * tokens * BLOCK_ROW_BYTES, .sums = 2 * round_up(tokens * sizeof(double)),
            .columns = 2 * C * BLOCK_ROW_BYTES};
    else
        *sizes = (struct slot_sizes){
            .ptr = round_up((tokens + 1) * sizeof(size_t)), .index = round_up(edges * sizeof(uint32_t)),
            .value = round_up(edges * real_bytes), .rows = round_up(tokens * BLOCK_ROW_BYTES)};
    return sizes->ptr + sizes->index + sizes->value + sizes->rows + sizes->sums + sizes->columns;
}

/* The backward pass keeps partial sums of grad_w and grad_b for each graph. */
static size_t partial_bytes(const struct ts_gine *g, size_t real_bytes)
{
    return round_up((g->num_channels + 1) * g->num_graphs * g->dim * real_bytes);
}

size_t ts_gine_workspace(const struct ts_gine *g, size_t real_bytes, int backward)
{
    struct slot_sizes sizes;
    size_t bytes = (size_t)num_slots(g) * slot_bytes(g, real_bytes, &sizes);
    return 64 + bytes + (backward ? partial_bytes(g, real_bytes) : 0);
}

/* Load the weights first .. first + n as float64, which represents all weight types exactly. */
static void load_weights(const struct ts_gine *g, size_t first, size_t n, double *out)
{
    float narrow[64];
    for (size_t done = 0; done < n; done += 64) {
        size_t count = n - done < 64 ? n - done : 64, start = first + done;
        if (g->weight_dtype == TS_F64) {
            memcpy(out + done, (const double *)g->weights + start, count * sizeof *out);
            continue;
        }
        ts_to_f32((const unsigned char *)g->weights + start * ts_dtype_bytes(g->weight_dtype), g->weight_dtype, narrow, count);
        for (size_t c = 0; c < count; c++)
            out[done + c] = narrow[c];
    }
}

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Every instruction set rounds a product and sum once, together, so that all of them and all compilers
 * give the same bits. */
typedef float vector_generic_f32 __attribute__((vector_size(16)));
typedef double vector_generic_f64 __attribute__((vector_size(16)));

#if defined(__x86_64__) && !defined(__FMA__)
/* Fused multiply-add of two lanes. The product is exact in float64 and the sum is rounded to odd: moved
 * one step toward zero if it was rounded away from it, and made odd unless it is exact. The conversion
 * to float32 then rounds once (Boldo and Melquiond, Emulation of FMA and Correctly Rounded Sums, 2008). */
TS_INLINE __m128 fma_wide(__m128 a, __m128 b, __m128 c)
{
    __m128d product = _mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b)), term = _mm_cvtps_pd(c);
    __m128d sum = product + term, part = sum - product;
    __m128d error = (product - (sum - part)) + (term - part); /* exact; NaN if the sum is not finite */
    __m128d outward = _mm_xor_pd(error, _mm_and_pd(sum, _mm_set1_pd(-0.0)));
    __m128i above = _mm_castpd_si128(_mm_cmplt_pd(outward, _mm_setzero_pd()));
    __m128i below = _mm_castpd_si128(_mm_cmpgt_pd(outward, _mm_setzero_pd()));
    __m128i odd = _mm_and_si128(_mm_or_si128(above, below), _mm_set1_epi64x(1));
    return _mm_cvtpd_ps(_mm_castsi128_pd(_mm_or_si128(_mm_add_epi64(_mm_castpd_si128(sum), above), odd)));
}

TS_INLINE vector_generic_f32 fma_generic_f32(vector_generic_f32 a, vector_generic_f32 b, vector_generic_f32 c)
{
    return _mm_movelh_ps(fma_wide(a, b, c), fma_wide(_mm_movehl_ps(a, a), _mm_movehl_ps(b, b), _mm_movehl_ps(c, c)));
}
#else
TS_INLINE vector_generic_f32 fma_generic_f32(vector_generic_f32 a, vector_generic_f32 b, vector_generic_f32 c)
{
    for (int i = 0; i < 4; i++)
        c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

TS_INLINE vector_generic_f64 fma_generic_f64(vector_generic_f64 a, vector_generic_f64 b, vector_generic_f64 c)
{
    for (int i = 0; i < 2; i++)
        c[i] = __builtin_fma(a[i], b[i], c[i]);
    return c;
}

#if defined(__x86_64__)
#define INLINE_AVX2 TS_TARGET_AVX2 TS_INLINE
#define INLINE_AVX512 TS_TARGET_AVX512 TS_INLINE

INLINE_AVX2 __m256 fma_avx2_f32(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE_AVX2 __m256d fma_avx2_f64(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
INLINE_AVX512 __m512 fma_avx512_f32(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE_AVX512 __m512d fma_avx512_f64(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
INLINE_AVX512 __m512 relu_avx512_f32(__m512 m) { return _mm512_max_ps(m, _mm512_setzero_ps()); }
INLINE_AVX512 __m512d relu_avx512_f64(__m512d m) { return _mm512_max_pd(m, _mm512_setzero_pd()); }
INLINE_AVX512 __m512 mask_positive_avx512_f32(__m512 m, __m512 v)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(m, _mm512_setzero_ps(), _CMP_GT_OQ), v);
}
INLINE_AVX512 __m512d mask_positive_avx512_f64(__m512d m, __m512d v)
{
    return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(m, _mm512_setzero_pd(), _CMP_GT_OQ), v);
}

#elif defined(__aarch64__)
/* One instruction, where the comparison and the mask are two. NaN gives 0. */
TS_INLINE vector_generic_f32 relu_generic_f32(vector_generic_f32 m) { return vmaxnmq_f32(m, vdupq_n_f32(0)); }
TS_INLINE vector_generic_f64 relu_generic_f64(vector_generic_f64 m) { return vmaxnmq_f64(m, vdupq_n_f64(0)); }
#endif

#define REAL float
#define NAME(stem) JOIN(stem, _f32)
#include "gine_kernels.h"

#define REAL double
#define NAME(stem) JOIN(stem, _f64)
#include "gine_kernels.h"
