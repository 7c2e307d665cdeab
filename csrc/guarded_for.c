#include "guarded_for.h"

#include <stdlib.h>

#include "parallel.h"
#include "sigbus_guard.h"
#include "stream.h"

struct loop {
    int (*body)(struct ts_range *range);
    void *context;
    int status;
    const void *fault;
};

static int call_body(void *argument)
{
    struct ts_range *range = argument;
    return range->body(range);
}

static void run_range(void *argument, size_t begin, size_t end)
{
    struct loop *loop = argument;
    struct ts_range range = {.context = loop->context, .begin = begin, .end = end, .body = loop->body};
    int ret = ts_sigbus_guard(call_body, &range);
    if (ret == TS_ERR_FAULT)
        __atomic_store_n(&loop->fault, ts_sigbus_fault(), __ATOMIC_RELAXED);
    else if (ret != TS_OK)
        __atomic_store_n(&loop->status, ret, __ATOMIC_RELAXED);
    free(range.scratch);
    ts_stream_fence();
}

int ts_guarded_for(size_t n, size_t grain, int num_threads, int (*body)(struct ts_range *range), void *context)
{
    struct loop loop = {body, context, TS_OK, NULL};
    ts_parallel_for(n, grain, num_threads, run_range, &loop);
    /* A fault takes precedence: errors of other ranges may follow from the zeros at the end of the file. */
    if (loop.fault == NULL)
        return loop.status;
    ts_sigbus_set_fault(loop.fault);
    return TS_ERR_FAULT;
}

void *ts_range_scratch(struct ts_range *range, size_t bytes)
{
    if (bytes > range->scratch_bytes) {
        free(range->scratch);
        range->scratch = malloc(bytes);
        range->scratch_bytes = range->scratch == NULL ? 0 : bytes;
    }
    return range->scratch;
}
