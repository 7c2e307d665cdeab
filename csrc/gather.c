#include "gather.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "parallel.h"

static void copy_range(void *context, size_t begin, size_t end)
{
    const struct ts_copy *copies = context;
    for (size_t i = begin; i < end; i++)
        memcpy(copies[i].dst, copies[i].src, copies[i].bytes);
}

void ts_copy_many(const struct ts_copy *copies, size_t n, int num_threads)
{
    ts_parallel_for(n, 1, num_threads, copy_range, (void *)copies);
}

struct edge_job {
    struct ts_layer *layers;
    enum ts_dtype dtype;
    struct ts_edge_rule rule;
    int64_t *source, *target; /* NULL: count only */
    unsigned char *weight;
    int status;
};

static size_t num_pairs(const struct ts_layer *layer)
{
    size_t S = layer->num_tokens;
    return layer->causal ? S * (S + 1) / 2 : S * S;
}

static void emit(const struct edge_job *job, const struct ts_layer *layer, const unsigned char *keep)
{
    size_t itemsize = ts_dtype_bytes(job->dtype), p = 0;
    int64_t e = layer->first_edge;
    for (size_t i = 0; i < layer->num_tokens; i++) {
        size_t row = layer->causal ? i + 1 : layer->num_tokens;
        for (size_t j = 0; j < row; j++, p++) {
            if (!keep[p])
                continue;
            job->source[e] = layer->first_node + (int64_t)j;
            job->target[e] = layer->first_node + (int64_t)i;
            memcpy(job->weight + (size_t)e * itemsize, layer->weights + p * itemsize, itemsize);
            e++;
        }
    }
}

static void edge_range(void *context, size_t begin, size_t end)
{
    struct edge_job *job = context;
    for (size_t l = begin; l < end; l++) {
        struct ts_layer *layer = &job->layers[l];
        size_t n = num_pairs(layer);
        float *values = malloc(n * sizeof *values + 1);
        unsigned char *keep = malloc(n + 1);
        int64_t kept = TS_ERR_NOMEM;
        if (values != NULL && keep != NULL) {
            if (job->dtype == TS_F16)
                ts_f16_to_f32((const uint16_t *)layer->weights, values, n);
            else if (job->dtype == TS_BF16)
                ts_bf16_to_f32((const uint16_t *)layer->weights, values, n);
            else
                memcpy(values, layer->weights, n * sizeof *values);
            kept = ts_select_pairs(values, n, job->rule, keep);
        }
        if (kept < 0)
            __atomic_store_n(&job->status, (int)kept, __ATOMIC_RELAXED);
        else if (job->source == NULL)
            layer->num_edges = kept;
        else if (kept != layer->num_edges)
            __atomic_store_n(&job->status, TS_ERR_BOUNDS, __ATOMIC_RELAXED);
        else
            emit(job, layer, keep);
        free(values);
        free(keep);
    }
}

static int run_edges(struct edge_job *job, size_t n, int num_threads)
{
    if (job->dtype == TS_F64)
        return TS_ERR_DTYPE;
    ts_parallel_for(n, 4, num_threads, edge_range, job);
    return job->status;
}

int ts_count_edges(struct ts_layer *layers, size_t n, enum ts_dtype dtype, struct ts_edge_rule rule, int num_threads)
{
    struct edge_job job = {layers, dtype, rule, NULL, NULL, NULL, TS_OK};
    return run_edges(&job, n, num_threads);
}

int ts_fill_edges(const struct ts_layer *layers, size_t n, enum ts_dtype dtype, struct ts_edge_rule rule,
                  int num_threads, int64_t *source, int64_t *target, unsigned char *weight)
{
    struct edge_job job = {(struct ts_layer *)layers, dtype, rule, source, target, weight, TS_OK};
    return run_edges(&job, n, num_threads);
}
