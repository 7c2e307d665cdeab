/* Which vector instructions the kernels use, chosen at run time. */
#ifndef TS_SIMD_H
#define TS_SIMD_H

/* The level of the x86-64 psABI that the processor has, as far as the kernels use it:
 * 4 (AVX-512 F, VL, DQ and BW), 3 (AVX2, FMA, F16C), 2 (SSE4.2), 1; 1 on other processors.
 * At most what ts_simd_limit was given last. */
int ts_simd_level(void);

/* For tests: holds the paths of lesser processors against one another on this one. */
void ts_simd_limit(int most);

#endif
