#include "copy.h"

#include <stdlib.h>

#include "guarded_for.h"
#include "stream.h"

#define CHUNK_ITEMS ((size_t)1 << 17) /* items that a thread copies at a time */
#define BLOCK 1024                    /* items that are converted in the cache and then streamed out */

int ts_can_copy(enum ts_dtype in, enum ts_dtype out)
{
    return in != TS_F64 && (in == out || (out == TS_F32 && (in == TS_F16 || in == TS_BF16)));
}

void ts_copy_items(unsigned char *dst, const unsigned char *src, size_t n, enum ts_dtype in, enum ts_dtype out)
{
    float wide[BLOCK];
    if (in == out) {
        ts_stream_copy(dst, src, n * ts_dtype_bytes(in));
        return;
    }
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        size_t count = n - begin < BLOCK ? n - begin : BLOCK;
        ts_to_f32(src + begin * 2, in, wide, count);
        ts_stream_copy(dst + begin * 4, wide, count * 4);
    }
}

struct job {
    const struct ts_copy *copies;
    enum ts_dtype in, out;
};

static int run_copies(struct ts_range *range)
{
    const struct job *job = range->context;
    for (size_t i = range->begin; i < range->end; i++)
        ts_copy_items(job->copies[i].dst, job->copies[i].src, job->copies[i].items, job->in, job->out);
    return TS_OK;
}

int ts_copy_many(const struct ts_copy *copies, size_t n, enum ts_dtype in, enum ts_dtype out, int num_threads)
{
    if (!ts_can_copy(in, out))
        return TS_ERR_DTYPE;
    struct job job = {copies, in, out};
    if (num_threads < 2)
        return ts_guarded_for(n, n, 1, run_copies, &job);
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += copies[i].items / CHUNK_ITEMS + 1;
    struct ts_copy *chunks = malloc((count + 1) * sizeof *chunks);
    if (chunks == NULL)
        return TS_ERR_NOMEM;
    count = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t done = 0; done < copies[i].items; done += CHUNK_ITEMS) {
            size_t left = copies[i].items - done;
            chunks[count++] = (struct ts_copy){copies[i].src + done * ts_dtype_bytes(in),
                                               copies[i].dst + done * ts_dtype_bytes(out),
                                               left < CHUNK_ITEMS ? left : CHUNK_ITEMS};
        }
    job.copies = chunks;
    int ret = ts_guarded_for(count, 1, num_threads, run_copies, &job);
    free(chunks);
    return ret;
}
