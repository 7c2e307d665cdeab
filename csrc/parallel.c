#include "parallel.h"

#include <pthread.h>

#define MAX_THREADS 256

struct job {
    size_t n, grain, next;
    ts_range_fn fn;
    void *context;
};

static void *run(void *argument)
{
    struct job *job = argument;
    for (;;) {
        size_t begin = __atomic_fetch_add(&job->next, job->grain, __ATOMIC_RELAXED);
        if (begin >= job->n)
            return NULL;
        size_t end = job->n - begin > job->grain ? begin + job->grain : job->n;
        job->fn(job->context, begin, end);
    }
}

void ts_parallel_for(size_t n, size_t grain, int num_threads, ts_range_fn fn, void *context)
{
    if (n == 0)
        return;
    if (grain == 0)
        grain = 1;
    struct job job = {n, grain, 0, fn, context};
    pthread_t threads[MAX_THREADS];
    size_t ranges = n / grain + (n % grain != 0);
    int limit = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
    if ((size_t)(limit < 0 ? 0 : limit) > ranges)
        limit = (int)ranges;
    int started = 0;
    while (started < limit - 1 && pthread_create(&threads[started], NULL, run, &job) == 0)
        started++;
    run(&job);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}
