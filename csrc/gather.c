#include "gather.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "error.h"
#include "guarded_for.h"
#include "stream.h"

#define BLOCK 256         /* pairs processed together */
#define STAGE (4 * BLOCK) /* edges buffered before they are streamed out; pairs counted together */
#define TABLE_TOKENS 1024 /* longest graph of the table of pairs: longer rows are fast without it */

size_t ts_num_pairs(const struct ts_graph *graph)
{
    size_t S = graph->num_tokens;
    if (graph->pairs != NULL)
        return (size_t)graph->num_edges;
    return (graph->causal ? S * (S + 1) / 2 : S * S) * (graph->num_heads ? graph->num_heads : 1);
}

/* Work on the graphs of a batch. Fields that a step does not use are NULL. */
struct graph_job {
    struct ts_graph *graphs;
    const struct ts_edge_options *options;
    struct ts_weight_range weights; /* what a threshold keeps */
    const int32_t *row, *column;    /* (i, j) of the pairs of causal graphs of up to table_tokens tokens */
    size_t table_tokens;
    int64_t *source, *target;
    unsigned char *weight;
    const size_t *starts;           /* first pair of each graph in `weight` */
    size_t num_heads;
    int32_t *degree;
};

static int average_heads(struct ts_range *range)
{
    struct graph_job *job = range->context;
    int status = TS_OK;
    for (size_t g = range->begin; g < range->end; g++) {
        size_t pairs = ts_num_pairs(&job->graphs[g]);
        uint16_t *out = (uint16_t *)job->weight + job->starts[g];
        int ret = ts_mean_rows(job->graphs[g].weights, job->options->in, job->num_heads, pairs, pairs, out);
        if (ret != TS_OK)
            status = ret;
        job->graphs[g].weights = (const unsigned char *)out;
    }
    return status;
}

static size_t *pair_starts(const struct ts_graph *graphs, size_t n)
{
    size_t *starts = malloc((n + 1) * sizeof *starts);
    if (starts == NULL)
        return NULL;
    starts[0] = 0;
    for (size_t g = 0; g < n; g++)
        starts[g + 1] = starts[g] + ts_num_pairs(&graphs[g]);
    return starts;
}

int ts_average_heads(struct ts_graph *graphs, size_t n, enum ts_dtype dtype, size_t H, uint16_t *out, int num_threads)
{
    struct ts_edge_options options = {.in = dtype, .out = TS_F16};
    size_t *starts = pair_starts(graphs, n);
    if (starts == NULL)
        return TS_ERR_NOMEM;
    struct graph_job job = {.graphs = graphs, .options = &options, .weight = (unsigned char *)out, .num_heads = H,
                            .starts = starts};
    int ret = ts_guarded_for(n, 1, num_threads, average_heads, &job);
    free(starts);
    return ret;
}

static size_t select_block(const struct graph_job *job, const struct ts_graph *graph, size_t first, size_t n,
                           unsigned char *keep)
{
    return ts_select_in_range(&job->weights, graph->weights + first * ts_dtype_bytes(job->options->in), n, keep);
}

static int count_edges(struct ts_range *range)
{
    struct graph_job *job = range->context;
    unsigned char keep[STAGE];
    for (size_t g = range->begin; g < range->end; g++) {
        struct ts_graph *graph = &job->graphs[g];
        size_t pairs = ts_num_pairs(graph), kept = 0;
        if (graph->pairs != NULL)
            continue;
        for (size_t p = 0; p < pairs; p += STAGE)
            kept += select_block(job, graph, p, pairs - p < STAGE ? pairs - p : STAGE, keep);
        if (job->options->rule.top_k > 0) {
            size_t k = ts_top_k_count(pairs, job->options->rule.top_k);
            kept = k < kept ? k : kept;
        }
        graph->num_edges = (int64_t)kept;
    }
    return TS_OK;
}

int ts_count_edges(struct ts_graph *graphs, size_t n, const struct ts_edge_options *options, int num_threads)
{
    if (!ts_can_copy(options->in, options->out))
        return TS_ERR_DTYPE;
    struct graph_job job = {.graphs = graphs, .options = options,
                            .weights = ts_weight_range(options->rule, options->in)};
    return ts_guarded_for(n, 4, num_threads, count_edges, &job);
}

