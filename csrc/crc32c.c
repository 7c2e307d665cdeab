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
    /* The layers of a trace have one length. */
    static _Thread_local uint64_t last_len;
    static _Thread_local uint32_t last_power = 0x80000000u;
    if (len_b != last_len) {
        last_power = power_of_x(8 * len_b);
        last_len = len_b;
    }
    return multiply(last_power, crc_a) ^ crc_b;
}

/* Independent streams of the CRC instruction hide its latency of two or three cycles. */
#define LANE 4096u

/* Slicing-by-8 tables and powers of x. A constructor builds them when the library is loaded, so that
 * the hot path needs no lock. */
static uint32_t table[8][256];
static uint32_t shift_lane, shift_two_lanes;

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
    shift_lane = power_of_x(8 * LANE);
    shift_two_lanes = power_of_x(16 * LANE);
}

/* The kernels extend a state, a checksum before its final inversion. */
static uint32_t crc32c_generic(uint32_t state, const unsigned char *p, size_t n)
{
    for (; n >= 8; p += 8, n -= 8) {
        uint32_t lo = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        lo ^= state;
        state = table[7][lo & 255u] ^ table[6][(lo >> 8) & 255u] ^ table[5][(lo >> 16) & 255u]
              ^ table[4][lo >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    }
    while (n--)
        state = (state >> 8) ^ table[0][(state ^ *p++) & 255u];
    return state;
}

/* The CRC32C instruction of each family of processors, for eight bytes and for one. */
#if defined(__x86_64__)
#include <immintrin.h>
typedef uint64_t crc_state; /* the instruction clears the upper half */
#define CRC_OF_8(state, word) _mm_crc32_u64(state, word)
#define CRC_OF_1(state, byte) _mm_crc32_u8((uint32_t)(state), byte)
#elif defined(__aarch64__)
#include <arm_acle.h>
typedef uint32_t crc_state;
#if defined(__clang__) /* whose header declares the functions only in files compiled with +crc, before version 16 */
#define CRC_OF_8(state, word) __builtin_arm_crc32cd(state, word)
#define CRC_OF_1(state, byte) __builtin_arm_crc32cb(state, byte)
#else
#define CRC_OF_8(state, word) __crc32cd(state, word)
#define CRC_OF_1(state, byte) __crc32cb(state, byte)
#endif
#endif

#if defined(CRC_OF_8)
TS_TARGET_CRC static inline uint64_t load_word(const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

TS_TARGET_CRC static uint32_t crc32c_crc(uint32_t state, const unsigned char *p, size_t n)
{
    crc_state c = state;
    for (; n >= 3 * LANE; p += 3 * LANE, n -= 3 * LANE) {
        crc_state c1 = 0, c2 = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            c = CRC_OF_8(c, load_word(p + i));
            c1 = CRC_OF_8(c1, load_word(p + LANE + i));
            c2 = CRC_OF_8(c2, load_word(p + 2 * LANE + i));
        }
        c = multiply(shift_two_lanes, (uint32_t)c) ^ multiply(shift_lane, (uint32_t)c1) ^ (uint32_t)c2;
    }
    for (; n >= 8; p += 8, n -= 8)
        c = CRC_OF_8(c, load_word(p));
    while (n--)
        c = CRC_OF_1(c, *p++);
    return (uint32_t)c;
}
#endif

#if defined(__x86_64__)
/* Four 512-bit registers are folded onto the bytes that follow them, and in the end into each other. */
#define FOLD_BYTES 256u
#define FOLDING "sse4.2,crc32,pclmul,avx512f,avx512vl,vpclmulqdq"
enum { BY_FOLD, BY_REGISTER, BY_LANE, NUM_FOLDS };
static uint64_t folds[NUM_FOLDS][2];

__attribute__((constructor)) static void build_folds(void)
{
    static const uint64_t bits[NUM_FOLDS] = {8 * FOLD_BYTES, 512, 128};
    /* 128 bits, least significant first, are L x^64 + H. The carry-less product of two
     * bit-reflected halves has one factor x too many, hence the exponents minus one. */
    for (int k = 0; k < NUM_FOLDS; k++) {
        folds[k][0] = (uint64_t)power_of_x(bits[k] + 63) << 32;
        folds[k][1] = (uint64_t)power_of_x(bits[k] - 1) << 32;
    }
}

__attribute__((target(FOLDING)))
static inline __m512i fold_avx512(__m512i a, __m512i by, __m512i b)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, by, 0x00), _mm512_clmulepi64_epi128(a, by, 0x11), b,
                                     0x96);
}

/* Extend a state by n bytes, a positive multiple of FOLD_BYTES, with carry-less products (Gopal et al.,
 * Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, Intel 2009). */
__attribute__((target(FOLDING)))
static uint32_t fold_bytes_avx512(uint32_t state_before, const unsigned char *p, size_t n)
{
    __m512i by[NUM_FOLDS], x[4];
    for (int k = 0; k < NUM_FOLDS; k++)
        by[k] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)folds[k]));
    for (int k = 0; k < 4; k++)
        x[k] = _mm512_loadu_si512(p + 64 * k);
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state_before)));
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

static uint32_t crc32c_avx512(uint32_t state, const unsigned char *p, size_t n)
{
    if (n < FOLD_BYTES || !__builtin_cpu_supports("vpclmulqdq") || !__builtin_cpu_supports("pclmul"))
        return crc32c_crc(state, p, n);
    size_t folded = n / FOLD_BYTES * FOLD_BYTES;
    return crc32c_crc(fold_bytes_avx512(state, p, folded), p + folded, n - folded);
}
#endif

uint32_t ts_crc32c(uint32_t crc, const void *data, size_t n)
{
    return ~TS_KERNEL(crc32c)(~crc, data, n);
}
