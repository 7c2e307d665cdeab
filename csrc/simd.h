/* Which vector instructions the kernels use, chosen at run time. */
#ifndef TS_SIMD_H
#define TS_SIMD_H

/* The level of the x86-64 psABI that the processor has, as far as the kernels use it:
 * 4 (AVX-512 F, VL, DQ and BW), 3 (AVX2, FMA, F16C), 2 (SSE4.2), 1; 1 on other processors.
 * At most what ts_simd_limit was given last, and before that TRACESTORE_SIMD_LEVEL when the process began. */
int ts_simd_level(void);

/* For tests: holds the paths of lesser processors against one another on this one. */
void ts_simd_limit(int most);

/* Attributes of the functions that need level 3 or 4. An attribute holds for its function with
 * every compiler; a pragma for a region holds with GCC only. Level 4 prefers vectors of 512 bits,
 * which Clang has to be told by their smallest width. */
#if defined(__x86_64__)
#define TS_TARGET_V3 __attribute__((target("avx2,fma,f16c")))
#define TS_FEATURES_V4 "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c"
#if defined(__clang__)
#define TS_TARGET_V4 __attribute__((target(TS_FEATURES_V4), min_vector_width(512)))
#else
#define TS_TARGET_V4 __attribute__((target(TS_FEATURES_V4 ",prefer-vector-width=512")))
#endif
#endif

#endif
