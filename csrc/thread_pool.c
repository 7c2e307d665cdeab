#include "thread_pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "platform.h"

#define MAX_THREADS 256

enum { IDLE, QUEUED, RUNNING, DONE };

struct ts_thread_pool {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct ts_job *first, **last;
    int stopping, num_threads;
    pthread_t threads[MAX_THREADS];
};

static void *run_jobs(void *argument)
{
    struct ts_thread_pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->first == NULL && !pool->stopping)
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stopping)
            break;
        struct ts_job *job = pool->first;
        pool->first = job->next;
        if (pool->first == NULL)
            pool->last = &pool->first;
        job->state = RUNNING;
        pthread_mutex_unlock(&pool->lock);
        job->run(job->context);
        pthread_mutex_lock(&pool->lock);
        job->state = DONE;
        if (job->has_waiter) /* signal only if a thread is waiting */
            pthread_cond_broadcast(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

struct ts_thread_pool *ts_thread_pool_start(int num_threads)
{
    struct ts_thread_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    ts_condition_init(&pool->done);
    pool->last = &pool->first;
    sigset_t all, before;
    sigfillset(&all);
    /* Signals that the processor raises are for the thread itself. Blocking them would end the
     * process when one occurs. */
    const int synchronous[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof synchronous / sizeof *synchronous; i++)
        sigdelset(&all, synchronous[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int max_threads = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
    while (pool->num_threads < max_threads
           && pthread_create(&pool->threads[pool->num_threads], NULL, run_jobs, pool) == 0)
        pool->num_threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->num_threads == 0) {
        ts_thread_pool_stop(pool);
        return NULL;
    }
    return pool;
}

void ts_thread_pool_submit(struct ts_thread_pool *pool, struct ts_job *job)
{
    pthread_mutex_lock(&pool->lock);
    job->next = NULL;
    job->state = QUEUED;
    job->has_waiter = 0;
    *pool->last = job;
    pool->last = &job->next;
    pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

int ts_thread_pool_wait(struct ts_thread_pool *pool, struct ts_job *job, int64_t timeout_ms)
{
    struct timespec deadline;
    clock_gettime(TS_CONDITION_CLOCK, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += timeout_ms % 1000 * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&pool->lock);
    job->has_waiter = 1;
    while (job->state == QUEUED || job->state == RUNNING)
        if (pthread_cond_timedwait(&pool->done, &pool->lock, &deadline) == ETIMEDOUT)
            break;
    int is_done = job->state == DONE || job->state == IDLE;
    pthread_mutex_unlock(&pool->lock);
    return is_done;
}

static void remove_from_queue(struct ts_thread_pool *pool, struct ts_job *job)
{
    struct ts_job **link = &pool->first;
    while (*link != job)
        link = &(*link)->next;
    *link = job->next;
    if (*link == NULL)
        pool->last = link;
    job->state = DONE;
}

void ts_thread_pool_cancel(struct ts_thread_pool *pool, struct ts_job *job)
{
    pthread_mutex_lock(&pool->lock);
    if (job->state == QUEUED)
        remove_from_queue(pool, job);
    job->has_waiter = 1;
    while (job->state == RUNNING)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

void ts_thread_pool_stop(struct ts_thread_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stopping = 1;
    while (pool->first != NULL)
        remove_from_queue(pool, pool->first);
    pthread_cond_broadcast(&pool->work);
    pthread_cond_broadcast(&pool->done);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}
