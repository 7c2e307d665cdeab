#include "edge_rule.h"

#include <math.h>
#include <string.h>

#include "simd.h"

/* Define the kernel of ts_select_in_range() for weights of so many bits. */
#define DEFINE_SELECT(bits) \
    TS_INLINE size_t select##bits##_body( \
        const int##bits##_t *w, size_t n, int##bits##_t limit, int##bits##_t top, unsigned char *keep) \
    { \
        unsigned kept = 0; \
        for (size_t p = 0; p < n; p++) { \
            int##bits##_t ordered = (int##bits##_t)(w[p] ^ ((w[p] >> (bits - 1)) & INT##bits##_MAX)); \
            keep[p] = (unsigned char)((ordered > limit) & (ordered <= top)); \
            kept += keep[p]; \
        } \
        return kept; \
    } \
    TS_DEFINE_KERNEL(size_t, select##bits, \
        (const int##bits##_t *w, size_t n, int##bits##_t limit, int##bits##_t top, unsigned char *keep), \
        (w, n, limit, top, keep))

DEFINE_SELECT(16)
DEFINE_SELECT(32)

/* Map the bits of a float to an integer of the same order. The function is its own inverse. */
static int32_t to_ordered(uint32_t bits, enum ts_dtype dtype)
{
    int32_t s = dtype == TS_F32 ? (int32_t)bits : (int16_t)bits;
    return s ^ ((s >> 31) & (dtype == TS_F32 ? 0x7fffffff : 0x7fff));
}

static double from_ordered(int32_t integer, enum ts_dtype dtype)
{
    uint32_t bits = (uint32_t)to_ordered((uint32_t)integer, dtype);
    uint16_t narrow = (uint16_t)bits;
    float wide;
    ts_to_f32(dtype == TS_F32 ? (const void *)&bits : &narrow, dtype, &wide, 1);
    return (double)wide;
}

static uint32_t infinity_bits(enum ts_dtype dtype)
{
    return dtype == TS_F32 ? 0x7f800000u : dtype == TS_BF16 ? 0x7f80u : 0x7c00u;
}

struct ts_weight_range ts_weight_range(struct ts_edge_rule rule, enum ts_dtype dtype)
{
    uint32_t infinity = infinity_bits(dtype), sign = dtype == TS_F32 ? 0x80000000u : 0x8000u;
    int32_t lo = to_ordered(infinity | sign, dtype), hi = (int32_t)infinity;
    struct ts_weight_range range = {dtype, lo - 1, hi, TS_KERNEL(select16), TS_KERNEL(select32)};
    if (rule.top_k > 0)
        return range;
    if (isnan(rule.attention_threshold))
        lo = hi;
    while (lo < hi) { /* find the last integer whose value does not exceed the threshold */
        int32_t middle = (int32_t)((int64_t)lo + ((int64_t)hi - lo + 1) / 2);
        if (from_ordered(middle, dtype) <= rule.attention_threshold)
            lo = middle;
        else
            hi = middle - 1;
    }
    range.limit = lo;
    return range;
}

size_t ts_select_in_range(const struct ts_weight_range *range, const void *weights, size_t n, unsigned char *keep)
{
    if (range->dtype == TS_F32)
        return range->select32(weights, n, range->limit, range->top, keep);
    return range->select16(weights, n, (int16_t)range->limit, (int16_t)range->top, keep);
}

/* Return the k-th largest (k >= 1) of n values, none of them NaN. Reorders v. */
static float kth_largest(float *v, size_t n, size_t k)
{
    size_t lo = 0, hi = n - 1, target = k - 1;
    while (lo < hi) {
        /* Hoare's partition, descending: v[lo..j] >= pivot >= v[j+1..hi], j < hi. */
        float pivot = v[lo + (hi - lo) / 2];
        size_t i = lo, j = hi;
        for (;; i++, j--) {
            while (v[i] > pivot) i++;
            while (v[j] < pivot) j--;
            if (i >= j) break;
            float t = v[i]; v[i] = v[j]; v[j] = t;
        }
        if (target <= j)
            hi = j;
        else
            lo = j + 1;
    }
    return v[target];
}

void ts_set_nan(unsigned char *weights, size_t at, enum ts_dtype dtype)
{
    if (dtype == TS_F32)
        ((float *)weights)[at] = NAN;
    else
        ((uint16_t *)weights)[at] = dtype == TS_BF16 ? 0x7fc0u : 0x7e00u;
}

void ts_mask_triangle(const struct ts_weight_range *range, unsigned char *weights, size_t S, int diagonal, size_t sinks,
                      int32_t *degree)
{
    unsigned char keep[1024];
    size_t itemsize = ts_dtype_bytes(range->dtype);
    for (size_t i = 0; i < S; i++, weights += i * itemsize) {
        size_t kept = 0, masked = sinks < i + 1 ? sinks : i + 1;
        for (size_t j = 0; j < masked; j++)
            ts_set_nan(weights, j, range->dtype);
        if (diagonal)
            ts_set_nan(weights, i, range->dtype);
        for (size_t j = 0; j <= i; j += sizeof keep)
            kept += ts_select_in_range(range, weights + j * itemsize, i + 1 - j < sizeof keep ? i + 1 - j : sizeof keep, keep);
        degree[i] = kept > 0 ? (int32_t)kept : 1;
    }
}

size_t ts_top_k_count(size_t n, double top_k)
{
    /* The margin keeps a product that should be an integer from being rounded up. */
    double count = ceil(top_k * (double)n - 1e-9);
    return count >= (double)n ? n : count < 1 ? 1 : (size_t)count;
}

size_t ts_select_top_k(const float *weights, size_t n, double top_k, unsigned char *keep, float *scratch)
{
    size_t valid = 0, above = 0;
    for (size_t p = 0; p < n; p++)
        if (!isnan(weights[p]))
            scratch[valid++] = weights[p];
    memset(keep, 0, n);
    if (valid == 0)
        return 0;
    size_t k = ts_top_k_count(n, top_k);
    k = k < valid ? k : valid;
    float limit = kth_largest(scratch, valid, k);
    for (size_t p = 0; p < n; p++)
        above += weights[p] > limit;
    size_t ties = k - above;
    for (size_t p = 0; p < n; p++) {
        if (weights[p] > limit) {
            keep[p] = 1;
        } else if (weights[p] == limit && ties > 0) {
            keep[p] = 1;
            ties--;
        }
    }
    return k;
}
