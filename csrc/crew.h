/* A few threads that take jobs from a queue, for as long as one epoch is read.
 *
 * A crew belongs to the process that started it: after fork() the child must not
 * touch it (its threads are not there), nor free it. */
#ifndef TS_CREW_H
#define TS_CREW_H

#include <stdint.h>

struct ts_thread_pool;

/* One job; owned by the caller, who keeps it until it is done. */
struct ts_job {
    void (*run)(void *context);
    void *context;
    struct ts_job *next;
    int state, awaited; /* the crew's */
};

/* Starts up to num_threads threads; NULL where not even one can be had. They have
 * all signals blocked but those of their own faults: signals belong to the interpreter's thread. */
struct ts_thread_pool *ts_thread_pool_start(int num_threads);

/* Queues a job behind those that are there. */
void ts_thread_pool_submit(struct ts_thread_pool *crew, struct ts_job *job);

/* Waits up to timeout_ms; 1 if the job is done (or was cancelled), else 0. */
int ts_thread_pool_wait(struct ts_thread_pool *crew, struct ts_job *job, int64_t timeout_ms);

/* Takes a job out of the queue, or waits for it where it runs. After that it may be freed. */
void ts_thread_pool_cancel(struct ts_thread_pool *crew, struct ts_job *job);

/* Cancels what is queued, waits for what runs, ends the threads, frees the crew. */
void ts_thread_pool_stop(struct ts_thread_pool *crew);

#endif
