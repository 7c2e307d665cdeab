/* The part of gine.c that depends on the scalar type. gine.c includes this file once for each type and
 * defines
 *   REAL         float or double
 *   NAME(stem)   the name of `stem` for the type */

/* One graph with grouped edges: group r has the edges ptr[r] .. ptr[r + 1]; index[e] is the node at the
 * other end of edge e and value[e] its weight. */
struct NAME(graph) {
    const struct ts_gine *g;
    size_t S, first_row;
    const size_t *ptr;
    const uint32_t *index;
    const REAL *value;
};

/* One graph with several channels, and buffers for the edges of one row: the edges of target i are
 * (index[e], i) with the weights value[c * S + e]. */
struct NAME(rows) {
    const struct ts_gine *g;
    size_t S, first_row, first_weight;
    double *sum, *single; /* (S,) */
    uint32_t *index;
    REAL *value;
};

/* The kernels of one graph for one instruction set. `block` and `columns` are buffers. */
struct NAME(kernels) {
    void (*forward)(const struct NAME(graph) *graph, const REAL *w, const REAL *b, REAL *block, REAL *out);
    void (*backward)(const struct NAME(graph) *graph, const REAL *w, const REAL *b, REAL *block, const REAL *grad_out,
                     REAL *grad_x, REAL *grad_w, REAL *grad_b);
    void (*forward_channels)(const struct NAME(rows) *rows, const REAL *w, const REAL *b, REAL *block, REAL *columns,
                             REAL *out);
    void (*backward_channels)(const struct NAME(rows) *rows, const REAL *w, const REAL *b, REAL *block, REAL *columns,
                              const REAL *grad_out, REAL *grad_x, REAL *grad_w, REAL *grad_b);
};

#if defined(__x86_64__)
#define TARGET TS_TARGET_AVX512
#define VECTOR_BYTES 64
#define VARIANT(stem) JOIN(NAME(stem), _avx512)
#define FMA(a, b, c) NAME(fma_avx512)(a, b, c)
#define RELU(m) NAME(relu_avx512)(m)
#define MASK_POSITIVE(m, v) NAME(mask_positive_avx512)(m, v)
#include "gine_loops.h"

#define TARGET TS_TARGET_AVX2
#define VECTOR_BYTES 32
#define VARIANT(stem) JOIN(NAME(stem), _avx2)
#define FMA(a, b, c) NAME(fma_avx2)(a, b, c)
#include "gine_loops.h"
#endif

#define TARGET
#define VECTOR_BYTES 16
#define VARIANT(stem) JOIN(NAME(stem), _generic)
#define FMA(a, b, c) NAME(fma_generic)(a, b, c)
#if defined(__aarch64__)
#define RELU(m) NAME(relu_generic)(m)
#endif
#include "gine_loops.h"

/* Group the edges of graph k by target or by source, each group in stored order. `row` is a buffer for
 * one row of weights. Returns -1 if an edge leaves the graph. */
static int NAME(group_edges)(const struct ts_gine *g, size_t k, int by_source, double *row, size_t *ptr,
                             uint32_t *index, REAL *value)
{
    int64_t base = g->node_ptr[k];
    size_t S = (size_t)(g->node_ptr[k + 1] - base), first = (size_t)g->weight_ptr[k], n = num_pairs(g, k);
    memset(ptr, 0, (S + 1) * sizeof *ptr);
    if (g->source == NULL && !by_source) { /* stored order is grouped by target */
        size_t kept = 0;
        for (size_t i = 0; i < S; i++) {
            load_weights(g, first + i * (i + 1) / 2, i + 1, row);
            for (size_t j = 0; j <= i; j++) {
                index[kept] = (uint32_t)j;
                value[kept] = (REAL)row[j];
                kept += row[j] > g->threshold;
            }
            ptr[i + 1] = kept;
        }
        return 0;
    }
    /* A counting sort in two passes, counting and placing. Counts of group r are kept in ptr[r + 1]:
     * placing advances that entry from the start of group r to its end, the start of group r + 1. */
    for (int placing = 0; placing < 2; placing++) {
        if (g->source == NULL) {
            for (size_t i = 0; i < S; i++) {
                load_weights(g, first + i * (i + 1) / 2, i + 1, row);
                for (size_t j = 0; j <= i; j++) {
                    if (!(row[j] > g->threshold))
                        continue;
                    size_t slot = ptr[j + 1]++;
                    if (placing) {
                        index[slot] = (uint32_t)i;
                        value[slot] = (REAL)row[j];
                    }
                }
            }
        } else {
            const int64_t *group = by_source ? g->source : g->target, *other = by_source ? g->target : g->source;
            for (size_t e = first; e < first + n; e++) {
                uint64_t r = (uint64_t)group[e] - (uint64_t)base, o = (uint64_t)other[e] - (uint64_t)base;
                if (r >= S || o >= S)
                    return -1;
                size_t slot = ptr[r + 1]++;
                if (placing) {
                    double weight;
                    load_weights(g, e, 1, &weight);
                    index[slot] = (uint32_t)o;
                    value[slot] = (REAL)weight;
                }
            }
        }
        if (!placing) {
            size_t before = 0;
            for (size_t r = 0; r < S; r++) {
                size_t count = ptr[r + 1];
                ptr[r + 1] = before;
                before += count;
            }
        }
    }
    return 0;
}

