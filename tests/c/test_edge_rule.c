#include <math.h>

#include "edge_rule.h"
#include "test_core.h"

static void test_top_k(void)
{
    float weights[7] = {0.5f, 0.1f, 0.5f, NAN, 0.9f, 0.5f, 0.0f}, scratch[7];
    unsigned char keep[7];
    CHECK(ts_select_top_k(weights, 7, 3.0 / 7, keep, scratch) == 3 && keep[4] && keep[0] && keep[2] && !keep[5]);
    CHECK(ts_select_top_k(weights, 7, 1, keep, scratch) == 6 && !keep[3]);
    CHECK(ts_select_top_k(weights + 3, 1, 1, keep, scratch) == 0 && !keep[0]);
    CHECK(ts_top_k_count(10, 0.3) == 3 && ts_top_k_count(10, 0.31) == 4 && ts_top_k_count(10, 1e-9) == 1);
}

/* Compare the selection of every float16 and bfloat16 value with a comparison in float64. */
static void test_thresholds(void)
{
    enum { N = 65536 };
    uint16_t *bits = malloc(N * 2);
    float *values = malloc(N * 4);
    unsigned char *keep = malloc(N);
    const double thresholds[] = {0, -0.0, 0.1, -0.1, 6e-8, 65504, -65504, 1e30, INFINITY, -INFINITY, NAN};
    for (size_t p = 0; p < N; p++)
        bits[p] = (uint16_t)p;
    for (enum ts_dtype dtype = TS_F16; dtype <= TS_F32; dtype++) {
        ts_to_f32(bits, dtype == TS_F32 ? TS_BF16 : dtype, values, N);
        for (size_t t = 0; t < sizeof thresholds / sizeof *thresholds; t++) {
            struct ts_weight_range range = ts_weight_range((struct ts_edge_rule){thresholds[t], 0}, dtype);
            size_t kept = 0;
            CHECK(ts_select_in_range(&range, dtype == TS_F32 ? (void *)values : bits, N, keep) <= N);
            for (size_t p = 0; p < N; p++) {
                CHECK(keep[p] == ((double)values[p] > thresholds[t]));
                kept += keep[p];
            }
            CHECK(ts_select_in_range(&range, dtype == TS_F32 ? (void *)values : bits, N, keep) == kept);
        }
    }
    free(bits), free(values), free(keep);
}

void test_edge_rule(void)
{
    test_top_k();
    at_every_simd_level(test_thresholds);
}
