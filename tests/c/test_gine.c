#include <math.h>

#include "gine.h"
#include "test_core.h"

/* Compare the dense and the sparse form of one batch at every instruction set, with odd sizes. */
static void test_forms(void)
{
    enum { G = 11, D = 67 };
    int64_t nodes[G + 1] = {0}, weights[G + 1] = {0}, edges[G + 1] = {0};
    for (int g = 0; g < G; g++) {
        int64_t S = g % 5;
        nodes[g + 1] = nodes[g] + S;
        weights[g + 1] = weights[g] + S * (S + 1) / 2;
    }
    size_t N = (size_t)nodes[G], A = (size_t)weights[G], E = 0;
    float *a = malloc(A * 4), *x = malloc(N * D * 4), w[D], b[D];
    int64_t *source = malloc(A * 8), *target = malloc(A * 8);
    float *kept = malloc(A * 4);
    for (size_t i = 0; i < A; i++)
        a[i] = (float)((i * 37) % 11) / 11.0f - 0.1f;
    for (size_t i = 0; i < N * D; i++)
        x[i] = (float)((i * 101) % 97) / 97.0f - 0.5f;
    for (int d = 0; d < D; d++) {
        w[d] = (float)(d % 7) / 7.0f - 0.4f;
        b[d] = (float)(d % 5) / 5.0f - 0.3f;
    }
    for (int g = 0; g < G; g++) {
        size_t p = (size_t)weights[g];
        for (int64_t i = 0; i < nodes[g + 1] - nodes[g]; i++)
            for (int64_t j = 0; j <= i; j++, p++)
                if (a[p] > 0.0f) {
                    source[E] = nodes[g] + j;
                    target[E] = nodes[g] + i;
                    kept[E++] = a[p];
                }
        edges[g + 1] = (int64_t)E;
    }
    struct ts_gine dense = {G, N, D, A, 1, nodes, weights, a, TS_F32, 0, NULL, NULL, x, TS_F32, 2};
    struct ts_gine sparse = {G, N, D, E, 1, nodes, edges, kept, TS_F32, 0, source, target, x, TS_F32, 3};
    enum { FORMS = 4 };
    float *out[FORMS], *gx[FORMS], gw[FORMS][D], gb[FORMS][D];
    for (int k = 0; k < FORMS; k++) {
        struct ts_gine form = k ? sparse : dense, *g = &form;
        ts_simd_limit(k > 1 ? k : TS_SIMD_HIGHEST);
        out[k] = malloc(N * D * 4);
        gx[k] = malloc(N * D * 4);
        void *forward = malloc(ts_gine_workspace(g, 4, 0)), *backward = malloc(ts_gine_workspace(g, 4, 1));
        CHECK(ts_gine_check(g) == TS_OK);
        CHECK(ts_gine_forward_f32(g, w, b, out[k], forward) == TS_OK);
        CHECK(ts_gine_backward_f32(g, w, b, x, gx[k], gw[k], gb[k], backward) == TS_OK);
        CHECK(ts_gine_backward_f32(g, w, b, x, NULL, gw[k], gb[k], backward) == TS_OK);
        free(forward);
        free(backward);
    }
    /* A slice of the batch, the second half of its graphs, in the numbering of the whole batch. */
    struct ts_gine slice = sparse;
    slice.num_graphs = G - G / 2;
    slice.node_ptr += G / 2;
    slice.weight_ptr += G / 2;
    slice.num_rows = (size_t)(nodes[G] - nodes[G / 2]);
    slice.x = x + nodes[G / 2] * D;
    float *sliced = malloc(slice.num_rows * D * 4);
    void *slice_workspace = malloc(ts_gine_workspace(&slice, 4, 0));
    CHECK(ts_gine_check(&slice) == TS_OK && ts_gine_forward_f32(&slice, w, b, sliced, slice_workspace) == TS_OK);
    CHECK(memcmp(sliced, out[1] + nodes[G / 2] * D, slice.num_rows * D * 4) == 0);
    target[E - 1] = nodes[G];
    CHECK(ts_gine_forward_f32(&slice, w, b, sliced, slice_workspace) == TS_ERR_BOUNDS);
    slice.num_rows++;
    CHECK(ts_gine_check(&slice) == TS_ERR_BOUNDS);
    dense.num_weights--;
    CHECK(ts_gine_check(&dense) == TS_ERR_BOUNDS);
    free(sliced);
    free(slice_workspace);
    for (int k = 1; k < FORMS; k++) {
        for (size_t i = 0; i < N * D; i++)
            CHECK(fabsf(out[0][i] - out[k][i]) < 1e-5f && fabsf(gx[0][i] - gx[k][i]) < 1e-5f);
        for (int d = 0; d < D; d++)
            CHECK(fabsf(gw[0][d] - gw[k][d]) < 1e-4f && fabsf(gb[0][d] - gb[k][d]) < 1e-4f);
    }
    /* Three channels of the same weights, with w split in three, must give the sums of the dense form. */
    enum { C = 3 };
    float *repeated = malloc(C * A * 4), parts[C * D], grad_w[C * D], grad_b[D];
    int64_t at[G + 1];
    for (int g = 0; g <= G; g++)
        at[g] = C * weights[g];
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++)
            memcpy(repeated + at[g] + c * (weights[g + 1] - weights[g]), a + weights[g],
                   (size_t)(weights[g + 1] - weights[g]) * 4);
    for (int d = 0; d < D; d++) {
        parts[d] = 2 * w[d];
        parts[D + d] = w[d] / 2;
        parts[2 * D + d] = -1.5f * w[d];
    }
    for (int level = TS_SIMD_BASELINE; level <= TS_SIMD_HIGHEST; level++) {
        ts_simd_limit(level);
        struct ts_gine channels = {G, N, D, C * A, C, nodes, at, repeated, TS_F32, 0, NULL, NULL, x, TS_F32, 2};
        void *workspace = malloc(ts_gine_workspace(&channels, 4, 1));
        CHECK(ts_gine_check(&channels) == TS_OK);
        CHECK(ts_gine_forward_f32(&channels, parts, b, out[1], workspace) == TS_OK);
        CHECK(ts_gine_backward_f32(&channels, parts, b, x, gx[1], grad_w, grad_b, workspace) == TS_OK);
        CHECK(ts_gine_backward_f32(&channels, parts, b, x, NULL, grad_w, grad_b, workspace) == TS_OK);
        for (size_t i = 0; i < N * D; i++)
            CHECK(fabsf(out[0][i] - out[1][i]) < 1e-5f && fabsf(gx[0][i] - gx[1][i]) < 1e-5f);
        for (int d = 0; d < C * D; d++)
            CHECK(fabsf(gw[0][d % D] - grad_w[d]) < 1e-4f && fabsf(gb[0][d % D] - grad_b[d % D]) < 1e-4f);
        free(workspace);
        channels.num_weights--;
        CHECK(ts_gine_check(&channels) == TS_ERR_BOUNDS);
        channels.num_weights++;
        channels.source = channels.target = nodes;
        CHECK(ts_gine_check(&channels) == TS_ERR_BOUNDS);
    }
    free(repeated);
    for (int k = 0; k < FORMS; k++) {
        free(out[k]);
        free(gx[k]);
    }
    free(a);
    free(x);
    free(source);
    free(target);
    free(kept);
}

void test_gine(void)
{
    test_forms();
}