struct NAME(job) {
    const struct ts_gine *g;
    const REAL *w, *b, *grad_out;
    REAL *out, *grad_x, *partial;
    unsigned char *slots;
    struct slot_sizes sizes;
    size_t slot_bytes;
    int busy[MAX_SLOTS];
    int status;
};

static void NAME(range)(void *context, size_t begin, size_t end)
{
    struct NAME(job) *job = context;
    const struct ts_gine *g = job->g;
    int slot = 0;
    /* There is one slot per thread, so that a free one exists. */
    while (__atomic_exchange_n(&job->busy[slot], 1, __ATOMIC_ACQUIRE))
        slot = (slot + 1) % MAX_SLOTS;
    unsigned char *memory = job->slots + (size_t)slot * job->slot_bytes;
    size_t *ptr = (size_t *)memory;
    uint32_t *index = (uint32_t *)(memory += job->sizes.ptr);
    REAL *value = (REAL *)(memory += job->sizes.index), *block = (REAL *)(memory += job->sizes.value);
    double *sum = (double *)(memory += job->sizes.rows);
    REAL *columns = (REAL *)(memory += job->sizes.sums);
    const struct NAME(kernels) *kernels = &TS_KERNEL(NAME(gine));
    for (size_t k = begin; k < end; k++) {
        size_t first_row = (size_t)(g->node_ptr[k] - g->node_ptr[0]), D = g->dim;
        size_t S = (size_t)(g->node_ptr[k + 1] - g->node_ptr[k]), C = g->num_channels;
        REAL *out = job->out ? job->out + first_row * D : NULL;
        REAL *grad_x = job->grad_x ? job->grad_x + first_row * D : NULL;
        REAL *partial = out ? NULL : job->partial + k * (C + 1) * D;
        const REAL *grad_out = out ? NULL : job->grad_out + first_row * D;
        if (C > 1) {
            struct NAME(rows) rows = {g, S, first_row, (size_t)g->weight_ptr[k], sum, sum + S, index, value};
            if (out)
                kernels->forward_channels(&rows, job->w, job->b, block, columns, out);
            else
                kernels->backward_channels(&rows, job->w, job->b, block, columns, grad_out, grad_x, partial,
                                           partial + C * D);
            continue;
        }
        /* The block of columns is not in use yet and is large enough for a row of weights. */
        if (NAME(group_edges)(g, k, out == NULL, (double *)block, ptr, index, value) != 0) {
            __atomic_store_n(&job->status, TS_ERR_BOUNDS, __ATOMIC_RELAXED);
            break;
        }
        struct NAME(graph) graph = {g, S, first_row, ptr, index, value};
        if (out)
            kernels->forward(&graph, job->w, job->b, block, out);
        else
            kernels->backward(&graph, job->w, job->b, block, grad_out, grad_x, partial, partial + D);
    }
    __atomic_store_n(&job->busy[slot], 0, __ATOMIC_RELEASE);
}

static int NAME(run)(struct NAME(job) *job, void *workspace)
{
    const struct ts_gine *g = job->g;
    unsigned char *memory = (unsigned char *)round_up((size_t)(uintptr_t)workspace);
    if (job->out == NULL) {
        job->partial = (REAL *)memory;
        memory += partial_bytes(g, sizeof(REAL));
    }
    job->slots = memory;
    job->slot_bytes = slot_bytes(g, sizeof(REAL), &job->sizes);
    int slots = num_slots(g);
    for (int k = slots; k < MAX_SLOTS; k++)
        job->busy[k] = 1;
    ts_parallel_for(g->num_graphs, 1, slots, NAME(range), job);
    return job->status;
}

int NAME(ts_gine_forward)(const struct ts_gine *g, const REAL *w, const REAL *b, REAL *out, void *workspace)
{
    struct NAME(job) job = {.g = g, .w = w, .b = b, .out = out};
    return NAME(run)(&job, workspace);
}

int NAME(ts_gine_backward)(const struct ts_gine *g, const REAL *w, const REAL *b, const REAL *grad_out, REAL *grad_x,
                           REAL *grad_w, REAL *grad_b, void *workspace)
{
    struct NAME(job) job = {.g = g, .w = w, .b = b, .grad_out = grad_out, .grad_x = grad_x};
    int ret = NAME(run)(&job, workspace);
    size_t num_w = g->num_channels * g->dim;
    memset(grad_w, 0, num_w * sizeof *grad_w);
    memset(grad_b, 0, g->dim * sizeof *grad_b);
    for (size_t k = 0; ret == TS_OK && k < g->num_graphs; k++) {
        const REAL *partial = job.partial + k * (num_w + g->dim);
        for (size_t c = 0; c < num_w; c++)
            grad_w[c] += partial[c];
        for (size_t c = 0; c < g->dim; c++)
            grad_b[c] += partial[num_w + c];
    }
    return ret;
}

#undef REAL
#undef NAME
