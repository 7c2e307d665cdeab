#include "simd.h"

#include <stdlib.h>

static int level = 1;
static int limit = 4;

#if defined(__x86_64__)
#include <cpuid.h>

/* Clang knows no name for this one. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

__attribute__((constructor)) static void find_level(void)
{
    __builtin_cpu_init();
    int v2 = __builtin_cpu_supports("sse4.2") != 0;
    int v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
          && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    level = 1 + v2 + v3 + v4;
    const char *most = getenv("TRACESTORE_SIMD_LEVEL");
    if (most != NULL && most[0] >= '1' && most[0] <= '4' && most[1] == 0)
        limit = most[0] - '0';
}
#endif

int ts_simd_level(void)
{
    return level < limit ? level : limit;
}

void ts_simd_limit(int most)
{
    limit = most;
}
