#include "parallel.h"
#include "test_core.h"

static void count_range(void *context, size_t begin, size_t end)
{
    for (size_t i = begin; i < end; i++)
        __atomic_fetch_add((int *)context + i, 1, __ATOMIC_RELAXED);
}

void test_parallel(void)
{
    for (size_t n = 0; n < 70; n += 23)
        for (int threads = 0; threads < 5; threads++) {
            int *seen = calloc(n + 1, sizeof *seen);
            ts_parallel_for(n, 4, threads, count_range, seen);
            for (size_t i = 0; i < n; i++)
                CHECK(seen[i] == 1);
            free(seen);
        }
}
