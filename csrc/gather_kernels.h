/* The inner loops of gather.c; plain C that the compiler vectorises. Included once an
 * instruction set, hence without an include guard, with
 *   LEVEL        of the instruction set, as ts_simd_level
 *   TARGET       the attribute that allows it
 *   NAME(stem)   the name for `stem` */

/* Marks weights of 16 bits whose order-preserving integer lies in (limit, top]. */
TARGET static size_t NAME(mark16)(const uint16_t *w, size_t n, int16_t limit, int16_t top, unsigned char *keep)
{
    unsigned kept = 0;
    for (size_t p = 0; p < n; p++) {
        int16_t bits = (int16_t)w[p];
        int16_t ordered = (int16_t)(bits ^ ((bits >> 15) & 0x7fff));
        unsigned char k = (unsigned char)((ordered > limit) & (ordered <= top));
        keep[p] = k;
        kept += k;
    }
    return kept;
}

/* The same for 32 bits. */
TARGET static size_t NAME(mark32)(const uint32_t *w, size_t n, int32_t limit, int32_t top, unsigned char *keep)
{
    unsigned kept = 0;
    for (size_t p = 0; p < n; p++) {
        int32_t bits = (int32_t)w[p];
        int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
        unsigned char k = (unsigned char)((ordered > limit) & (ordered <= top));
        keep[p] = k;
        kept += k;
    }
    return kept;
}

/* out[k] = first + place[k], streamed: n a multiple of 8, out on a cache line. */
TARGET static void NAME(shift)(const int32_t *place, size_t n, int64_t first, int64_t *out)
{
#if LEVEL == 4
    for (size_t k = 0; k < n; k += 8) {
        __m512i wide = _mm512_cvtepi32_epi64(_mm256_loadu_si256((const __m256i *)(place + k)));
        _mm512_stream_si512((__m512i *)(out + k), _mm512_add_epi64(wide, _mm512_set1_epi64(first)));
    }
#elif LEVEL == 3
    for (size_t k = 0; k < n; k += 4) {
        __m256i wide = _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)(place + k)));
        _mm256_stream_si256((__m256i *)(out + k), _mm256_add_epi64(wide, _mm256_set1_epi64x(first)));
    }
#else
    for (size_t k = 0; k < n; k++)
        out[k] = first + place[k];
#endif
}

#undef TARGET
#undef LEVEL
#undef NAME
