#include "simd.h"
#include "test_core.h"

void test_simd(void)
{
    int highest = ts_simd_level();
    CHECK(highest >= TS_SIMD_BASELINE && highest <= TS_SIMD_HIGHEST);
    for (int limit = TS_SIMD_BASELINE; limit <= TS_SIMD_HIGHEST; limit++) {
        ts_simd_limit(limit);
        CHECK(ts_simd_level() == (limit < highest ? limit : highest));
    }
    CHECK(strcmp(ts_simd_name(TS_SIMD_BASELINE), "baseline") == 0);
    for (int level = TS_SIMD_BASELINE + 1; level <= highest; level++)
        CHECK(strcmp(ts_simd_name(level), ts_simd_name(level - 1)) != 0);
#if defined(__aarch64__)
    CHECK(highest >= TS_SIMD_NEON);
#endif
}
