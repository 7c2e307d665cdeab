/* The inner loops of gine_kernels.h for one scalar type and instruction set, included once for each with
 *   REAL          float or double
 *   VECTOR_BYTES  of the registers; 4 of them are the columns worked on at a time
 *   TARGET        the attribute that allows the instruction set
 *   LOOP(stem)    the name for `stem`
 *   FMA(a, b, c)  a b + c, rounded once
 *   RELU(m), PASS(m, v)   optional: max(m, 0), and v where m > 0, else 0; a NaN is not above 0
 * Four accumulators of their own: an array of them would be kept in memory. */

typedef REAL LOOP(vector) __attribute__((vector_size(VECTOR_BYTES)));
/* In memory of a caller's, that has another alignment and other types. */
typedef REAL LOOP(stored) __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

#define V LOOP(vector)
#define AT(p, k) (((const LOOP(stored) *)(p))[k])
#define PUT(p, k) (((LOOP(stored) *)(p))[k])
/* A vector of one value; subtracting keeps the sign of a zero. */
#define SPREAD(value) ((value) - (V){0})
#define LANES (VECTOR_BYTES / sizeof(REAL))
#define COLUMNS (4 * LANES)
#ifndef PASS
#define PASS(m, v) ((V)((m > 0) & (__typeof__(m > 0))(v)))
#define RELU(m) PASS(m, m)
#endif

/* Columns first .. first + width of row s of x, plus b if it is given; zero padded to COLUMNS. */
TARGET static void LOOP(load_row)(
    const struct ts_gine *g, size_t s, const REAL *b, size_t first, size_t width, REAL *row)
{
    size_t at = s * g->dim + first;
    float narrow[COLUMNS];
    if (g->x_dtype == TS_F64) {
        for (size_t c = 0; c < width; c++)
            row[c] = (REAL)((const double *)g->x)[at + c];
    } else {
        const float *values = narrow;
        if (g->x_dtype == TS_F16)
            ts_f16_to_f32((const uint16_t *)g->x + at, narrow, width);
        else if (g->x_dtype == TS_BF16)
            ts_bf16_to_f32((const uint16_t *)g->x + at, narrow, width);
        else
            values = (const float *)g->x + at;
        for (size_t c = 0; c < width; c++)
            row[c] = (REAL)values[c];
    }
    for (size_t c = 0; b != NULL && c < width; c++)
        row[c] += b[first + c];
    for (size_t c = width; c < COLUMNS; c++)
        row[c] = 0;
}

TARGET static void LOOP(forward)(
    const struct NAME(graph) *graph, const REAL *w, const REAL *b, REAL *xb, REAL *out)
{
    size_t D = graph->g->dim;
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        REAL wb[COLUMNS] = {0}, own[COLUMNS];
        memcpy(wb, w + first, width * sizeof *w);
        V w0 = AT(wb, 0), w1 = AT(wb, 1), w2 = AT(wb, 2), w3 = AT(wb, 3);
        for (size_t s = 0; s < graph->S; s++)
            LOOP(load_row)(graph->g, graph->first_row + s, b, first, width, xb + s * COLUMNS);
        for (size_t i = 0; i < graph->S; i++) {
            V s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            for (size_t e = graph->ptr[i]; e < graph->ptr[i + 1]; e++) {
                const REAL *xj = xb + (size_t)graph->index[e] * COLUMNS;
                V weight = SPREAD(graph->value[e]);
                V m0 = FMA(weight, w0, AT(xj, 0)), m1 = FMA(weight, w1, AT(xj, 1));
                V m2 = FMA(weight, w2, AT(xj, 2)), m3 = FMA(weight, w3, AT(xj, 3));
                s0 += RELU(m0), s1 += RELU(m1), s2 += RELU(m2), s3 += RELU(m3);
            }
            const V sums[4] = {s0, s1, s2, s3};
            const REAL *sum = (const REAL *)sums;
            LOOP(load_row)(graph->g, graph->first_row + i, NULL, first, width, own);
            for (size_t c = 0; c < width; c++)
                out[i * D + first + c] = own[c] + sum[c];
        }
    }
}

