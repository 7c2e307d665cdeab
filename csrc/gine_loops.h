/* Inner loops of gine_kernels.h for one scalar type and instruction set. gine_kernels.h includes this
 * file once for each pair and defines
 *   REAL          float or double
 *   VECTOR_BYTES  size of a register; four registers of columns are processed at a time
 *   TARGET        the function attribute that enables the instruction set
 *   VARIANT(stem) the name of `stem` for the pair
 *   FMA(a, b, c)  a b + c, rounded once
 *   RELU(m), MASK_POSITIVE(m, v)   optional: max(m, 0), and v where m > 0, else 0; NaN is not positive
 * The four accumulators are separate variables, because compilers keep an array in memory. */

typedef REAL VARIANT(vector) __attribute__((vector_size(VECTOR_BYTES)));
/* A vector in the caller's memory, which has another alignment and other types. */
typedef REAL VARIANT(stored) __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

#define VECTOR VARIANT(vector)
#define LOAD(p, k) (((const VARIANT(stored) *)(p))[k])
#define STORE(p, k) (((VARIANT(stored) *)(p))[k])
/* A vector of equal values; the subtraction keeps the sign of a zero. */
#define BROADCAST(value) ((value) - (VECTOR){0})
#define LANES (VECTOR_BYTES / sizeof(REAL))
#define COLUMNS (4 * LANES)
#ifndef MASK_POSITIVE
#define MASK_POSITIVE(m, v) ((VECTOR)((m > 0) & (__typeof__(m > 0))(v)))
#endif
#ifndef RELU
#define RELU(m) MASK_POSITIVE(m, m)
#endif

/* Load columns first .. first + width of row s of x, plus b unless it is NULL, zero-padded to COLUMNS. */
TARGET static void VARIANT(load_row)(
    const struct ts_gine *g, size_t s, const REAL *b, size_t first, size_t width, REAL *row)
{
    size_t start = s * g->dim + first;
    float narrow[COLUMNS];
    if (g->x_dtype == TS_F64) {
        for (size_t c = 0; c < width; c++)
            row[c] = (REAL)((const double *)g->x)[start + c];
    } else {
        const float *values = narrow;
        if (g->x_dtype == TS_F32)
            values = (const float *)g->x + start;
        else
            ts_to_f32((const uint16_t *)g->x + start, g->x_dtype, narrow, width);
        for (size_t c = 0; c < width; c++)
            row[c] = (REAL)values[c];
    }
    for (size_t c = 0; b != NULL && c < width; c++)
        row[c] += b[first + c];
    for (size_t c = width; c < COLUMNS; c++)
        row[c] = 0;
}

TARGET static void VARIANT(forward)(
    const struct NAME(graph) *graph, const REAL *w, const REAL *b, REAL *xb, REAL *out)
{
    size_t D = graph->g->dim;
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        REAL wb[COLUMNS] = {0}, own[COLUMNS];
        memcpy(wb, w + first, width * sizeof *w);
        VECTOR w0 = LOAD(wb, 0), w1 = LOAD(wb, 1), w2 = LOAD(wb, 2), w3 = LOAD(wb, 3);
        for (size_t s = 0; s < graph->S; s++)
            VARIANT(load_row)(graph->g, graph->first_row + s, b, first, width, xb + s * COLUMNS);
        for (size_t i = 0; i < graph->S; i++) {
            VECTOR s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            for (size_t e = graph->ptr[i]; e < graph->ptr[i + 1]; e++) {
                const REAL *xj = xb + (size_t)graph->index[e] * COLUMNS;
                VECTOR weight = BROADCAST(graph->value[e]);
                VECTOR m0 = FMA(weight, w0, LOAD(xj, 0)), m1 = FMA(weight, w1, LOAD(xj, 1));
                VECTOR m2 = FMA(weight, w2, LOAD(xj, 2)), m3 = FMA(weight, w3, LOAD(xj, 3));
                s0 += RELU(m0), s1 += RELU(m1), s2 += RELU(m2), s3 += RELU(m3);
            }
            const VECTOR sums[4] = {s0, s1, s2, s3};
            const REAL *sum = (const REAL *)sums;
            VARIANT(load_row)(graph->g, graph->first_row + i, NULL, first, width, own);
            for (size_t c = 0; c < width; c++)
                out[i * D + first + c] = own[c] + sum[c];
        }
    }
}

