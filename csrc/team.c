#include "team.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

/* The interface of GNU's runtime, which others for Linux have too. Looked up when the first
 * team is asked for, torch being loaded by then; linked to, it would be one more runtime with
 * threads of its own. */
struct runtime {
    void (*parallel)(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags);
    int (*thread_num)(void);
    int (*num_threads)(void);
};

struct work {
    ts_part_fn fn;
    void *context;
};

static struct runtime runtime;

/* ISO C knows no pointer to a function that came from one to data; POSIX does. */
static int look_up(const char *name, void *function)
{
    *(void **)function = dlsym(RTLD_DEFAULT, name);
    return *(void **)function != NULL;
}

static void look_up_runtime(void)
{
    if (!look_up("omp_get_thread_num", &runtime.thread_num) ||
        !look_up("omp_get_num_threads", &runtime.num_threads) || !look_up("GOMP_parallel", &runtime.parallel))
        runtime.parallel = NULL;
}

static void run_part(void *context)
{
    const struct work *work = context;
    work->fn(work->context, runtime.thread_num(), runtime.num_threads());
}

void ts_team_run(int num_threads, ts_part_fn fn, void *context)
{
    /* Once: to look through all libraries takes as long as to copy half a megabyte. */
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (num_threads > 1)
        pthread_once(&once, look_up_runtime);
    if (num_threads < 2 || runtime.parallel == NULL) {
        fn(context, 0, 1);
        return;
    }
    struct work work = {fn, context};
    runtime.parallel(run_part, &work, (unsigned)num_threads, 0);
}
