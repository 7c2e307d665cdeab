#include "stream.h"

#include <stdint.h>
#include <string.h>

#include "simd.h"

#define LINE 64

static void add_offset_generic(const int32_t *index, size_t n, int64_t first, int64_t *out)
{
    for (size_t k = 0; k < n; k++)
        out[k] = first + index[k];
}

#if defined(__x86_64__)
#include <immintrin.h>

TS_TARGET_AVX2 static void add_offset_avx2(const int32_t *index, size_t n, int64_t first, int64_t *out)
{
    for (size_t k = 0; k < n; k += 4) {
        __m256i wide = _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)(index + k)));
        _mm256_stream_si256((__m256i *)(out + k), _mm256_add_epi64(wide, _mm256_set1_epi64x(first)));
    }
}

TS_TARGET_AVX512 static void add_offset_avx512(const int32_t *index, size_t n, int64_t first, int64_t *out)
{
    for (size_t k = 0; k < n; k += 8) {
        __m512i wide = _mm512_cvtepi32_epi64(_mm256_loadu_si256((const __m256i *)(index + k)));
        _mm512_stream_si512((__m512i *)(out + k), _mm512_add_epi64(wide, _mm512_set1_epi64(first)));
    }
}

/* Distance of the prefetch in bytes. The non-temporal hint keeps data that is read once out of the
 * caches that other threads use, among them the interpreter's. */
#define PREFETCH_BYTES 1024

static inline void copy_line(unsigned char *d, const unsigned char *s)
{
    __m128i a = _mm_loadu_si128((const __m128i *)s), b = _mm_loadu_si128((const __m128i *)(s + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(s + 32)), e = _mm_loadu_si128((const __m128i *)(s + 48));
    _mm_stream_si128((__m128i *)d, a);
    _mm_stream_si128((__m128i *)(d + 16), b);
    _mm_stream_si128((__m128i *)(d + 32), c);
    _mm_stream_si128((__m128i *)(d + 48), e);
}

/* Copy n bytes, and prefetch `later`, or the source itself if that is NULL. */
TS_INLINE void copy_ahead(unsigned char *d, const unsigned char *s, size_t n, const unsigned char *later)
{
    const unsigned char *begin = s, *end = s + n;
    size_t head = (size_t)(-(uintptr_t)d & (LINE - 1));
    if (n >= head + LINE) {
        memcpy(d, s, head);
        d += head, s += head;
        for (; end - s >= LINE; d += LINE, s += LINE) {
            if (later == NULL)
                _mm_prefetch((const char *)s + PREFETCH_BYTES, _MM_HINT_NTA);
            else
                _mm_prefetch((const char *)later + (s - begin), _MM_HINT_T1);
            copy_line(d, s);
        }
    }
    if (later != NULL)
        ts_prefetch(later + (s - begin), (size_t)(end - s));
    memcpy(d, s, (size_t)(end - s));
}

void ts_stream_copy(void *dst, const void *src, size_t n) { copy_ahead(dst, src, n, NULL); }
void ts_stream_copy_ahead(void *dst, const void *src, size_t n, const void *later) { copy_ahead(dst, src, n, later); }

void ts_stream_fence(void) { _mm_sfence(); }
#else
void ts_stream_copy(void *dst, const void *src, size_t n) { memcpy(dst, src, n); }

void ts_stream_copy_ahead(void *dst, const void *src, size_t n, const void *later)
{
    ts_prefetch(later, n);
    memcpy(dst, src, n);
}

void ts_stream_fence(void) {}
#endif

void ts_prefetch(const void *src, size_t n)
{
    for (size_t k = 0; k < n; k += LINE)
        __builtin_prefetch((const char *)src + k, 0, 2);
}

void ts_stream_add_offset(const int32_t *index, size_t n, int64_t first, int64_t *out)
{
    TS_KERNEL(add_offset)(index, n, first, out);
}