TARGET static void VARIANT(backward)(
    const struct NAME(graph) *graph, const REAL *w, const REAL *b, REAL *gb, const REAL *grad_out, REAL *grad_x,
    REAL *grad_w, REAL *grad_b)
{
    size_t D = graph->g->dim;
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        REAL wb[COLUMNS] = {0}, sum_b[COLUMNS] = {0}, xj[COLUMNS];
        memcpy(wb, w + first, width * sizeof *w);
        VECTOR w0 = LOAD(wb, 0), w1 = LOAD(wb, 1), w2 = LOAD(wb, 2), w3 = LOAD(wb, 3);
        VECTOR a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0};
        for (size_t s = 0; s < graph->S; s++)
            for (size_t c = 0; c < COLUMNS; c++)
                gb[s * COLUMNS + c] = c < width ? grad_out[s * D + first + c] : 0;
        for (size_t j = 0; j < graph->S; j++) {
            VECTOR s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            VARIANT(load_row)(graph->g, graph->first_row + j, b, first, width, xj);
            VECTOR x0 = LOAD(xj, 0), x1 = LOAD(xj, 1), x2 = LOAD(xj, 2), x3 = LOAD(xj, 3);
            for (size_t e = graph->ptr[j]; e < graph->ptr[j + 1]; e++) {
                const REAL *gi = gb + (size_t)graph->index[e] * COLUMNS;
                VECTOR weight = BROADCAST(graph->value[e]);
                VECTOR m0 = FMA(weight, w0, x0), m1 = FMA(weight, w1, x1);
                VECTOR m2 = FMA(weight, w2, x2), m3 = FMA(weight, w3, x3);
                VECTOR t0 = MASK_POSITIVE(m0, LOAD(gi, 0)), t1 = MASK_POSITIVE(m1, LOAD(gi, 1));
                VECTOR t2 = MASK_POSITIVE(m2, LOAD(gi, 2)), t3 = MASK_POSITIVE(m3, LOAD(gi, 3));
                s0 += t0, s1 += t1, s2 += t2, s3 += t3;
                a0 = FMA(weight, t0, a0), a1 = FMA(weight, t1, a1);
                a2 = FMA(weight, t2, a2), a3 = FMA(weight, t3, a3);
            }
            const VECTOR sums[4] = {s0, s1, s2, s3};
            const REAL *sum = (const REAL *)sums;
            for (size_t c = 0; c < COLUMNS; c++)
                sum_b[c] += sum[c];
            if (grad_x != NULL)
                for (size_t c = 0; c < width; c++)
                    grad_x[j * D + first + c] = gb[j * COLUMNS + c] + sum[c];
        }
        const VECTOR sums[4] = {a0, a1, a2, a3};
        memcpy(grad_w + first, sums, width * sizeof *grad_w);
        memcpy(grad_b + first, sum_b, width * sizeof *grad_b);
    }
}

