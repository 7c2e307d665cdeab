/**
 * Run-time selection of vector instructions.
 *
 * Kernels are compiled for up to three instruction sets (suffixes _generic, _avx2 and _avx512) and
 * choose one at run time by ts_simd_level().
 */
#ifndef TS_SIMD_H
#define TS_SIMD_H

/** Levels of the x86-64 psABI, restricted to the features that the kernels use. */
enum ts_simd_level {
    TS_SIMD_BASELINE = 1, /* x86-64-v1, and every other processor */
    TS_SIMD_SSE42 = 2,    /* x86-64-v2: SSE4.2 */
    TS_SIMD_AVX2 = 3,     /* x86-64-v3: AVX2, FMA, F16C */
    TS_SIMD_AVX512 = 4,   /* x86-64-v4: AVX-512 F, VL, DQ and BW */
};

/**
 * Return the level of vector instructions that kernels use.
 *
 * @return the level of the processor, but at most the limit of the last ts_simd_limit() call or,
 *         before any call, of the environment variable TRACESTORE_SIMD_LEVEL at process start.
 */
int ts_simd_level(void);

/**
 * Limit the level of vector instructions. Meant for tests, which compare the code paths of older
 * processors with those of this one. Not thread safe.
 *
 * @param max_level  one of enum ts_simd_level
 */
void ts_simd_limit(int max_level);

/* Function attributes for AVX2 and AVX-512 kernels. An attribute works with every compiler; a
 * pragma for a region works with GCC only. AVX-512 kernels prefer 512-bit vectors, which Clang
 * enables by a minimum vector width. */
#if defined(__x86_64__)
#define TS_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TS_FEATURES_AVX512 "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c"
#if defined(__clang__)
#define TS_TARGET_AVX512 __attribute__((target(TS_FEATURES_AVX512), min_vector_width(512)))
#else
#define TS_TARGET_AVX512 __attribute__((target(TS_FEATURES_AVX512 ",prefer-vector-width=512")))
#endif
#endif

#endif
