/* The inner loops of gine.c for one scalar type, included once a type with
 *   REAL         float or double
 *   NAME(stem)   the type's name for `stem`
 * The bodies are always_inline, so that each wrapper compiles them anew for its
 * own instruction set. */

/* Columns handled at a time: x of a whole graph then stays in the L1/L2 cache
 * and one row's accumulators stay in registers. */
#define COLUMNS 64

/* xb[s][c] = x[s][first + c] + b[first + c], zero padded to COLUMNS. */
static inline __attribute__((always_inline)) void NAME(load_block)(
    const REAL *x, const REAL *b, size_t S, size_t D, size_t first, size_t width, REAL *xb)
{
    for (size_t s = 0; s < S; s++)
        for (size_t c = 0; c < COLUMNS; c++)
            xb[s * COLUMNS + c] = c < width ? x[s * D + first + c] + b[first + c] : 0;
}

static inline __attribute__((always_inline)) void NAME(dense_forward_body)(
    const REAL *x, const REAL *w, const REAL *b, const REAL *a, REAL threshold, size_t S, size_t D, REAL *xb, REAL *out)
{
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        REAL wb[COLUMNS] = {0};
        memcpy(wb, w + first, width * sizeof *w);
        NAME(load_block)(x, b, S, D, first, width, xb);
        const REAL *row = a;
        for (size_t i = 0; i < S; i++) {
            REAL sum[COLUMNS] = {0};
            for (size_t j = 0; j <= i; j++) {
                REAL weight = row[j];
                if (!(weight > threshold))
                    continue;
                const REAL *xj = xb + j * COLUMNS;
                for (size_t c = 0; c < COLUMNS; c++) {
                    REAL message = xj[c] + weight * wb[c];
                    sum[c] += message > 0 ? message : 0;
                }
            }
            row += i + 1;
            for (size_t c = 0; c < width; c++)
                out[i * D + first + c] = x[i * D + first + c] + sum[c];
        }
    }
}

static inline __attribute__((always_inline)) void NAME(dense_backward_body)(
    const REAL *x, const REAL *w, const REAL *b, const REAL *a, REAL threshold, size_t S, size_t D, REAL *xb, REAL *gb,
    const REAL *grad_out, REAL *grad_x, REAL *grad_w, REAL *grad_b)
{
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        REAL wb[COLUMNS] = {0}, sum_w[COLUMNS] = {0}, sum_b[COLUMNS] = {0};
        memcpy(wb, w + first, width * sizeof *w);
        NAME(load_block)(x, b, S, D, first, width, xb);
        for (size_t s = 0; s < S; s++)
            for (size_t c = 0; c < COLUMNS; c++)
                gb[s * COLUMNS + c] = c < width ? grad_out[s * D + first + c] : 0;
        for (size_t j = 0; j < S; j++) {
            REAL sum[COLUMNS] = {0};
            const REAL *xj = xb + j * COLUMNS;
            for (size_t i = j; i < S; i++) {
                REAL weight = a[i * (i + 1) / 2 + j];
                if (!(weight > threshold))
                    continue;
                const REAL *gi = gb + i * COLUMNS;
                for (size_t c = 0; c < COLUMNS; c++) {
                    REAL through = xj[c] + weight * wb[c] > 0 ? gi[c] : 0;
                    sum[c] += through;
                    sum_w[c] += weight * through;
                }
            }
            for (size_t c = 0; c < COLUMNS; c++)
                sum_b[c] += sum[c];
            if (grad_x != NULL)
                for (size_t c = 0; c < width; c++)
                    grad_x[j * D + first + c] = gb[j * COLUMNS + c] + sum[c];
        }
        for (size_t c = 0; c < width; c++) {
            grad_w[first + c] += sum_w[c];
            grad_b[first + c] += sum_b[c];
        }
    }
}

