#include "shuffle.h"
#include "test_core.h"

void test_shuffle(void)
{
    for (uint64_t n = 1; n < 200; n = n * 3 / 2 + 1) {
        int64_t positions[400], out[400], window[64];
        unsigned char seen[400] = {0}, yielded[400] = {0};
        for (uint64_t k = 0; k < n; k++)
            positions[k] = (int64_t)k;
        ts_permute(positions, n, n, 42, out);
        for (uint64_t k = 0; k < n; k++)
            CHECK(out[k] >= 0 && (uint64_t)out[k] < n && !seen[out[k]]++);
        struct ts_shuffle_buffer buffer = {window, n, n < 64 ? n : 64, 7, 0};
        ts_shuffle_buffer_init(&buffer);
        ts_shuffle_buffer_next(&buffer, n / 2, NULL);
        ts_shuffle_buffer_init(&buffer);
        ts_shuffle_buffer_next(&buffer, n, out);
        for (uint64_t k = 0; k < n; k++)
            CHECK(out[k] >= 0 && (uint64_t)out[k] < n && !yielded[out[k]]++);
    }
}
