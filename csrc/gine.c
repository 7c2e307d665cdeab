#include "gine.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "parallel.h"

/* Fixed, so that partial sums do not depend on the number of threads. */
#define GRAPHS_A_CHUNK 8

size_t ts_gine_chunks(size_t num_graphs)
{
    return (num_graphs + GRAPHS_A_CHUNK - 1) / GRAPHS_A_CHUNK;
}

#if defined(__x86_64__)
#define FOR_EACH_TARGET(F) \
    F(_v2, ) \
    F(_v3, __attribute__((target("avx2,fma")))) \
    F(_v4, __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512"))))
static int simd_level(void)
{
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 4;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 3 : 2;
}
#define PICK(level, stem, arguments) \
    do { \
        if ((level) == 4) NAME(stem##_v4) arguments; \
        else if ((level) == 3) NAME(stem##_v3) arguments; \
        else NAME(stem##_v2) arguments; \
    } while (0)
#else
#define FOR_EACH_TARGET(F) F(_v2, )
static int simd_level(void) { return 2; }
#define PICK(level, stem, arguments) do { (void)(level); NAME(stem##_v2) arguments; } while (0)
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#define REAL float
#define NAME(stem) JOIN(stem, _f32)
#include "gine_kernels.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(stem) JOIN(stem, _f64)
#include "gine_kernels.h"