/* Write the edges of target i to rows->index and rows->value. Returns their number. */
TARGET static size_t VARIANT(row_edges)(const struct NAME(rows) *rows, size_t i)
{
    const struct ts_gine *g = rows->g;
    size_t S = rows->S, C = g->num_channels, kept = 0;
    for (size_t c = 0; c < C; c++) {
        REAL *value = rows->value + c * S;
        load_weights(g, rows->first_weight + c * (S * (S + 1) / 2) + i * (i + 1) / 2, i + 1, rows->single);
        for (size_t j = 0; j <= i; j++) {
            rows->sum[j] = rows->single[j] + (c ? rows->sum[j] : 0);
            value[j] = (REAL)rows->single[j];
        }
    }
    for (size_t j = 0; j <= i; j++) {
        rows->index[kept] = (uint32_t)j;
        kept += rows->sum[j] / (double)C > g->threshold;
    }
    for (size_t c = 0; kept <= i && c < C; c++)
        for (size_t e = 0; e < kept; e++)
            rows->value[c * S + e] = rows->value[c * S + rows->index[e]];
    return kept;
}

struct VARIANT(block) {
    VECTOR a, b, c, d;
};

/* Return x_j + b + sum over channels of w a, before the ReLU. `value` is the weight of the edge in channel 0. */
TARGET static inline __attribute__((always_inline)) struct VARIANT(block)
VARIANT(message)(const REAL *xb, const REAL *w, const REAL *value, size_t S, size_t C)
{
    struct VARIANT(block) m = {LOAD(xb, 0), LOAD(xb, 1), LOAD(xb, 2), LOAD(xb, 3)};
    for (size_t c = 0; c < C; c++) {
        const REAL *wc = w + c * COLUMNS;
        VECTOR weight = BROADCAST(value[c * S]);
        m.a = FMA(weight, LOAD(wc, 0), m.a), m.b = FMA(weight, LOAD(wc, 1), m.b);
        m.c = FMA(weight, LOAD(wc, 2), m.c), m.d = FMA(weight, LOAD(wc, 3), m.d);
    }
    return m;
}

TARGET static void VARIANT(load_columns)(const struct ts_gine *g, const REAL *w, size_t first, size_t width, REAL *out)
{
    for (size_t c = 0; c < g->num_channels; c++)
        for (size_t k = 0; k < COLUMNS; k++)
            out[c * COLUMNS + k] = k < width ? w[c * g->dim + first + k] : 0;
}

/* Buffers: block (S, COLUMNS), columns (C, COLUMNS). */
TARGET static void VARIANT(forward_channels)(
    const struct NAME(rows) *rows, const REAL *w, const REAL *b, REAL *block, REAL *columns, REAL *out)
{
    const struct ts_gine *g = rows->g;
    size_t D = g->dim, S = rows->S, C = g->num_channels;
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        REAL own[COLUMNS];
        VARIANT(load_columns)(g, w, first, width, columns);
        for (size_t s = 0; s < S; s++)
            VARIANT(load_row)(g, rows->first_row + s, b, first, width, block + s * COLUMNS);
        for (size_t i = 0; i < S; i++) {
            size_t n = VARIANT(row_edges)(rows, i);
            VECTOR s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            for (size_t e = 0; e < n; e++) {
                struct VARIANT(block) m =
                    VARIANT(message)(block + (size_t)rows->index[e] * COLUMNS, columns, rows->value + e, S, C);
                s0 += RELU(m.a), s1 += RELU(m.b), s2 += RELU(m.c), s3 += RELU(m.d);
            }
            const VECTOR sums[4] = {s0, s1, s2, s3};
            const REAL *sum = (const REAL *)sums;
            VARIANT(load_row)(g, rows->first_row + i, NULL, first, width, own);
            for (size_t c = 0; c < width; c++)
                out[i * D + first + c] = own[c] + sum[c];
        }
    }
}

/* Process targets in stored order: for each, first the gradients that pass the ReLU, then its
 * contribution to grad_w. Buffers: block (3 S, COLUMNS), columns (2 C, COLUMNS). */