TARGET static void LOOP(backward)(
    const struct NAME(graph) *graph, const REAL *w, const REAL *b, REAL *gb, const REAL *grad_out, REAL *grad_x,
    REAL *grad_w, REAL *grad_b)
{
    size_t D = graph->g->dim;
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        REAL wb[COLUMNS] = {0}, sum_b[COLUMNS] = {0}, xj[COLUMNS];
        memcpy(wb, w + first, width * sizeof *w);
        V w0 = AT(wb, 0), w1 = AT(wb, 1), w2 = AT(wb, 2), w3 = AT(wb, 3);
        V a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0};
        for (size_t s = 0; s < graph->S; s++)
            for (size_t c = 0; c < COLUMNS; c++)
                gb[s * COLUMNS + c] = c < width ? grad_out[s * D + first + c] : 0;
        for (size_t j = 0; j < graph->S; j++) {
            V s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            LOOP(load_row)(graph->g, graph->first_row + j, b, first, width, xj);
            V x0 = AT(xj, 0), x1 = AT(xj, 1), x2 = AT(xj, 2), x3 = AT(xj, 3);
            for (size_t e = graph->ptr[j]; e < graph->ptr[j + 1]; e++) {
                const REAL *gi = gb + (size_t)graph->index[e] * COLUMNS;
                V weight = SPREAD(graph->value[e]);
                V m0 = FMA(weight, w0, x0), m1 = FMA(weight, w1, x1);
                V m2 = FMA(weight, w2, x2), m3 = FMA(weight, w3, x3);
                V t0 = PASS(m0, AT(gi, 0)), t1 = PASS(m1, AT(gi, 1));
                V t2 = PASS(m2, AT(gi, 2)), t3 = PASS(m3, AT(gi, 3));
                s0 += t0, s1 += t1, s2 += t2, s3 += t3;
                a0 = FMA(weight, t0, a0), a1 = FMA(weight, t1, a1);
                a2 = FMA(weight, t2, a2), a3 = FMA(weight, t3, a3);
            }
            const V sums[4] = {s0, s1, s2, s3};
            const REAL *sum = (const REAL *)sums;
            for (size_t c = 0; c < COLUMNS; c++)
                sum_b[c] += sum[c];
            if (grad_x != NULL)
                for (size_t c = 0; c < width; c++)
                    grad_x[j * D + first + c] = gb[j * COLUMNS + c] + sum[c];
        }
        const V sums[4] = {a0, a1, a2, a3};
        memcpy(grad_w + first, sums, width * sizeof *grad_w);
        memcpy(grad_b + first, sum_b, width * sizeof *grad_b);
    }
}

