#include "crc32c.h"

#include <string.h>

#include "simd.h"

#define POLY 0x82f63b78u

/* Multiply two bit-reflected polynomials modulo the CRC polynomial. */
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

/* Return x^n modulo the CRC polynomial. */
static uint32_t power_of_x(uint64_t n)
{
    uint32_t power = 0x80000000u; /* x^0 */
    uint32_t square = 0x40000000u; /* x^1 */
    while (n) {
        if (n & 1u)
            power = multiply(square, power);
        square = multiply(square, square);
        n >>= 1;
    }
    return power;
}

uint32_t ts_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)
{
    return multiply(power_of_x(8 * len_b), crc_a) ^ crc_b;
}

/* Independent streams of the crc32 instruction hide its latency of three cycles. */
#define LANE 4096u
/* Four 512-bit registers are folded onto the bytes that follow them, and in the end into each other. */
#define FOLD_BYTES 256u
enum { BY_FOLD, BY_REGISTER, BY_LANE, NUM_FOLDS };

/* Slicing-by-8 tables and powers of x. A constructor builds them when the library is loaded, so that
 * the hot path needs no lock. */
static uint32_t table[8][256];
static uint32_t shift_lane, shift_two_lanes;
static uint64_t folds[NUM_FOLDS][2];

__attribute__((constructor)) static void build_tables(void)
{
    static const uint64_t bits[NUM_FOLDS] = {8 * FOLD_BYTES, 512, 128};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++)
            c = (c >> 1) ^ (POLY & (0u - (c & 1u)));
        table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            table[t][i] = (table[t - 1][i] >> 8) ^ table[0][table[t - 1][i] & 255u];
    shift_lane = power_of_x(8 * LANE);
    shift_two_lanes = power_of_x(16 * LANE);
    /* 128 bits, least significant first, are L x^64 + H. The carry-less product of two
     * bit-reflected halves has one factor x too many, hence the exponents minus one. */
    for (int k = 0; k < NUM_FOLDS; k++) {
        folds[k][0] = (uint64_t)power_of_x(bits[k] + 63) << 32;
        folds[k][1] = (uint64_t)power_of_x(bits[k] - 1) << 32;
    }
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

#if defined(__x86_64__)
#include <immintrin.h>

/* Clang does not include crc32 in SSE4.2. */
#define WITH_CRC32 "sse4.2,crc32"
#define FOLDING WITH_CRC32 ",pclmul,avx512f,avx512vl,vpclmulqdq"

__attribute__((target(FOLDING)))
static inline __m512i fold_avx512(__m512i a, __m512i by, __m512i b)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, by, 0x00), _mm512_clmulepi64_epi128(a, by, 0x11), b,
                                     0x96);
}

/* Extend the state c (a checksum before its final inversion) by n bytes, a positive multiple of
 * FOLD_BYTES, with carry-less products (Gopal et al., Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ, Intel 2009). */
__attribute__((target(FOLDING)))
static uint32_t crc32c_avx512(uint32_t c, const unsigned char *p, size_t n)
{
    __m512i by[NUM_FOLDS], x[4];
    for (int k = 0; k < NUM_FOLDS; k++)
        by[k] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)folds[k]));
    for (int k = 0; k < 4; k++)
        x[k] = _mm512_loadu_si512(p + 64 * k);
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)c)));
    for (size_t offset = FOLD_BYTES; offset < n; offset += FOLD_BYTES)
        for (int k = 0; k < 4; k++)
            x[k] = fold_avx512(x[k], by[BY_FOLD], _mm512_loadu_si512(p + offset + 64 * k));
    for (int k = 1; k < 4; k++)
        x[k] = fold_avx512(x[k - 1], by[BY_REGISTER], x[k]);
    uint64_t lanes[8];
    _mm512_storeu_si512(lanes, x[3]);
    __m128i sum = _mm_loadu_si128((const __m128i *)lanes), one = _mm512_castsi512_si128(by[BY_LANE]);
    for (int k = 1; k < 4; k++) {
        __m128i next = _mm_loadu_si128((const __m128i *)(lanes + 2 * k));
        sum = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(sum, one, 0x00), _mm_clmulepi64_si128(sum, one, 0x11)), next);
    }
    uint64_t state = _mm_crc32_u64(0, (uint64_t)_mm_extract_epi64(sum, 0));
    return (uint32_t)_mm_crc32_u64(state, (uint64_t)_mm_extract_epi64(sum, 1));
}

/* Extend a state by any number of bytes with the crc32 instruction. */
__attribute__((target(WITH_CRC32)))
static uint32_t crc32c_sse42(uint32_t state_before, const unsigned char *p, size_t n)
{
    uint64_t c = state_before;
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
        c = multiply(shift_two_lanes, (uint32_t)c) ^ multiply(shift_lane, (uint32_t)c1) ^ (uint32_t)c2;
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
    return (uint32_t)c;
}

uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n)
{
    int level = ts_simd_level();
    if (level < TS_SIMD_SSE42)
        return ts_crc32c_portable(crc, data, n);
    uint32_t state = ~crc;
    size_t folded = 0;
    if (level >= TS_SIMD_AVX512 && n >= FOLD_BYTES && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul")) {
        folded = n / FOLD_BYTES * FOLD_BYTES;
        state = crc32c_avx512(state, data, folded);
    }
    return ~crc32c_sse42(state, (const unsigned char *)data + folded, n - folded);
}
#else
uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n)
{
    return ts_crc32c_portable(crc, data, n);
}
#endif
