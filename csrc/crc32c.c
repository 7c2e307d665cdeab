#include "crc32c.h"

#include <string.h>

#define POLY 0x82f63b78u

/* Slicing-by-8 tables, built once by the compiler's constructor so that no
 * lock is needed on the hot path. */
static uint32_t table[8][256];

__attribute__((constructor)) static void build_tables(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++)
            c = (c >> 1) ^ (POLY & (0u - (c & 1u)));
        table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            table[t][i] = (table[t - 1][i] >> 8) ^ table[0][table[t - 1][i] & 255u];
}

uint32_t ts_crc32c_portable(uint32_t crc, const void *data, size_t n)
{
    const unsigned char *p = data;
    crc = ~crc;
    while (n >= 8) {
        uint32_t lo = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        lo ^= crc;
        crc = table[7][lo & 255u] ^ table[6][(lo >> 8) & 255u] ^ table[5][(lo >> 16) & 255u]
            ^ table[4][lo >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
        p += 8;
        n -= 8;
    }
    while (n--)
        crc = (crc >> 8) ^ table[0][(crc ^ *p++) & 255u];
    return ~crc;
}

/* Multiplication of polynomials modulo the CRC polynomial, bit-reflected. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (int i = 31; i >= 0; i--) {
        if ((a >> i) & 1u)
            product ^= b;
        b = (b >> 1) ^ (POLY & (0u - (b & 1u)));
    }
    return product;
}

/* x^(8 n) modulo the polynomial. */
static uint32_t shift_operator(uint64_t n_bytes)
{
    uint32_t power = 0x80000000u; /* x^0 */
    uint32_t square = 0x00800000u; /* x^8 */
    while (n_bytes) {
        if (n_bytes & 1u)
            power = multiply(square, power);
        square = multiply(square, square);
        n_bytes >>= 1;
    }
    return power;
}

uint32_t ts_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)
{
    return multiply(shift_operator(len_b), crc_a) ^ crc_b;
}

#if defined(__x86_64__)
#include <nmmintrin.h>

/* Three independent streams hide the 3-cycle latency of the crc32 instruction. */
#define LANE 4096u

__attribute__((target("sse4.2")))
static uint32_t crc32c_sse42(uint32_t crc, const unsigned char *p, size_t n)
{
    static uint32_t shift1, shift2;
    if (!__atomic_load_n(&shift2, __ATOMIC_ACQUIRE)) {
        /* Every thread computes the same two values; the race is benign. */
        __atomic_store_n(&shift1, shift_operator(LANE), __ATOMIC_RELEASE);
        __atomic_store_n(&shift2, shift_operator(2 * LANE), __ATOMIC_RELEASE);
    }
    uint64_t c = (uint32_t)~crc;
    while (n >= 3 * LANE) {
        uint64_t c1 = 0, c2 = 0, w;
        for (size_t i = 0; i < LANE; i += 8) {
            memcpy(&w, p + i, 8);
            c = _mm_crc32_u64(c, w);
            memcpy(&w, p + LANE + i, 8);
            c1 = _mm_crc32_u64(c1, w);
            memcpy(&w, p + 2 * LANE + i, 8);
            c2 = _mm_crc32_u64(c2, w);
        }
        c = multiply(__atomic_load_n(&shift2, __ATOMIC_RELAXED), (uint32_t)c)
          ^ multiply(__atomic_load_n(&shift1, __ATOMIC_RELAXED), (uint32_t)c1) ^ (uint32_t)c2;
        p += 3 * LANE;
        n -= 3 * LANE;
    }
    while (n >= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        c = _mm_crc32_u64(c, w);
        p += 8;
        n -= 8;
    }
    while (n--)
        c = _mm_crc32_u8((uint32_t)c, *p++);
    return ~(uint32_t)c;
}

uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n)
{
    if (__builtin_cpu_supports("sse4.2"))
        return crc32c_sse42(crc, data, n);
    return ts_crc32c_portable(crc, data, n);
}
#else
uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n)
{
    return ts_crc32c_portable(crc, data, n);
}
#endif
