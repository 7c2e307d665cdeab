// One module of over 400 lines, because its jobs share the static functions that plan and fill a batch.
#include "gather.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "sigbus_guard.h"
#include "parallel.h"
#include "simd.h"
#include "stream.h"

#define CHUNK_ITEMS ((size_t)1 << 17) /* items that a thread copies at a time */
#define BLOCK 256                     /* pairs processed together */
#define STAGE (4 * BLOCK)             /* edges buffered before they are streamed out */
#define TABLE_TOKENS 1024             /* longest graph of the table of pairs: longer rows are fast without it */

/* Set keep[p] to 1 where the order-preserving integer of a 16-bit weight lies in (limit, top]. Returns
 * the number of ones. */
TS_INLINE size_t select16_body(const uint16_t *w, size_t n, int16_t limit, int16_t top, unsigned char *keep)
{
    unsigned kept = 0;
    for (size_t p = 0; p < n; p++) {
        int16_t bits = (int16_t)w[p];
        int16_t ordered = (int16_t)(bits ^ ((bits >> 15) & 0x7fff));
        unsigned char k = (unsigned char)((ordered > limit) & (ordered <= top));
        keep[p] = k;
        kept += k;
    }
    return kept;
}

/* The same for 32-bit weights. */
TS_INLINE size_t select32_body(const uint32_t *w, size_t n, int32_t limit, int32_t top, unsigned char *keep)
{
    unsigned kept = 0;
    for (size_t p = 0; p < n; p++) {
        int32_t bits = (int32_t)w[p];
        int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
        unsigned char k = (unsigned char)((ordered > limit) & (ordered <= top));
        keep[p] = k;
        kept += k;
    }
    return kept;
}

TS_DEFINE_KERNEL(size_t, select16, (const uint16_t *w, size_t n, int16_t limit, int16_t top, unsigned char *keep),
                 (w, n, limit, top, keep))
TS_DEFINE_KERNEL(size_t, select32, (const uint32_t *w, size_t n, int32_t limit, int32_t top, unsigned char *keep),
                 (w, n, limit, top, keep))

/* out[k] = first + index[k], with non-temporal stores. n is a multiple of 8; out is aligned to a cache line. */
static void add_offset_generic(const int32_t *index, size_t n, int64_t first, int64_t *out)
{
    for (size_t k = 0; k < n; k++)
        out[k] = first + index[k];
}

#if defined(__x86_64__)
#include <immintrin.h>

TS_TARGET_AVX2 static void add_offset_avx2(const int32_t *index, size_t n, int64_t first, int64_t *out)
{
    for (size_t k = 0; k < n; k += 4) {
        __m256i wide = _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)(index + k)));
        _mm256_stream_si256((__m256i *)(out + k), _mm256_add_epi64(wide, _mm256_set1_epi64x(first)));
    }
}

TS_TARGET_AVX512 static void add_offset_avx512(const int32_t *index, size_t n, int64_t first, int64_t *out)
{
    for (size_t k = 0; k < n; k += 8) {
        __m512i wide = _mm512_cvtepi32_epi64(_mm256_loadu_si256((const __m256i *)(index + k)));
        _mm512_stream_si512((__m512i *)(out + k), _mm512_add_epi64(wide, _mm512_set1_epi64(first)));
    }
}
#endif

static int is_pair_of_dtypes(enum ts_dtype in, enum ts_dtype out)
{
    return in != TS_F64 && (in == out || (out == TS_F32 && (in == TS_F16 || in == TS_BF16)));
}

/* Copy n items of type `in` to type `out`. */
static void copy_items(unsigned char *dst, const unsigned char *src, size_t n, enum ts_dtype in, enum ts_dtype out)
{
    float wide[STAGE];
    if (in == out) {
        ts_stream_copy(dst, src, n * ts_dtype_bytes(in));
        return;
    }
    for (size_t begin = 0; begin < n; begin += STAGE) {
        size_t count = n - begin < STAGE ? n - begin : STAGE;
        const uint16_t *narrow = (const uint16_t *)src + begin;
        if (in == TS_F16)
            ts_f16_to_f32(narrow, wide, count);
        else
            ts_bf16_to_f32(narrow, wide, count);
        ts_stream_copy(dst + begin * 4, wide, count * 4);
    }
}

/* The result of the ranges of a job: TS_OK or one of their errors. */
struct outcome {
    int status;
    const void *fault;
};

static void set_error(struct outcome *outcome, int code)
{
    if (code == TS_ERR_FAULT)
        __atomic_store_n(&outcome->fault, ts_sigbus_fault(), __ATOMIC_RELAXED);
    __atomic_store_n(&outcome->status, code, __ATOMIC_RELAXED);
}

