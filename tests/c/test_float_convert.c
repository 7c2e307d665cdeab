#include <math.h>

#include "float_convert.h"
#include "test_core.h"

static void test_conversions(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        uint16_t half = (uint16_t)h;
        float wide = ts_f16_to_f32_portable(half), fast;
        ts_f16_to_f32(&half, &fast, 1);
        CHECK(memcmp(&wide, &fast, 4) == 0 || (isnan(wide) && isnan(fast)));
        if (!isnan(wide))
            CHECK(ts_f32_to_f16_portable(wide) == half && ts_f64_to_f16((double)wide) == half);
        else
            CHECK(isnan(ts_f16_to_f32_portable(ts_f32_to_f16_portable(wide))));
    }
    /* The value just above the midpoint of 1 and its successor reveals a second rounding. */
    CHECK(ts_f64_to_f16(1.0 + 0x1p-11 + 0x1p-40) == 0x3c01u);
    CHECK(ts_f64_to_f16(1.0 + 0x1p-11) == 0x3c00u);
    CHECK(ts_f32_to_f16_portable(65519.0f) == 0x7bffu && ts_f32_to_f16_portable(65520.0f) == 0x7c00u);
    float values[3] = {1.0f, INFINITY, 70000.0f};
    uint16_t out[3];
    size_t position = 99;
    CHECK(ts_to_f16(values, TS_F32, out, 2, &position) == TS_OK);
    CHECK(ts_to_f16(values, TS_F32, out, 3, &position) == TS_ERR_RANGE && position == 2);
    CHECK(ts_count_nonfinite(values, TS_F32, 3) == 1);
}

static void test_counting(void)
{
    for (size_t n = 0; n < 70000; n = n * 2 + 1) {
        uint16_t *halves = malloc(n * 2 + 1);
        size_t expected = 0;
        for (size_t i = 0; i < n; i++) {
            halves[i] = (uint16_t)(i * 2654435761u >> 7);
            expected += (halves[i] & 0x7c00u) == 0x7c00u;
        }
        CHECK(ts_count_nonfinite(halves, TS_F16, n) == expected);
        free(halves);
    }
}

void test_float_convert(void)
{
    at_every_simd_level(test_conversions);
    at_every_simd_level(test_counting);
}