/* The edges of target i into rows->index and rows->value. -> how many. */
TARGET static size_t LOOP(row_edges)(const struct NAME(rows) *rows, size_t i)
{
    const struct ts_gine *g = rows->g;
    size_t S = rows->S, C = g->num_channels, kept = 0;
    for (size_t c = 0; c < C; c++) {
        REAL *value = rows->value + c * S;
        load_weights(g, rows->first_weight + c * (S * (S + 1) / 2) + i * (i + 1) / 2, i + 1, rows->one);
        for (size_t j = 0; j <= i; j++) {
            rows->sum[j] = rows->one[j] + (c ? rows->sum[j] : 0);
            value[j] = (REAL)rows->one[j];
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

struct LOOP(block) {
    V a, b, c, d;
};

/* x_j + b + sum over channels of w a, before the ReLU; `value`: of the edge in channel 0. */
TARGET static inline __attribute__((always_inline)) struct LOOP(block)
LOOP(message)(const REAL *xb, const REAL *w, const REAL *value, size_t S, size_t C)
{
    struct LOOP(block) m = {AT(xb, 0), AT(xb, 1), AT(xb, 2), AT(xb, 3)};
    for (size_t c = 0; c < C; c++) {
        const REAL *wc = w + c * COLUMNS;
        V weight = SPREAD(value[c * S]);
        m.a = FMA(weight, AT(wc, 0), m.a), m.b = FMA(weight, AT(wc, 1), m.b);
        m.c = FMA(weight, AT(wc, 2), m.c), m.d = FMA(weight, AT(wc, 3), m.d);
    }
    return m;
}

TARGET static void LOOP(load_columns)(const struct ts_gine *g, const REAL *w, size_t first, size_t width, REAL *to)
{
    for (size_t c = 0; c < g->num_channels; c++)
        for (size_t k = 0; k < COLUMNS; k++)
            to[c * COLUMNS + k] = k < width ? w[c * g->dim + first + k] : 0;
}

/* block: S rows of COLUMNS, columns: C of them. */
TARGET static void LOOP(forward_many)(
    const struct NAME(rows) *rows, const REAL *w, const REAL *b, REAL *block, REAL *columns, REAL *out)
{
    const struct ts_gine *g = rows->g;
    size_t D = g->dim, S = rows->S, C = g->num_channels;
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        REAL own[COLUMNS];
        LOOP(load_columns)(g, w, first, width, columns);
        for (size_t s = 0; s < S; s++)
            LOOP(load_row)(g, rows->first_row + s, b, first, width, block + s * COLUMNS);
        for (size_t i = 0; i < S; i++) {
            size_t n = LOOP(row_edges)(rows, i);
            V s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            for (size_t e = 0; e < n; e++) {
                struct LOOP(block) m =
                    LOOP(message)(block + (size_t)rows->index[e] * COLUMNS, columns, rows->value + e, S, C);
                s0 += RELU(m.a), s1 += RELU(m.b), s2 += RELU(m.c), s3 += RELU(m.d);
            }
            const V sums[4] = {s0, s1, s2, s3};
            const REAL *sum = (const REAL *)sums;
            LOOP(load_row)(g, rows->first_row + i, NULL, first, width, own);
            for (size_t c = 0; c < width; c++)
                out[i * D + first + c] = own[c] + sum[c];
        }
    }
}

/* Target by target, as the weights lie; of each first what passes the ReLU, then its share of
 * grad_w. block: 3 S rows of COLUMNS, columns: 2 C of them. */
TARGET static void LOOP(backward_many)(
    const struct NAME(rows) *rows, const REAL *w, const REAL *b, REAL *block, REAL *columns, const REAL *grad_out,
    REAL *grad_x, REAL *grad_w, REAL *grad_b)
{
    const struct ts_gine *g = rows->g;
    size_t D = g->dim, S = rows->S, C = g->num_channels;
    REAL *to_x = block + S * COLUMNS, *passed = to_x + S * COLUMNS, *to_w = columns + C * COLUMNS;
    for (size_t first = 0; first < D; first += COLUMNS) {
        size_t width = D - first < COLUMNS ? D - first : COLUMNS;
        V b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
        LOOP(load_columns)(g, w, first, width, columns);
        memset(to_w, 0, C * COLUMNS * sizeof *to_w);
        memset(to_x, 0, S * COLUMNS * sizeof *to_x);
        for (size_t s = 0; s < S; s++)
            LOOP(load_row)(g, rows->first_row + s, b, first, width, block + s * COLUMNS);
        for (size_t i = 0; i < S; i++) {
            size_t n = LOOP(row_edges)(rows, i);
            REAL grad[COLUMNS];
            for (size_t c = 0; c < COLUMNS; c++)
                grad[c] = c < width ? grad_out[i * D + first + c] : 0;
            V g0 = AT(grad, 0), g1 = AT(grad, 1), g2 = AT(grad, 2), g3 = AT(grad, 3);
            for (size_t e = 0; e < n; e++) {
                size_t at = (size_t)rows->index[e] * COLUMNS;
                REAL *x = to_x + at, *t = passed + e * COLUMNS;
                struct LOOP(block) m = LOOP(message)(block + at, columns, rows->value + e, S, C);
                V t0 = PASS(m.a, g0), t1 = PASS(m.b, g1), t2 = PASS(m.c, g2), t3 = PASS(m.d, g3);
                PUT(t, 0) = t0, PUT(t, 1) = t1, PUT(t, 2) = t2, PUT(t, 3) = t3;
                PUT(x, 0) += t0, PUT(x, 1) += t1, PUT(x, 2) += t2, PUT(x, 3) += t3;
                b0 += t0, b1 += t1, b2 += t2, b3 += t3;
            }
            for (size_t c = 0; c < C; c++) {
                REAL *sum = to_w + c * COLUMNS;
                const REAL *value = rows->value + c * S;
                V a0 = AT(sum, 0), a1 = AT(sum, 1), a2 = AT(sum, 2), a3 = AT(sum, 3);
                for (size_t e = 0; e < n; e++) {
                    const REAL *t = passed + e * COLUMNS;
                    V weight = SPREAD(value[e]);
                    a0 = FMA(weight, AT(t, 0), a0), a1 = FMA(weight, AT(t, 1), a1);
                    a2 = FMA(weight, AT(t, 2), a2), a3 = FMA(weight, AT(t, 3), a3);
                }
                PUT(sum, 0) = a0, PUT(sum, 1) = a1, PUT(sum, 2) = a2, PUT(sum, 3) = a3;
            }
        }
        const V sums[4] = {b0, b1, b2, b3};
        memcpy(grad_b + first, sums, width * sizeof *grad_b);
        for (size_t c = 0; c < C; c++)
            memcpy(grad_w + c * D + first, to_w + c * COLUMNS, width * sizeof *grad_w);
        for (size_t j = 0; grad_x != NULL && j < S; j++)
            for (size_t c = 0; c < width; c++)
                grad_x[j * D + first + c] = grad_out[j * D + first + c] + to_x[j * COLUMNS + c];
    }
}

#undef V
#undef AT
#undef PUT
#undef SPREAD
#undef LANES
#undef COLUMNS
#undef TARGET
#undef VECTOR_BYTES
#undef LOOP
#undef FMA
#undef RELU
#undef PASS