TARGET static void VARIANT(backward_channels)(
    const struct NAME(rows) *rows, const REAL *w, const REAL *b, REAL *block, REAL *columns, const REAL *grad_out,
    REAL *grad_x, REAL *grad_w, REAL *grad_b)
{
    const struct ts_gine *g = rows->g;
    size_t D = g->dim, S = rows->S, C = g->num_channels;
    REAL *sum_x = block + S * COLUMNS, *passed = sum_x + S * COLUMNS, *sum_w = columns + C * COLUMNS;
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        VECTOR b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
        VARIANT(load_columns)(g, w, first, width, columns);
        memset(sum_w, 0, C * COLUMNS * sizeof *sum_w);
        memset(sum_x, 0, S * COLUMNS * sizeof *sum_x);
        for (size_t s = 0; s < S; s++)
            VARIANT(load_row)(g, rows->first_row + s, b, first, width, block + s * COLUMNS);
        for (size_t i = 0; i < S; i++) {
            size_t n = VARIANT(row_edges)(rows, i);
            REAL grad[COLUMNS];
            for (size_t c = 0; c < COLUMNS; c++)
                grad[c] = c < width ? grad_out[i * D + first + c] : 0;
            VECTOR g0 = LOAD(grad, 0), g1 = LOAD(grad, 1), g2 = LOAD(grad, 2), g3 = LOAD(grad, 3);
            for (size_t e = 0; e < n; e++) {
                size_t offset = (size_t)rows->index[e] * COLUMNS;
                REAL *x = sum_x + offset, *t = passed + e * COLUMNS;
                struct VARIANT(block) m = VARIANT(message)(block + offset, columns, rows->value + e, S, C);
                VECTOR t0 = MASK_POSITIVE(m.a, g0), t1 = MASK_POSITIVE(m.b, g1), t2 = MASK_POSITIVE(m.c, g2), t3 = MASK_POSITIVE(m.d, g3);
                STORE(t, 0) = t0, STORE(t, 1) = t1, STORE(t, 2) = t2, STORE(t, 3) = t3;
                STORE(x, 0) += t0, STORE(x, 1) += t1, STORE(x, 2) += t2, STORE(x, 3) += t3;
                b0 += t0, b1 += t1, b2 += t2, b3 += t3;
            }
            for (size_t c = 0; c < C; c++) {
                REAL *sum = sum_w + c * COLUMNS;
                const REAL *value = rows->value + c * S;
                VECTOR a0 = LOAD(sum, 0), a1 = LOAD(sum, 1), a2 = LOAD(sum, 2), a3 = LOAD(sum, 3);
                for (size_t e = 0; e < n; e++) {
                    const REAL *t = passed + e * COLUMNS;
                    VECTOR weight = BROADCAST(value[e]);
                    a0 = FMA(weight, LOAD(t, 0), a0), a1 = FMA(weight, LOAD(t, 1), a1);
                    a2 = FMA(weight, LOAD(t, 2), a2), a3 = FMA(weight, LOAD(t, 3), a3);
                }
                STORE(sum, 0) = a0, STORE(sum, 1) = a1, STORE(sum, 2) = a2, STORE(sum, 3) = a3;
            }
        }
        const VECTOR sums[4] = {b0, b1, b2, b3};
        memcpy(grad_b + first, sums, width * sizeof *grad_b);
        for (size_t c = 0; c < C; c++)
            memcpy(grad_w + c * D + first, sum_w + c * COLUMNS, width * sizeof *grad_w);
        for (size_t j = 0; grad_x != NULL && j < S; j++)
            for (size_t c = 0; c < width; c++)
                grad_x[j * D + first + c] = grad_out[j * D + first + c] + sum_x[j * COLUMNS + c];
    }
}

static const struct NAME(kernels) VARIANT(gine) = {
    VARIANT(forward), VARIANT(backward), VARIANT(forward_channels), VARIANT(backward_channels)};

#undef VECTOR
#undef LOAD
#undef STORE
#undef BROADCAST
#undef LANES
#undef COLUMNS
#undef TARGET
#undef VECTOR_BYTES
#undef VARIANT
#undef FMA
#undef RELU
#undef MASK_POSITIVE