/* Sparse edges: source and target are numbers in the batch, `base` the graph's first node. */
static inline __attribute__((always_inline)) void NAME(sparse_forward_body)(
    const REAL *x, const REAL *w, const REAL *b, const REAL *a, const int64_t *source, const int64_t *target,
    int64_t base, size_t E, size_t S, size_t D, REAL *out)
{
    memcpy(out, x, S * D * sizeof *x);
    for (size_t e = 0; e < E; e++) {
        const REAL *xj = x + (size_t)(source[e] - base) * D;
        REAL *oi = out + (size_t)(target[e] - base) * D;
        for (size_t c = 0; c < D; c++) {
            REAL message = xj[c] + b[c] + a[e] * w[c];
            oi[c] += message > 0 ? message : 0;
        }
    }
}

static inline __attribute__((always_inline)) void NAME(sparse_backward_body)(
    const REAL *x, const REAL *w, const REAL *b, const REAL *a, const int64_t *source, const int64_t *target,
    int64_t base, size_t E, size_t S, size_t D, const REAL *grad_out, REAL *grad_x, REAL *grad_w, REAL *grad_b)
{
    if (grad_x != NULL)
        memcpy(grad_x, grad_out, S * D * sizeof *x);
    for (size_t e = 0; e < E; e++) {
        size_t j = (size_t)(source[e] - base), i = (size_t)(target[e] - base);
        for (size_t c = 0; c < D; c++) {
            REAL through = x[j * D + c] + b[c] + a[e] * w[c] > 0 ? grad_out[i * D + c] : 0;
            if (grad_x != NULL)
                grad_x[j * D + c] += through;
            grad_w[c] += a[e] * through;
            grad_b[c] += through;
        }
    }
}

/* One wrapper an instruction set; the best that the processor has is chosen at
 * run time. The list of targets is gine.c's. */
#define WRAP(SUFFIX, TARGET) \
    TARGET static void NAME(dense_forward##SUFFIX)(const REAL *x, const REAL *w, const REAL *b, const REAL *a, \
        REAL t, size_t S, size_t D, REAL *xb, REAL *out) \
    { NAME(dense_forward_body)(x, w, b, a, t, S, D, xb, out); } \
    TARGET static void NAME(dense_backward##SUFFIX)(const REAL *x, const REAL *w, const REAL *b, const REAL *a, \
        REAL t, size_t S, size_t D, REAL *xb, REAL *gb, const REAL *go, REAL *gx, REAL *gw, REAL *gbias) \
    { NAME(dense_backward_body)(x, w, b, a, t, S, D, xb, gb, go, gx, gw, gbias); } \
    TARGET static void NAME(sparse_forward##SUFFIX)(const REAL *x, const REAL *w, const REAL *b, const REAL *a, \
        const int64_t *src, const int64_t *dst, int64_t base, size_t E, size_t S, size_t D, REAL *out) \
    { NAME(sparse_forward_body)(x, w, b, a, src, dst, base, E, S, D, out); } \
    TARGET static void NAME(sparse_backward##SUFFIX)(const REAL *x, const REAL *w, const REAL *b, const REAL *a, \
        const int64_t *src, const int64_t *dst, int64_t base, size_t E, size_t S, size_t D, \
        const REAL *go, REAL *gx, REAL *gw, REAL *gbias) \
    { NAME(sparse_backward_body)(x, w, b, a, src, dst, base, E, S, D, go, gx, gw, gbias); }

FOR_EACH_TARGET(WRAP)

struct NAME(job) {
    const struct ts_gine *g;
    const REAL *x, *w, *b, *grad_out;
    REAL *out, *grad_x, *workspace;
    int status;
};

static void NAME(load_weights)(const struct ts_gine *g, int64_t first, size_t n, float *narrow, REAL *a)
{
    if (g->weight_dtype == TS_F64) {
        for (size_t k = 0; k < n; k++)
            a[k] = (REAL)((const double *)g->weights)[first + (int64_t)k];
        return;
    }
    if (g->weight_dtype == TS_F16)
        ts_f16_to_f32((const uint16_t *)g->weights + first, narrow, n);
    else if (g->weight_dtype == TS_BF16)
        ts_bf16_to_f32((const uint16_t *)g->weights + first, narrow, n);
    else
        memcpy(narrow, (const float *)g->weights + first, n * sizeof *narrow);
    for (size_t k = 0; k < n; k++)
        a[k] = (REAL)narrow[k];
}