/* Write (i, j) of the pairs [first, first + n) of a graph. */
static void list_pairs(const struct ts_graph *graph, size_t first, size_t n, int32_t *row, int32_t *column)
{
    size_t i, j;
    if (graph->causal) {
        i = (size_t)((sqrt(8.0 * (double)first + 1) - 1) / 2);
        while (i * (i + 1) / 2 > first) i--;
        while ((i + 1) * (i + 2) / 2 <= first) i++;
        j = first - i * (i + 1) / 2;
    } else {
        i = first / graph->num_tokens;
        j = first % graph->num_tokens;
    }
    for (size_t k = 0; k < n; i++, j = 0) {
        size_t length = graph->causal ? i + 1 : graph->num_tokens;
        for (; j < length && k < n; j++, k++) {
            row[k] = (int32_t)i;
            column[k] = (int32_t)j;
        }
    }
}

/* A write buffer: edges collect in the cache and are streamed out in whole cache lines. Source and
 * target have separate buffers, because E need not be a multiple of eight and so their lines differ. */
struct lane {
    size_t n;
    int64_t *dst;
    int64_t values[STAGE + BLOCK + 8];
};

struct stage {
    struct lane source, target;
    size_t num_weights;
    unsigned char *weights_dst;
    unsigned char weights[(STAGE + BLOCK) * 4];
};

static void flush_lane(struct lane *lane, int is_last)
{
    size_t rest = is_last ? 0 : ((uintptr_t)(lane->dst + lane->n) / 8) & 7, n = lane->n - rest;
    ts_stream_copy(lane->dst, lane->values, n * 8);
    memmove(lane->values, lane->values + n, rest * 8);
    lane->dst += n;
    lane->n = rest;
}

static void flush(const struct graph_job *job, struct stage *stage, int is_last)
{
    enum ts_dtype in = job->options->in, out = job->options->out;
    size_t n = stage->num_weights;
    if (in == out)
        ts_stream_copy(stage->weights_dst, stage->weights, n * ts_dtype_bytes(in));
    else
        ts_to_f32(stage->weights, in, (float *)stage->weights_dst, n);
    stage->weights_dst += n * ts_dtype_bytes(out);
    stage->num_weights = 0;
    flush_lane(&stage->source, is_last);
    flush_lane(&stage->target, is_last);
}

/* Append first + index[k] for all n, streaming whole cache lines from registers. */
static void append_all(struct lane *lane, const int32_t *index, size_t n, int64_t first)
{
    if (lane->n >= 8)
        flush_lane(lane, 0);
    size_t head = (size_t)(-(uintptr_t)(lane->dst + lane->n) / 8) & 7;
    head = head < n ? head : n;
    for (size_t k = 0; k < head; k++)
        lane->values[lane->n++] = first + index[k];
    if (head == n && ((uintptr_t)(lane->dst + lane->n) & 63) != 0)
        return;
    flush_lane(lane, 1);
    size_t lines = (n - head) & ~(size_t)7;
    ts_stream_add_offset(index + head, lines, first, lane->dst);
    lane->dst += lines;
    for (size_t k = head + lines; k < n; k++)
        lane->values[lane->n++] = first + index[k];
}

