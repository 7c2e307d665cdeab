/**
 * A pool of threads that run jobs in the order of submission.
 *
 * A pool belongs to the process that started it. After fork() the child has none of its threads
 * and must neither use nor free it. All functions but ts_thread_pool_stop() are thread safe.
 */
#ifndef TS_THREAD_POOL_H
#define TS_THREAD_POOL_H

#include <stdint.h>

struct ts_thread_pool;

/** One job. The caller owns it and keeps it alive until it is done or canceled. */
struct ts_job {
    void (*run)(void *context);
    void *context;
    /* Private to the pool. */
    struct ts_job *next;
    int state, has_waiter;
};

/**
 * Start a pool.
 *
 * The threads block all signals except those that the processor raises in them, so that the
 * interpreter's main thread receives every other signal.
 *
 * @param num_threads  threads to start; fewer if the system refuses more
 * @return the pool, to be freed by ts_thread_pool_stop(), or NULL if no thread could be started
 */
struct ts_thread_pool *ts_thread_pool_start(int num_threads);

/**
 * Append a job to the queue.
 *
 * @param job  borrowed until it is done or canceled; neither queued nor running now
 */
void ts_thread_pool_submit(struct ts_thread_pool *pool, struct ts_job *job);

/**
 * Wait for a job.
 *
 * @param timeout_ms  longest time to wait, in milliseconds
 * @return 1 if the job is done or canceled, 0 after a timeout
 */
int ts_thread_pool_wait(struct ts_thread_pool *pool, struct ts_job *job, int64_t timeout_ms);

/** Remove a job from the queue, or wait until it is done if it runs. The job may be freed afterwards. */
void ts_thread_pool_cancel(struct ts_thread_pool *pool, struct ts_job *job);

/** Cancel the queued jobs, wait for the running ones, join the threads and free the pool. */
void ts_thread_pool_stop(struct ts_thread_pool *pool);

#endif
