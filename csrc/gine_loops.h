/* The inner loops of gine_kernels.h for one scalar type and instruction set, included once for each with
 *   REAL          float or double
 *   VECTOR_BYTES  of the registers; 4 of them are the columns worked on at a time
 *   TARGET        the attribute that allows the instruction set
 *   LOOP(stem)    the name for `stem`
 *   RELU(m), PASS(m, v)   optional: max(m, 0), and v where m > 0, else 0; a NaN is not above 0
 * Four accumulators of their own: an array of them would be kept in memory. */

typedef REAL LOOP(vector) __attribute__((vector_size(VECTOR_BYTES)));
/* In memory of a caller's, that has another alignment and other types. */
typedef REAL LOOP(stored) __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

#define V LOOP(vector)
#define AT(p, k) (((const LOOP(stored) *)(p))[k])
#define LANES (VECTOR_BYTES / sizeof(REAL))
#define COLUMNS (4 * LANES)
#ifndef PASS
#define PASS(m, v) ((V)((m > 0) & (__typeof__(m > 0))(v)))
#define RELU(m) PASS(m, m)
#endif

/* Columns first .. first + width of row s of x, plus b if it is given; zero padded to COLUMNS. */
TARGET static void LOOP(load_row)(
    const struct NAME(graph) *graph, size_t s, const REAL *b, size_t first, size_t width, REAL *row)
{
    const struct ts_gine *g = graph->g;
    size_t at = (graph->first_row + s) * g->dim + first;
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
            LOOP(load_row)(graph, s, b, first, width, xb + s * COLUMNS);
        for (size_t i = 0; i < graph->S; i++) {
            V s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            for (size_t e = graph->ptr[i]; e < graph->ptr[i + 1]; e++) {
                const REAL *xj = xb + (size_t)graph->index[e] * COLUMNS;
                REAL weight = graph->value[e];
                V m0 = AT(xj, 0) + weight * w0, m1 = AT(xj, 1) + weight * w1;
                V m2 = AT(xj, 2) + weight * w2, m3 = AT(xj, 3) + weight * w3;
                s0 += RELU(m0), s1 += RELU(m1), s2 += RELU(m2), s3 += RELU(m3);
            }
            const V sums[4] = {s0, s1, s2, s3};
            const REAL *sum = (const REAL *)sums;
            LOOP(load_row)(graph, i, NULL, first, width, own);
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
            LOOP(load_row)(graph, j, b, first, width, xj);
            V x0 = AT(xj, 0), x1 = AT(xj, 1), x2 = AT(xj, 2), x3 = AT(xj, 3);
            for (size_t e = graph->ptr[j]; e < graph->ptr[j + 1]; e++) {
                const REAL *gi = gb + (size_t)graph->index[e] * COLUMNS;
                REAL weight = graph->value[e];
                V m0 = x0 + weight * w0, m1 = x1 + weight * w1, m2 = x2 + weight * w2, m3 = x3 + weight * w3;
                V t0 = PASS(m0, AT(gi, 0)), t1 = PASS(m1, AT(gi, 1));
                V t2 = PASS(m2, AT(gi, 2)), t3 = PASS(m3, AT(gi, 3));
                s0 += t0, s1 += t1, s2 += t2, s3 += t3;
                a0 += weight * t0, a1 += weight * t1, a2 += weight * t2, a3 += weight * t3;
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

#undef V
#undef AT
#undef LANES
#undef COLUMNS
#undef TARGET
#undef VECTOR_BYTES
#undef LOOP
#undef RELU
#undef PASS
