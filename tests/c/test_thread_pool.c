#include <time.h>

#include "thread_pool.h"
#include "test_core.h"

static void count_up(void *context)
{
    __atomic_fetch_add((int *)context, 1, __ATOMIC_RELAXED);
}

static void test_jobs(void)
{
    enum { JOBS = 50 };
    for (int threads = 1; threads < 5; threads++) {
        struct ts_thread_pool *pool = ts_thread_pool_start(threads);
        struct ts_job jobs[JOBS] = {{0}};
        int done[JOBS] = {0}, total = 0;
        CHECK(pool != NULL);
        for (int k = 0; k < JOBS; k++) {
            jobs[k].run = count_up;
            jobs[k].context = &done[k];
            ts_thread_pool_submit(pool, &jobs[k]);
        }
        for (int k = 0; k < JOBS; k += 2)
            while (!ts_thread_pool_wait(pool, &jobs[k], 10))
                ;
        for (int k = JOBS - 1; k > JOBS / 2; k -= 2)
            ts_thread_pool_cancel(pool, &jobs[k]);
        ts_thread_pool_stop(pool);
        for (int k = 0; k < JOBS; k++) {
            CHECK(done[k] == 1 || (done[k] == 0 && k % 2 == 1));
            total += done[k];
        }
        CHECK(total >= JOBS / 2);
    }
}

static int gate_is_open;

static void wait_at_gate(void *context)
{
    __atomic_store_n((int *)context, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&gate_is_open, __ATOMIC_ACQUIRE))
        usleep(1000);
}

static void open_gate(void *context)
{
    (void)context;
    usleep(20000);
    __atomic_store_n(&gate_is_open, 1, __ATOMIC_RELEASE);
}

/* Waits that time out, and jobs that are canceled in the queue and while they run. */
static void test_waiting(void)
{
    struct ts_thread_pool *pool = ts_thread_pool_start(1), *helper = ts_thread_pool_start(1);
    int has_started = 0;
    struct ts_job first = {.run = wait_at_gate, .context = &has_started}, jobs[3] = {{0}}, opening = {.run = open_gate};
    for (int i = 0; i < 3; i++)
        jobs[i] = (struct ts_job){.run = open_gate};
    ts_thread_pool_submit(pool, &first);
    while (!__atomic_load_n(&has_started, __ATOMIC_ACQUIRE))
        usleep(1000);
    for (int i = 0; i < 3; i++)
        ts_thread_pool_submit(pool, &jobs[i]);
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    CHECK(!ts_thread_pool_wait(pool, &first, 999));
    clock_gettime(CLOCK_MONOTONIC, &after);
    CHECK(after.tv_sec - before.tv_sec >= 1 || after.tv_nsec - before.tv_nsec >= 900000000);
    CHECK(!ts_thread_pool_wait(pool, &jobs[0], 0));
    ts_thread_pool_cancel(pool, &jobs[1]);
    ts_thread_pool_cancel(pool, &jobs[2]);
    CHECK(ts_thread_pool_wait(pool, &jobs[1], 0) && ts_thread_pool_wait(pool, &jobs[2], 0));
    CHECK(!__atomic_load_n(&gate_is_open, __ATOMIC_ACQUIRE));
    ts_thread_pool_submit(helper, &opening);
    ts_thread_pool_cancel(pool, &first);
    CHECK(__atomic_load_n(&gate_is_open, __ATOMIC_ACQUIRE));
    ts_thread_pool_stop(pool);
    ts_thread_pool_stop(helper);
    CHECK(ts_thread_pool_start(0) == NULL);
}

void test_thread_pool(void)
{
    test_jobs();
    test_waiting();
}
