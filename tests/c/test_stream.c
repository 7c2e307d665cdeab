#include "stream.h"
#include "test_core.h"

static void test_copy_bytes(void)
{
    unsigned char bytes[300], copied[300];
    for (int i = 0; i < 300; i++)
        bytes[i] = (unsigned char)i;
    for (int shift = 0; shift < 64; shift++) {
        memset(copied, 0xee, sizeof copied);
        ts_stream_copy(copied + shift, bytes + 3, (size_t)(200 - shift));
        ts_stream_fence();
        CHECK(memcmp(copied + shift, bytes + 3, (size_t)(200 - shift)) == 0 && copied[200] == 0xee);
        CHECK(shift == 0 || copied[shift - 1] == 0xee);
        memset(copied, 0xee, sizeof copied);
        ts_stream_copy_ahead(copied + shift, bytes + 3, (size_t)(200 - shift), bytes);
        ts_stream_fence();
        CHECK(memcmp(copied + shift, bytes + 3, (size_t)(200 - shift)) == 0 && copied[200] == 0xee);
        CHECK(shift == 0 || copied[shift - 1] == 0xee);
    }
}

static void test_add_offset(void)
{
    int32_t index[24];
    int64_t *out = aligned_alloc(64, sizeof(int64_t[24]));
    for (int k = 0; k < 24; k++)
        index[k] = k % 2 ? INT32_MAX - k : k - 12;
    for (size_t n = 0; n <= 24; n += 8) {
        memset(out, 0, sizeof(int64_t[24]));
        ts_stream_add_offset(index, n, INT64_C(1) << 40, out);
        ts_stream_fence();
        for (size_t k = 0; k < 24; k++)
            CHECK(out[k] == (k < n ? (INT64_C(1) << 40) + index[k] : 0));
    }
    free(out);
}

void test_stream(void)
{
    test_copy_bytes();
    at_every_simd_level(test_add_offset);
}
