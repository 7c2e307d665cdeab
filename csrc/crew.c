#include "crew.h"

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

static void *serve(void *argument)
{
    struct ts_thread_pool *crew = argument;
    pthread_mutex_lock(&crew->lock);
    for (;;) {
        while (crew->first == NULL && !crew->stopping)
            pthread_cond_wait(&crew->work, &crew->lock);
        if (crew->stopping)
            break;
        struct ts_job *job = crew->first;
        crew->first = job->next;
        if (crew->first == NULL)
            crew->last = &crew->first;
        job->state = RUNNING;
        pthread_mutex_unlock(&crew->lock);
        job->run(job->context);
        pthread_mutex_lock(&crew->lock);
        job->state = DONE;
        if (job->awaited) /* nobody is woken for a job that he does not wait for */
            pthread_cond_broadcast(&crew->done);
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

struct ts_thread_pool *ts_thread_pool_start(int num_threads)
{
    struct ts_thread_pool *crew = calloc(1, sizeof *crew);
    if (crew == NULL)
        return NULL;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->work, NULL);
    ts_condition_init(&crew->done);
    crew->last = &crew->first;
    sigset_t all, before;
    sigfillset(&all);
    /* What the processor raises belongs to the thread itself; blocked, it ends the process. */
    const int own[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int wanted = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
    while (crew->num_threads < wanted
           && pthread_create(&crew->threads[crew->num_threads], NULL, serve, crew) == 0)
        crew->num_threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (crew->num_threads == 0) {
        ts_thread_pool_stop(crew);
        return NULL;
    }
    return crew;
}

void ts_thread_pool_submit(struct ts_thread_pool *crew, struct ts_job *job)
{
    pthread_mutex_lock(&crew->lock);
    job->next = NULL;
    job->state = QUEUED;
    job->awaited = 0;
    *crew->last = job;
    crew->last = &job->next;
    pthread_cond_signal(&crew->work);
    pthread_mutex_unlock(&crew->lock);
}

int ts_thread_pool_wait(struct ts_thread_pool *crew, struct ts_job *job, int64_t timeout_ms)
{
    struct timespec until;
    clock_gettime(TS_CONDITION_CLOCK, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&crew->lock);
    job->awaited = 1;
    while (job->state == QUEUED || job->state == RUNNING)
        if (pthread_cond_timedwait(&crew->done, &crew->lock, &until) == ETIMEDOUT)
            break;
    int over = job->state == DONE || job->state == IDLE;
    pthread_mutex_unlock(&crew->lock);
    return over;
}

static void unqueue(struct ts_thread_pool *crew, struct ts_job *job)
{
    struct ts_job **at = &crew->first;
    while (*at != job)
        at = &(*at)->next;
    *at = job->next;
    if (*at == NULL)
        crew->last = at;
    job->state = DONE;
}

void ts_thread_pool_cancel(struct ts_thread_pool *crew, struct ts_job *job)
{
    pthread_mutex_lock(&crew->lock);
    if (job->state == QUEUED)
        unqueue(crew, job);
    job->awaited = 1;
    while (job->state == RUNNING)
        pthread_cond_wait(&crew->done, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
}

void ts_thread_pool_stop(struct ts_thread_pool *crew)
{
    pthread_mutex_lock(&crew->lock);
    crew->stopping = 1;
    while (crew->first != NULL)
        unqueue(crew, crew->first);
    pthread_cond_broadcast(&crew->work);
    pthread_cond_broadcast(&crew->done);
    pthread_mutex_unlock(&crew->lock);
    for (int i = 0; i < crew->num_threads; i++)
        pthread_join(crew->threads[i], NULL);
    pthread_cond_destroy(&crew->work);
    pthread_cond_destroy(&crew->done);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}
