#include "stream.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define LINE 64
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

void ts_stream_copy(void *dst, const void *src, size_t n)
{
    unsigned char *d = dst;
    const unsigned char *s = src;
    size_t head = (size_t)(-(uintptr_t)d & (LINE - 1));
    if (n < head + LINE) {
        memcpy(d, s, n);
        return;
    }
    memcpy(d, s, head);
    d += head, s += head, n -= head;
    for (; n >= LINE; d += LINE, s += LINE, n -= LINE) {
        _mm_prefetch((const char *)s + PREFETCH_BYTES, _MM_HINT_NTA);
        copy_line(d, s);
    }
    memcpy(d, s, n);
}

void ts_stream_fence(void) { _mm_sfence(); }
#else
void ts_stream_copy(void *dst, const void *src, size_t n) { memcpy(dst, src, n); }
void ts_stream_fence(void) {}
#endif