static int get_status(const struct outcome *outcome)
{
    /* A fault takes precedence: errors of other ranges may follow from the zeros at the end of the file. */
    if (outcome->fault == NULL)
        return outcome->status;
    ts_sigbus_set_fault(outcome->fault);
    return TS_ERR_FAULT;
}

/* A range of a job that reads file mappings. It owns what the work on it allocates, so that memory is
 * freed even if a fault ends the work. */
struct range {
    void *job;
    size_t begin, end;
    unsigned char *keep; /* (capacity,) */
    float *values;       /* (2 * capacity,) */
    size_t capacity;
};

static void run_range(int (*work)(void *), void *job, size_t begin, size_t end, struct outcome *outcome)
{
    struct range range = {.job = job, .begin = begin, .end = end};
    int ret = ts_sigbus_guard(work, &range);
    if (ret != TS_OK)
        set_error(outcome, ret);
    free(range.keep);
    free(range.values);
    ts_stream_fence();
}

static int reserve(struct range *range, size_t n)
{
    if (n <= range->capacity)
        return TS_OK;
    free(range->keep);
    free(range->values);
    range->keep = malloc(n);
    range->values = malloc(2 * n * sizeof *range->values);
    range->capacity = range->keep != NULL && range->values != NULL ? n : 0;
    return range->capacity != 0 ? TS_OK : TS_ERR_NOMEM;
}

struct copy_job {
    const struct ts_copy *copies;
    enum ts_dtype in, out;
    struct outcome outcome;
};

static int run_copies(void *context)
{
    const struct range *range = context;
    const struct copy_job *job = range->job;
    for (size_t i = range->begin; i < range->end; i++)
        copy_items(job->copies[i].dst, job->copies[i].src, job->copies[i].items, job->in, job->out);
    return TS_OK;
}

static void copy_range(void *context, size_t begin, size_t end)
{
    struct copy_job *job = context;
    run_range(run_copies, job, begin, end, &job->outcome);
}

int ts_copy_many(const struct ts_copy *copies, size_t n, enum ts_dtype in, enum ts_dtype out, int num_threads)
{
    if (!is_pair_of_dtypes(in, out))
        return TS_ERR_DTYPE;
    struct copy_job job = {copies, in, out, {TS_OK, NULL}};
    if (num_threads < 2) {
        copy_range(&job, 0, n);
        return get_status(&job.outcome);
    }
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
    ts_parallel_for(count, 1, num_threads, copy_range, &job);
    free(chunks);
    return get_status(&job.outcome);
}

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
    size_t (*select16)(const uint16_t *, size_t, int16_t, int16_t, unsigned char *);
    size_t (*select32)(const uint32_t *, size_t, int32_t, int32_t, unsigned char *);
    int32_t limit, top;             /* the rule as order-preserving integers */
    const int32_t *row, *column;    /* (i, j) of the pairs of causal graphs of up to table_tokens tokens */
    size_t table_tokens;
    int64_t *source, *target;
    unsigned char *weight;
    const size_t *starts;           /* first pair of each graph in `weight` */
    size_t num_heads;
    struct outcome outcome;
};

