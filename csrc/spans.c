#include "spans.h"

#include "stream.h"
#include "team.h"

/* Torch takes one more thread for each of so many items that are begun. */
#define GRAIN 32768

struct job {
    const struct ts_span *spans;
    size_t n;
    int num_parts;
};

static size_t parts_of(const struct ts_span *span, size_t most)
{
    size_t wanted = (span->num_items + GRAIN - 1) / GRAIN;
    return wanted < most ? wanted : most;
}

/* The same part of each span as the thread has of an operation on it. Another thread would
 * take lines that were written last out of this one's cache, which the next operation
 * pays for: on two processors that took longer than the copy. */
static void copy_part(void *context, int part, int num_parts)
{
    struct job *job = context;
    if (part == 0)
        job->num_parts = num_parts;
    for (size_t i = 0; i < job->n; i++) {
        const struct ts_span *span = &job->spans[i];
        size_t parts = parts_of(span, (size_t)num_parts);
        if ((size_t)part >= parts)
            continue;
        size_t each = (span->num_items + parts - 1) / parts, begin = each * (size_t)part;
        if (begin >= span->num_items)
            continue;
        size_t left = span->num_items - begin;
        ts_stream_copy_spread(span->dst + begin * span->item_bytes, span->src + begin * span->item_bytes,
                              (left < each ? left : each) * span->item_bytes);
    }
    ts_stream_fence();
}

int ts_copy_spans(const struct ts_span *spans, size_t n, int num_threads)
{
    struct job job = {spans, n, 1};
    size_t parts = 0;
    for (size_t i = 0; i < n; i++) {
        size_t of = parts_of(&spans[i], 2);
        parts = of > parts ? of : parts;
    }
    /* All threads or one, as torch: see ts_team_run. */
    ts_team_run(parts > 1 ? num_threads : 1, copy_part, &job);
    return job.num_parts;
}
