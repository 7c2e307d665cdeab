#include "crc32c.h"
#include "test_core.h"

/* The definition of the checksum, bit by bit. */
static uint32_t reference(const unsigned char *data, size_t n)
{
    uint32_t state = ~0u;
    for (size_t i = 0; i < n; i++) {
        state ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? 0x82f63b78u : 0);
    }
    return ~state;
}

static void test_checksums(void)
{
    unsigned char zeros[32] = {0};
    CHECK(ts_crc32c(0, "123456789", 9) == 0xe3069283u); /* RFC 3720, B.4 */
    CHECK(ts_crc32c(0, zeros, 32) == 0x8a9136aau);
    for (size_t n = 0; n < 40000; n = n * 2 + 1) {
        unsigned char *data = malloc(n + 1);
        for (size_t i = 0; i < n; i++)
            data[i] = (unsigned char)(i * 131 + n);
        uint32_t whole = ts_crc32c(0, data, n);
        CHECK(whole == reference(data, n));
        size_t cut = n / 3;
        CHECK(ts_crc32c(ts_crc32c(0, data, cut), data + cut, n - cut) == whole);
        CHECK(ts_crc32c_combine(ts_crc32c(0, data, cut), ts_crc32c(0, data + cut, n - cut), n - cut) == whole);
        free(data);
    }
}

void test_crc32c(void)
{
    at_every_simd_level(test_checksums);
}
