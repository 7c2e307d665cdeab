/* Inner loops of gather.c, in plain C that the compiler vectorizes. gather.c includes this file once
 * for each instruction set, hence there is no include guard, and defines
 *   LEVEL        the instruction set, as a number of enum ts_simd_level
 *   TARGET       the function attribute that enables it
 *   NAME(stem)   the function name for `stem` */

/* Set keep[p] to 1 where the order-preserving integer of a 16-bit weight lies in (limit, top]. Returns
 * the number of ones. */
TARGET static size_t NAME(select16)(const uint16_t *w, size_t n, int16_t limit, int16_t top, unsigned char *keep)
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

/* The same for 32-bit weights. */
TARGET static size_t NAME(select32)(const uint32_t *w, size_t n, int32_t limit, int32_t top, unsigned char *keep)
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

/* out[k] = first + index[k], with non-temporal stores. n is a multiple of 8; out is aligned to a cache line. */
TARGET static void NAME(add_offset)(const int32_t *index, size_t n, int64_t first, int64_t *out)
{
#if LEVEL == 4
    for (size_t k = 0; k < n; k += 8) {
        __m512i wide = _mm512_cvtepi32_epi64(_mm256_loadu_si256((const __m256i *)(index + k)));
        _mm512_stream_si512((__m512i *)(out + k), _mm512_add_epi64(wide, _mm512_set1_epi64(first)));
    }
#elif LEVEL == 3
    for (size_t k = 0; k < n; k += 4) {
        __m256i wide = _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)(index + k)));
        _mm256_stream_si256((__m256i *)(out + k), _mm256_add_epi64(wide, _mm256_set1_epi64x(first)));
    }
#else
    for (size_t k = 0; k < n; k++)
        out[k] = first + index[k];
#endif
}

#undef TARGET
#undef LEVEL
#undef NAME
