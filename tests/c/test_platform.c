#include "platform.h"
#include "test_core.h"

/* Hints about mappings and counts of page faults. */
void test_platform(void)
{
    struct ts_map map;
    unsigned char *base = map_truncated_file(&map, 4 * 4096);
    ts_map_prefetch(base + 100, 0);
    ts_map_prefetch(base + 5000, 3000);
    ts_map_evict(base, 4 * 4096);
    for (int i = 0; i < 4; i++)
        CHECK(base[i * 4096] == 0x3c);
    int64_t faults = ts_major_faults();
    CHECK(faults >= 0 && ts_major_faults() >= faults);
    ts_map_close(&map);
}
