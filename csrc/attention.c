#include "attention.h"

#include <math.h>
#include <string.h>

#include "error.h"

#define BLOCK 256

static int any_nonzero(const unsigned char *row, size_t itemsize, size_t n)
{
    /* Sign bits are masked: minus zero is zero. */
    if (itemsize == 2) {
        const ts_u16 *v = (const ts_u16 *)row;
        uint16_t any = 0;
        for (size_t i = 0; i < n; i++)
            any |= v[i];
        return (any & 0x7fffu) != 0;
    }
    if (itemsize == 4) {
        const ts_u32 *v = (const ts_u32 *)row;
        uint32_t any = 0;
        for (size_t i = 0; i < n; i++)
            any |= v[i];
        return (any & 0x7fffffffu) != 0;
    }
    const ts_u64 *v = (const ts_u64 *)row;
    uint64_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= v[i];
    return (any & 0x7fffffffffffffffull) != 0;
}

int ts_is_causal(const void *in, enum ts_dtype dtype, size_t count, size_t S, size_t *where)
{
    size_t itemsize = ts_dtype_bytes(dtype);
    for (size_t m = 0; m < count; m++)
        for (size_t i = 0; i + 1 < S; i++) {
            size_t first = (m * S + i) * S + i + 1, n = S - i - 1;
            const unsigned char *row = (const unsigned char *)in + first * itemsize;
            if (!any_nonzero(row, itemsize, n))
                continue;
            size_t j = 0;
            while (!any_nonzero(row + j * itemsize, itemsize, 1))
                j++;
            *where = first + j;
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
    const ts_f32 *values = scratch;
    if (dtype == TS_F64) {
        const ts_f64 *wide = row;
        for (size_t j = 0; j < n; j++)
            sum[j] += wide[j];
        return;
    }
    if (dtype == TS_F16)
        ts_f16_to_f32(row, scratch, n);
    else if (dtype == TS_BF16)
        ts_bf16_to_f32(row, scratch, n);
    else
        values = row;
    for (size_t j = 0; j < n; j++)
        sum[j] += (double)values[j];
}

int ts_mean_rows(const void *in, enum ts_dtype dtype, size_t H, size_t stride, size_t n, uint16_t *out)
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
            out[begin + j] = half;
        }
    }
    return TS_OK;
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

/* The k-th largest (k >= 1) of n values without NaN; reorders `v`. */
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

size_t ts_top_k_count(size_t n, double fraction)
{
    /* A product that is an integer but for its rounding is that integer. */
    double wanted = ceil(fraction * (double)n - 1e-9);
    return wanted >= (double)n ? n : wanted < 1 ? 1 : (size_t)wanted;
}

int64_t ts_select_pairs(const float *weights, size_t n, struct ts_edge_rule rule, unsigned char *keep, float *scratch)
{
    int64_t kept = 0;
    if (n == 0)
        return 0;
    if (!(rule.top_k_fraction > 0)) {
        /* Compared in float64, so that the user's threshold is not rounded. */
        for (size_t p = 0; p < n; p++) {
            keep[p] = (double)weights[p] > rule.threshold;
            kept += keep[p];
        }
        return kept;
    }
    size_t valid = 0;
    for (size_t p = 0; p < n; p++)
        if (!isnan(weights[p]))
            scratch[valid++] = weights[p];
    size_t wanted = ts_top_k_count(n, rule.top_k_fraction), k = wanted < valid ? wanted : valid;
    memset(keep, 0, n);
    if (valid != 0) {
        float limit = kth_largest(scratch, valid, k);
        size_t above = 0;
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
            kept += keep[p];
        }
    }
    return kept;
}