/* Append the kept ones of n <= BLOCK pairs. Returns TS_ERR_NODE if a stored edge leaves the graph. */
static int append_edges(const struct graph_job *job, struct stage *stage, const struct ts_graph *graph, size_t first, size_t n,
                        const unsigned char *keep, size_t kept)
{
    int32_t row_buffer[BLOCK], column_buffer[BLOCK];
    const int32_t *row = row_buffer, *column = column_buffer;
    size_t itemsize = ts_dtype_bytes(job->options->in);
    const unsigned char *weights = graph->weights + first * itemsize;
    if (graph->pairs != NULL) {
        int is_outside = 0;
        for (size_t k = 0; k < n; k++) {
            column_buffer[k] = graph->pairs[2 * (first + k)];
            row_buffer[k] = graph->pairs[2 * (first + k) + 1];
            is_outside |= (uint32_t)column_buffer[k] >= graph->num_tokens || (uint32_t)row_buffer[k] >= graph->num_tokens;
        }
        if (is_outside)
            return TS_ERR_NODE;
    } else if (graph->causal && graph->num_tokens <= job->table_tokens) {
        row = job->row + first;
        column = job->column + first;
    } else {
        list_pairs(graph, first, n, row_buffer, column_buffer);
    }
    if (kept == n) {
        append_all(&stage->source, column, n, graph->first_node);
        append_all(&stage->target, row, n, graph->first_node);
        memcpy(stage->weights + stage->num_weights * itemsize, weights, n * itemsize);
    } else {
        int64_t *source = stage->source.values + stage->source.n, *target = stage->target.values + stage->target.n;
        /* Write every pair, but advance only past the kept ones: no branch to mispredict. */
        size_t e = 0;
        unsigned char *out = stage->weights + stage->num_weights * itemsize;
        for (size_t k = 0; k < n; e += keep[k++]) {
            source[e] = graph->first_node + column[k];
            target[e] = graph->first_node + row[k];
            if (itemsize == 2)
                ((uint16_t *)out)[e] = ((const uint16_t *)weights)[k];
            else
                ((uint32_t *)out)[e] = ((const uint32_t *)weights)[k];
        }
        stage->source.n += kept;
        stage->target.n += kept;
    }
    stage->num_weights += kept;
    if (stage->num_weights >= STAGE)
        flush(job, stage, 0);
    return TS_OK;
}

/* Select the pairs of a graph by a top-k rule. Returns their flags in the scratch memory of the range, or NULL. */
static unsigned char *select_top_k(struct ts_range *range, const struct ts_graph *graph)
{
    const struct graph_job *job = range->context;
    size_t pairs = ts_num_pairs(graph);
    float *values = ts_range_scratch(range, pairs * (2 * sizeof *values + 1));
    if (values == NULL)
        return NULL;
    unsigned char *keep = (unsigned char *)(values + 2 * pairs);
    ts_to_f32(graph->weights, job->options->in, values, pairs);
    ts_select_top_k(values, pairs, job->options->rule.top_k, keep, values + pairs);
    return keep;
}

static int fill_graph(struct ts_range *range, const struct ts_graph *graph, struct stage *stage)
{
    const struct graph_job *job = range->context;
    size_t pairs = ts_num_pairs(graph);
    unsigned char block[BLOCK], *selected = NULL;
    int64_t total = 0;
    if (job->options->rule.top_k > 0 && pairs > 0 && graph->pairs == NULL) {
        selected = select_top_k(range, graph);
        if (selected == NULL)
            return TS_ERR_NOMEM;
    }
    for (size_t p = 0; p < pairs; p += BLOCK) {
        size_t n = pairs - p < BLOCK ? pairs - p : BLOCK, kept = 0;
        const unsigned char *keep = block;
        if (graph->pairs != NULL) {
            kept = n;
        } else if (selected == NULL) {
            kept = select_block(job, graph, p, n, block);
        } else {
            keep = selected + p;
            for (size_t k = 0; k < n; k++)
                kept += keep[k];
        }
        total += (int64_t)kept;
        if (total > graph->num_edges)
            break; /* the mapped file changed: never write more edges than were counted */
        int ret = append_edges(job, stage, graph, p, n, keep, kept);
        if (ret != TS_OK)
            return ret;
    }
    return total == graph->num_edges ? TS_OK : TS_ERR_BOUNDS;
}

static int fill_graphs(struct ts_range *range)
{
    struct graph_job *job = range->context;
    int64_t first = job->graphs[range->begin].first_edge;
    struct stage stage;
    stage.source.n = stage.target.n = stage.num_weights = 0;
    stage.source.dst = job->source + first;
    stage.target.dst = job->target + first;
    stage.weights_dst = job->weight + (size_t)first * ts_dtype_bytes(job->options->out);
    for (size_t g = range->begin; g < range->end; g++) {
        int ret = fill_graph(range, &job->graphs[g], &stage);
        if (ret != TS_OK)
            return ret;
    }
    flush(job, &stage, 1);
    return TS_OK;
}

