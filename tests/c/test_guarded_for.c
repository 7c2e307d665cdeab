#include "guarded_for.h"
#include "sigbus_guard.h"
#include "test_core.h"

enum { N = 40 };

struct items {
    unsigned char *pages; /* (N,) one byte of each is read */
    int results[N];       /* the code that the body returns for an item, or its sum of scratch bytes */
    int failing;          /* an item that returns TS_ERR_NODE, or -1 */
};

static int process(struct ts_range *range)
{
    struct items *items = range->context;
    for (size_t i = range->begin; i < range->end; i++) {
        unsigned char *scratch = ts_range_scratch(range, i + 1);
        CHECK(scratch != NULL);
        memset(scratch, 1, i + 1);
        items->results[i] = *(volatile unsigned char *)(items->pages + i * 400);
        for (size_t k = 0; k <= i; k++)
            items->results[i] += scratch[k];
        if ((int)i == items->failing)
            return TS_ERR_NODE;
    }
    return TS_OK;
}

void test_guarded_for(void)
{
    struct ts_map map;
    unsigned char *base = map_truncated_file(&map, 8192);
    for (int threads = 1; threads < 4; threads++)
        for (size_t grain = 1; grain < 50; grain += 24) {
            struct items items = {.pages = base, .failing = -1};
            CHECK(ts_guarded_for(20, grain, threads, process, &items) == TS_OK);
            for (int i = 0; i < 20; i++)
                CHECK(items.results[i] == 0x3c + i + 1);
            items.failing = 7;
            CHECK(ts_guarded_for(20, grain, threads, process, &items) == TS_ERR_NODE);
            items.failing = -1;
            CHECK(ts_guarded_for(N, grain, threads, process, &items) == TS_ERR_FAULT);
            const unsigned char *fault = ts_sigbus_fault();
            CHECK(fault >= base + 8192 && fault < base + map.size);
        }
    ts_map_close(&map);
}
