#include "index.h"
#include "test_core.h"

void test_index(void)
{
    enum { N = 200 };
    unsigned char ids[N * 6];
    int64_t offsets[N + 1] = {0};
    int32_t samples[N];
    for (int i = 0; i < N; i++) {
        char text[8];
        int n = snprintf(text, sizeof text, "q%d", i / 2);
        memcpy(ids + offsets[i], text, (size_t)n);
        offsets[i + 1] = offsets[i] + n;
        samples[i] = i % 2;
    }
    uint32_t table[512] = {0};
    struct ts_index_part part = {N, 512, table, offsets, ids, sizeof ids, samples};
    CHECK(ts_index_build(&part, table) == -1);
    for (int i = 0; i < N; i++)
        CHECK(ts_index_find(&part, ids + offsets[i], (size_t)(offsets[i + 1] - offsets[i]), samples[i]) == i);
    CHECK(ts_index_find(&part, (const unsigned char *)"q1", 2, 7) == TS_INDEX_ABSENT);
    for (int i = 0; i < 512; i++)
        table[i] = 0xffffffffu;
    CHECK(ts_index_find(&part, ids, 2, 0) == TS_INDEX_CORRUPT);
    for (int i = 0; i < 512; i++)
        table[i] = 1; /* a table without a free slot */
    CHECK(ts_index_find(&part, ids, 1, 5) == TS_INDEX_CORRUPT);
    for (int k = 0; k < 2; k++) { /* an id that begins, then one that ends, outside the ids */
        int64_t saved = offsets[k];
        offsets[k] = k == 0 ? -1 : (int64_t)sizeof ids + 1;
        CHECK(ts_index_find(&part, ids, 2, 0) == TS_INDEX_CORRUPT);
        offsets[k] = saved;
    }
    samples[1] = 0;
    memset(table, 0, sizeof table);
    CHECK(ts_index_build(&part, table) == 1);
}