static int32_t *make_table(struct graph_job *job, size_t n)
{
    size_t largest = 0;
    for (size_t g = 0; g < n; g++)
        if (job->graphs[g].causal && job->graphs[g].num_tokens <= TABLE_TOKENS && job->graphs[g].num_tokens > largest)
            largest = job->graphs[g].num_tokens;
    struct ts_graph graph = {.num_tokens = largest, .causal = 1};
    size_t pairs = ts_num_pairs(&graph);
    int32_t *table = malloc((2 * pairs + 1) * sizeof *table);
    if (table == NULL)
        return NULL;
    list_pairs(&graph, 0, pairs, table, table + pairs);
    job->row = table;
    job->column = table + pairs;
    job->table_tokens = largest;
    return table;
}

int ts_fill_edges(const struct ts_graph *graphs, size_t n, const struct ts_edge_options *options, int num_threads,
                  int64_t *source, int64_t *target, unsigned char *weight)
{
    if (!ts_can_copy(options->in, options->out))
        return TS_ERR_DTYPE;
    struct graph_job job = {.graphs = (struct ts_graph *)graphs, .options = options,
                            .weights = ts_weight_range(options->rule, options->in),
                            .source = source, .target = target, .weight = weight};
    int32_t *table = make_table(&job, n);
    if (table == NULL)
        return TS_ERR_NOMEM;
    /* A few long ranges per thread, so that few cache lines are shared by two ranges. */
    size_t grain = num_threads < 2 ? n : n / (8 * (size_t)num_threads) + 1;
    int ret = ts_guarded_for(n, grain, num_threads, fill_graphs, &job);
    free(table);
    return ret;
}

static int pack_graphs(struct ts_range *range)
{
    struct graph_job *job = range->context;
    enum ts_dtype in = job->options->in, out = job->options->out;
    for (size_t g = range->begin; g < range->end; g++) {
        size_t pairs = ts_num_pairs(&job->graphs[g]);
        unsigned char *dst = job->weight + job->starts[g] * ts_dtype_bytes(out);
        if (job->graphs[g].weights != dst)
            ts_copy_items(dst, job->graphs[g].weights, pairs, in, out);
        if (!(job->options->rule.top_k > 0) || pairs == 0)
            continue;
        const unsigned char *keep = select_top_k(range, &job->graphs[g]);
        if (keep == NULL)
            return TS_ERR_NOMEM;
        for (size_t p = 0; p < pairs; p++)
            if (!keep[p])
                ts_set_nan(dst, p, out);
    }
    for (size_t g = range->begin; g < range->end && job->degree != NULL; g++)
        ts_mask_triangle(&job->weights, job->weight + job->starts[g] * ts_dtype_bytes(out), job->graphs[g].num_tokens,
                         job->options->mask_diagonal, job->options->mask_sinks, job->degree + job->graphs[g].first_node);
    return TS_OK;
}

int ts_pack_graphs(const struct ts_graph *graphs, size_t n, const struct ts_edge_options *options, int num_threads,
                   unsigned char *out, int32_t *degree)
{
    if (!ts_can_copy(options->in, options->out))
        return TS_ERR_DTYPE;
    size_t *starts = pair_starts(graphs, n);
    if (starts == NULL)
        return TS_ERR_NOMEM;
    /* Pairs that a top-k rule dropped are NaN already: every other number is an edge. */
    struct ts_edge_rule rule = options->rule.top_k > 0 ? (struct ts_edge_rule){-INFINITY, 0} : options->rule;
    struct graph_job job = {.graphs = (struct ts_graph *)graphs, .options = options, .weight = out, .starts = starts,
                            .weights = ts_weight_range(rule, options->out), .degree = degree};
    int ret = ts_guarded_for(n, 4, num_threads, pack_graphs, &job);
    free(starts);
    return ret;
}
