/**
 * Vector instructions: levels, chosen at run time, and the table of kernels.
 *
 * A kernel is a function that has variants for several instruction sets. Its generic variant is C
 * that the compiler vectorizes for the baseline of the processor family; the others are functions
 * with a TS_TARGET_ attribute. All variants of a kernel compute the same bits, which
 * tests/c/kernel_hashes.c checks.
 *
 * All functions but ts_simd_limit() are thread safe.
 */
#ifndef TS_SIMD_H
#define TS_SIMD_H

/** Levels of vector instructions. Each includes those below it in its family of processors. */
enum ts_simd_level {
    TS_SIMD_BASELINE = 1, /* every processor; on aarch64 the compiler uses NEON at this level, too */

    /* x86-64: the levels of its psABI, restricted to the features that the kernels use */
    TS_SIMD_SSE42 = 2,  /* x86-64-v2: SSE4.2 */
    TS_SIMD_AVX2 = 3,   /* x86-64-v3: AVX2, FMA, F16C */
    TS_SIMD_AVX512 = 4, /* x86-64-v4: AVX-512 F, VL, DQ and BW */

    /* aarch64 */
    TS_SIMD_NEON = 2, /* conversions of float16 by NEON, which every processor has */
    TS_SIMD_CRC = 3,  /* and the CRC32 instructions, optional in Armv8.0 */

    TS_SIMD_HIGHEST = 4
};

extern int ts_simd_current; /* private: ts_simd_level() is read on every call of a kernel */

/**
 * Return the level of vector instructions that kernels use.
 *
 * @return the level of the processor, but at most the limit of the last ts_simd_limit() call or,
 *         before any call, of the environment variable TRACESTORE_SIMD_LEVEL at process start.
 */
static inline int ts_simd_level(void)
{
    return ts_simd_current;
}

/**
 * Return the name of a level on this family of processors.
 *
 * @param level  a level that ts_simd_level() returns
 * @return a static string, never NULL
 */
const char *ts_simd_name(int level);

/**
 * Limit the level of vector instructions. Meant for tests, which compare the code paths of older
 * processors with those of this one. Not thread safe.
 *
 * @param max_level  one of enum ts_simd_level
 */
void ts_simd_limit(int max_level);

/* An attribute of a function works with every compiler; a pragma for a region works with GCC only.
 * AVX-512 kernels prefer 512-bit vectors, which Clang enables by a minimum vector width. */
#if defined(__x86_64__)
#define TS_TARGET_CRC __attribute__((target("sse4.2,crc32"))) /* Clang does not include crc32 in SSE4.2 */
#define TS_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TS_FEATURES_AVX512 "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c"
#if defined(__clang__)
#define TS_TARGET_AVX512 __attribute__((target(TS_FEATURES_AVX512), min_vector_width(512)))
#else
#define TS_TARGET_AVX512 __attribute__((target(TS_FEATURES_AVX512 ",prefer-vector-width=512")))
#endif
#elif defined(__aarch64__) && defined(__clang__)
#define TS_TARGET_CRC __attribute__((target("crc")))
#elif defined(__aarch64__)
#define TS_TARGET_CRC __attribute__((target("+crc")))
#endif

/* The variants of a kernel at levels 1, 2, ... of this family of processors. */
#if defined(__x86_64__)
#define TS_VARIANTS(kernel, sse42, avx2, avx512, neon, crc) \
    &kernel##_generic, &kernel##_##sse42, &kernel##_##avx2, &kernel##_##avx512
#elif defined(__aarch64__)
#define TS_VARIANTS(kernel, sse42, avx2, avx512, neon, crc) &kernel##_generic, &kernel##_##neon, &kernel##_##crc
#else
#define TS_VARIANTS(kernel, sse42, avx2, avx512, neon, crc) &kernel##_generic
#endif

/* The table of kernels: the variant of each at each level. GCC 12 and Clang 14 vectorize the generic
 * variants that have none for NEON as well as intrinsics do.
 *                                                         x86-64 level 2, 3, 4        aarch64 level 2, 3 */
#define TS_KERNEL_crc32c         TS_VARIANTS(crc32c,         crc,     crc,     avx512,   generic, crc)
#define TS_KERNEL_f16_to_f32     TS_VARIANTS(f16_to_f32,     generic, avx2,    avx2,     neon,    neon)
#define TS_KERNEL_f32_to_f16     TS_VARIANTS(f32_to_f16,     generic, avx2,    avx2,     neon,    neon)
#define TS_KERNEL_count_exponent TS_VARIANTS(count_exponent, generic, avx2,    avx512,   generic, generic)
#define TS_KERNEL_is_causal_f16  TS_VARIANTS(is_causal_f16,  generic, generic, avx512,   generic, generic)
#define TS_KERNEL_mean_rows_f16  TS_VARIANTS(mean_rows_f16,  generic, eight,   avx512,   eight,   eight)
#define TS_KERNEL_select16       TS_VARIANTS(select16,       generic, avx2,    avx512,   generic, generic)
#define TS_KERNEL_select32       TS_VARIANTS(select32,       generic, avx2,    avx512,   generic, generic)
#define TS_KERNEL_add_offset     TS_VARIANTS(add_offset,     generic, avx2,    avx512,   generic, generic)
#define TS_KERNEL_gine_f32       TS_VARIANTS(gine_f32,       generic, avx2,    avx512,   generic, generic)
#define TS_KERNEL_gine_f64       TS_VARIANTS(gine_f64,       generic, avx2,    avx512,   generic, generic)

/* The variant of a kernel at the current level: a function, or a constant of function pointers. */
#define TS_KERNEL(kernel) TS_KERNEL_EXPANDED(kernel)
#define TS_KERNEL_EXPANDED(kernel) \
    (*__extension__({ \
        static __typeof__(&kernel##_generic) const variants[] = {TS_KERNEL_##kernel}; \
        variants[ts_simd_level() - 1]; \
    }))

/* Define the variants generic, avx2 and avx512 of a kernel as calls of kernel_body(), an inline
 * function that the compiler vectorizes for each of them. */
#if defined(__x86_64__)
#define TS_DEFINE_KERNEL(type, kernel, parameters, arguments) \
    static type kernel##_generic parameters { return kernel##_body arguments; } \
    TS_TARGET_AVX2 static type kernel##_avx2 parameters { return kernel##_body arguments; } \
    TS_TARGET_AVX512 static type kernel##_avx512 parameters { return kernel##_body arguments; }
#else
#define TS_DEFINE_KERNEL(type, kernel, parameters, arguments) \
    static type kernel##_generic parameters { return kernel##_body arguments; }
#endif

#define TS_INLINE static inline __attribute__((always_inline))

#endif