static void NAME(range)(void *context, size_t begin, size_t end)
{
    struct NAME(job) *job = context;
    const struct ts_gine *g = job->g;
    size_t D = g->dim, max_tokens = 1, max_weights = 1;
    for (size_t k = begin; k < end; k++) {
        size_t S = (size_t)(g->node_ptr[k + 1] - g->node_ptr[k]);
        size_t n = g->source ? (size_t)(g->weight_ptr[k + 1] - g->weight_ptr[k]) : S * (S + 1) / 2;
        max_tokens = S > max_tokens ? S : max_tokens;
        max_weights = n > max_weights ? n : max_weights;
    }
    REAL *a = malloc(max_weights * sizeof *a), *xb = malloc(2 * max_tokens * COLUMNS * sizeof *xb);
    float *narrow = malloc(max_weights * sizeof *narrow);
    if (a == NULL || xb == NULL || narrow == NULL) {
        __atomic_store_n(&job->status, TS_ERR_NOMEM, __ATOMIC_RELAXED);
        goto out;
    }
    REAL *gb = xb + max_tokens * COLUMNS;
    REAL *grad_w = job->workspace, *grad_b = NULL;
    if (grad_w != NULL) {
        grad_w += begin / GRAPHS_A_CHUNK * 2 * D;
        grad_b = grad_w + D;
        memset(grad_w, 0, 2 * D * sizeof *grad_w);
    }
    int level = simd_level();
    for (size_t k = begin; k < end; k++) {
        int64_t base = g->node_ptr[k], first = g->weight_ptr[k];
        size_t S = (size_t)(g->node_ptr[k + 1] - base);
        size_t n = g->source ? (size_t)(g->weight_ptr[k + 1] - first) : S * (S + 1) / 2;
        const REAL *x = job->x + (size_t)base * D;
        NAME(load_weights)(g, first, n, narrow, a);
        if (job->out != NULL && g->source == NULL)
            PICK(level, dense_forward, (x, job->w, job->b, a, (REAL)g->threshold, S, D, xb, job->out + (size_t)base * D));
        else if (job->out != NULL)
            PICK(level, sparse_forward, (x, job->w, job->b, a, g->source + first, g->target + first, base, n, S, D,
                 job->out + (size_t)base * D));
        else if (g->source == NULL)
            PICK(level, dense_backward, (x, job->w, job->b, a, (REAL)g->threshold, S, D, xb, gb,
                 job->grad_out + (size_t)base * D, job->grad_x ? job->grad_x + (size_t)base * D : NULL, grad_w, grad_b));
        else
            PICK(level, sparse_backward, (x, job->w, job->b, a, g->source + first, g->target + first, base, n, S, D,
                 job->grad_out + (size_t)base * D, job->grad_x ? job->grad_x + (size_t)base * D : NULL, grad_w, grad_b));
    }
out:
    free(a);
    free(xb);
    free(narrow);
}

int NAME(ts_gine_forward)(const struct ts_gine *g, const REAL *x, const REAL *w, const REAL *b, REAL *out)
{
    struct NAME(job) job = {g, x, w, b, NULL, out, NULL, NULL, TS_OK};
    ts_parallel_for(g->num_graphs, GRAPHS_A_CHUNK, g->num_threads, NAME(range), &job);
    return job.status;
}

int NAME(ts_gine_backward)(const struct ts_gine *g, const REAL *x, const REAL *w, const REAL *b, const REAL *grad_out,
                           REAL *grad_x, REAL *grad_w, REAL *grad_b, REAL *workspace)
{
    struct NAME(job) job = {g, x, w, b, grad_out, NULL, grad_x, workspace, TS_OK};
    ts_parallel_for(g->num_graphs, GRAPHS_A_CHUNK, g->num_threads, NAME(range), &job);
    memset(grad_w, 0, g->dim * sizeof *grad_w);
    memset(grad_b, 0, g->dim * sizeof *grad_b);
    for (size_t chunk = 0; job.status == TS_OK && chunk < ts_gine_chunks(g->num_graphs); chunk++)
        for (size_t c = 0; c < g->dim; c++) {
            grad_w[c] += workspace[chunk * 2 * g->dim + c];
            grad_b[c] += workspace[chunk * 2 * g->dim + g->dim + c];
        }
    return job.status;
}

#undef COLUMNS
#undef WRAP
