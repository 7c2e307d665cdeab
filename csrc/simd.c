#include "simd.h"

#include <stdlib.h>

#include "platform.h"

int ts_simd_current = TS_SIMD_BASELINE;
static int of_processor = TS_SIMD_BASELINE;

#if defined(__x86_64__)
#include <cpuid.h>

static const char *const names[] = {"baseline", "SSE4.2", "AVX2", "AVX-512"};

/* __builtin_cpu_supports of Clang has no name for F16C. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

static int processor_level(void)
{
    __builtin_cpu_init();
    int has_sse42 = __builtin_cpu_supports("sse4.2") != 0;
    int has_avx2 = has_sse42 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
                  && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    return has_avx512 ? TS_SIMD_AVX512 : has_avx2 ? TS_SIMD_AVX2 : has_sse42 ? TS_SIMD_SSE42 : TS_SIMD_BASELINE;
}
#elif defined(__aarch64__)
static const char *const names[] = {"baseline", "NEON", "NEON and CRC32"};

static int processor_level(void)
{
    return ts_has_crc32() ? TS_SIMD_CRC : TS_SIMD_NEON;
}
#else
static const char *const names[] = {"baseline"};

static int processor_level(void)
{
    return TS_SIMD_BASELINE;
}
#endif

__attribute__((constructor)) static void find_level(void)
{
    of_processor = processor_level();
    const char *value = getenv("TRACESTORE_SIMD_LEVEL");
    int is_valid = value != NULL && value[0] >= '1' && value[0] <= '0' + TS_SIMD_HIGHEST && value[1] == 0;
    ts_simd_limit(is_valid ? value[0] - '0' : TS_SIMD_HIGHEST);
}

const char *ts_simd_name(int level)
{
    return names[level - 1];
}

void ts_simd_limit(int max_level)
{
    ts_simd_current = of_processor < max_level ? of_processor : max_level;
}