static int average_heads(void *context)
{
    const struct range *range = context;
    struct graph_job *job = range->job;
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

static void average_range(void *context, size_t begin, size_t end)
{
    struct graph_job *job = context;
    run_range(average_heads, job, begin, end, &job->outcome);
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
    struct ts_edge_options options = {dtype, TS_F16, {0, 0}};
    struct graph_job job = {.graphs = graphs, .options = &options, .weight = (unsigned char *)out, .num_heads = H};
    size_t *starts = pair_starts(graphs, n);
    if (starts == NULL)
        return TS_ERR_NOMEM;
    job.starts = starts;
    ts_parallel_for(n, 1, num_threads, average_range, &job);
    free(starts);
    return get_status(&job.outcome);
}

/* Map the bits of a float to an integer of the same order. The function is its own inverse. */
static int32_t to_ordered(uint32_t bits, enum ts_dtype dtype)
{
    int32_t s = dtype == TS_F32 ? (int32_t)bits : (int16_t)bits;
    return s ^ ((s >> 31) & (dtype == TS_F32 ? 0x7fffffff : 0x7fff));
}

static double from_ordered(int32_t integer, enum ts_dtype dtype)
{
    uint32_t bits = (uint32_t)to_ordered((uint32_t)integer, dtype);
    uint16_t narrow = (uint16_t)bits;
    float wide;
    if (dtype == TS_F32)
        memcpy(&wide, &bits, 4);
    else if (dtype == TS_BF16)
        ts_bf16_to_f32(&narrow, &wide, 1);
    else
        wide = ts_f16_to_f32_portable(narrow);
    return (double)wide;
}

static uint32_t infinity_bits(enum ts_dtype dtype)
{
    return dtype == TS_F32 ? 0x7f800000u : dtype == TS_BF16 ? 0x7f80u : 0x7c00u;
}

/* Set the range of integers that are kept: above `limit` and up to `top`, which is infinity and so
 * excludes NaN. A top-k rule keeps every number here. */
static void set_rule(struct graph_job *job)
{
    enum ts_dtype dtype = job->options->in;
    uint32_t infinity = infinity_bits(dtype), sign = dtype == TS_F32 ? 0x80000000u : 0x8000u;
    int32_t lo = to_ordered(infinity | sign, dtype);
    job->select16 = TS_KERNEL(select16);
    job->select32 = TS_KERNEL(select32);
    job->top = (int32_t)infinity;
    job->limit = lo - 1;
    if (job->options->rule.top_k_fraction > 0)
        return;
    int32_t hi = job->top;
    double threshold = job->options->rule.threshold;
    if (isnan(threshold))
        lo = hi;
    while (lo < hi) { /* find the last integer whose value does not exceed the threshold */
        int32_t middle = (int32_t)((int64_t)lo + ((int64_t)hi - lo + 1) / 2);
        if (from_ordered(middle, dtype) <= threshold)
            lo = middle;
        else
            hi = middle - 1;
    }
    job->limit = lo;
}

static size_t select_block(const struct graph_job *job, const unsigned char *weights, size_t first, size_t n, unsigned char *keep)
{
    if (job->options->in == TS_F32)
        return job->select32((const uint32_t *)weights + first, n, job->limit, job->top, keep);
    return job->select16((const uint16_t *)weights + first, n, (int16_t)job->limit, (int16_t)job->top, keep);
}

static int count_edges(void *context)
{
    const struct range *range = context;
    struct graph_job *job = range->job;
    unsigned char keep[BLOCK];
    for (size_t g = range->begin; g < range->end; g++) {
        struct ts_graph *graph = &job->graphs[g];
        size_t pairs = ts_num_pairs(graph), kept = 0;
        if (graph->pairs != NULL)
            continue;
        for (size_t p = 0; p < pairs; p += BLOCK)
            kept += select_block(job, graph->weights, p, pairs - p < BLOCK ? pairs - p : BLOCK, keep);
        if (job->options->rule.top_k_fraction > 0) {
            size_t k = ts_top_k_count(pairs, job->options->rule.top_k_fraction);
            kept = k < kept ? k : kept;
        }
        graph->num_edges = (int64_t)kept;
    }
    return TS_OK;
}

static void count_range(void *context, size_t begin, size_t end)
{
    struct graph_job *job = context;
    run_range(count_edges, job, begin, end, &job->outcome);
}

int ts_count_edges(struct ts_graph *graphs, size_t n, const struct ts_edge_options *options, int num_threads)
{
    struct graph_job job = {.graphs = graphs, .options = options};
    if (!is_pair_of_dtypes(options->in, options->out))
        return TS_ERR_DTYPE;
    set_rule(&job);
    ts_parallel_for(n, 4, num_threads, count_range, &job);
    return get_status(&job.outcome);
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
    else if (in == TS_F16)
        ts_f16_to_f32((const uint16_t *)stage->weights, (float *)stage->weights_dst, n);
    else
        ts_bf16_to_f32((const uint16_t *)stage->weights, (float *)stage->weights_dst, n);
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
    TS_KERNEL(add_offset)(index + head, lines, first, lane->dst);
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
        if (itemsize == 2) {
            uint16_t *out = (uint16_t *)stage->weights + stage->num_weights;
            for (size_t k = 0; k < n; e += keep[k++]) {
                source[e] = graph->first_node + column[k];
                target[e] = graph->first_node + row[k];
                out[e] = ((const uint16_t *)weights)[k];
            }
        } else {
            uint32_t *out = (uint32_t *)stage->weights + stage->num_weights;
            for (size_t k = 0; k < n; e += keep[k++]) {
                source[e] = graph->first_node + column[k];
                target[e] = graph->first_node + row[k];
                out[e] = ((const uint32_t *)weights)[k];
            }
        }
        stage->source.n += kept;
        stage->target.n += kept;
    }
    stage->num_weights += kept;
    if (stage->num_weights >= STAGE)
        flush(job, stage, 0);
    return TS_OK;
}

/* Set range->keep for a whole graph by a top-k rule. Returns the number of kept pairs or an error code. */
static int64_t select_top_k(struct range *range, const struct ts_graph *graph)
{
    const struct graph_job *job = range->job;
    size_t pairs = ts_num_pairs(graph);
    if (reserve(range, pairs) != TS_OK)
        return TS_ERR_NOMEM;
    if (job->options->in == TS_F32)
        memcpy(range->values, graph->weights, pairs * sizeof *range->values);
    else if (job->options->in == TS_F16)
        ts_f16_to_f32((const uint16_t *)graph->weights, range->values, pairs);
    else
        ts_bf16_to_f32((const uint16_t *)graph->weights, range->values, pairs);
    return ts_select_pairs(range->values, pairs, job->options->rule, range->keep, range->values + pairs);
}

static int fill_graph(struct range *range, const struct ts_graph *graph, struct stage *stage)
{
    const struct graph_job *job = range->job;
    size_t pairs = ts_num_pairs(graph);
    unsigned char block[BLOCK], *selected = NULL;
    int64_t total = 0;
    if (job->options->rule.top_k_fraction > 0 && pairs > 0 && graph->pairs == NULL) {
        int64_t kept = select_top_k(range, graph);
        if (kept < 0)
            return (int)kept;
        selected = range->keep;
    }
    for (size_t p = 0; p < pairs; p += BLOCK) {
        size_t n = pairs - p < BLOCK ? pairs - p : BLOCK, kept = 0;
        const unsigned char *keep = block;
        if (graph->pairs != NULL) {
            kept = n;
        } else if (selected == NULL) {
            kept = select_block(job, graph->weights, p, n, block);
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

static int fill_graphs(void *context)
{
    struct range *range = context;
    struct graph_job *job = range->job;
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

static void fill_range(void *context, size_t begin, size_t end)
{
    struct graph_job *job = context;
    run_range(fill_graphs, job, begin, end, &job->outcome);
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
    struct graph_job job = {.graphs = (struct ts_graph *)graphs, .options = options,
                            .source = source, .target = target, .weight = weight};
    if (!is_pair_of_dtypes(options->in, options->out))
        return TS_ERR_DTYPE;
    set_rule(&job);
    int32_t *table = make_table(&job, n);
    if (table == NULL)
        return TS_ERR_NOMEM;
    /* A few long ranges per thread, so that few cache lines are shared by two ranges. */
    size_t grain = num_threads < 2 ? n : n / (8 * (size_t)num_threads) + 1;
    ts_parallel_for(n, grain, num_threads, fill_range, &job);
    free(table);
    return get_status(&job.outcome);
}

static int pack_graphs(void *context)
{
    struct range *range = context;
    struct graph_job *job = range->job;
    enum ts_dtype in = job->options->in, out = job->options->out;
    for (size_t g = range->begin; g < range->end; g++) {
        size_t pairs = ts_num_pairs(&job->graphs[g]);
        unsigned char *dst = job->weight + job->starts[g] * ts_dtype_bytes(out);
        if (job->graphs[g].weights != dst)
            copy_items(dst, job->graphs[g].weights, pairs, in, out);
        if (!(job->options->rule.top_k_fraction > 0) || pairs == 0)
            continue;
        int64_t kept = select_top_k(range, &job->graphs[g]);
        if (kept < 0)
            return (int)kept;
        for (size_t p = 0; p < pairs; p++)
            if (!range->keep[p]) {
                if (out == TS_F32)
                    ((float *)dst)[p] = NAN;
                else
                    ((uint16_t *)dst)[p] = out == TS_BF16 ? 0x7fc0u : 0x7e00u;
            }
    }
    return TS_OK;
}

static void pack_range(void *context, size_t begin, size_t end)
{
    struct graph_job *job = context;
    run_range(pack_graphs, job, begin, end, &job->outcome);
}

int ts_pack_graphs(const struct ts_graph *graphs, size_t n, const struct ts_edge_options *options, int num_threads,
                   unsigned char *out)
{
    struct graph_job job = {.graphs = (struct ts_graph *)graphs, .options = options, .weight = out};
    if (!is_pair_of_dtypes(options->in, options->out))
        return TS_ERR_DTYPE;
    size_t *starts = pair_starts(graphs, n);
    if (starts == NULL)
        return TS_ERR_NOMEM;
    job.starts = starts;
    ts_parallel_for(n, 4, num_threads, pack_range, &job);
    free(starts);
    return get_status(&job.outcome);
}
