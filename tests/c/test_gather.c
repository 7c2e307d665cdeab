#include "gather.h"
#include "sigbus_guard.h"
#include "test_core.h"

static void test_edges(void)
{
    uint16_t weights[6] = {0x3c00, 0x0000, 0x3800, 0x3400, 0x3000, 0x2c00};
    int32_t stored[4] = {1, 0, 0, 1};
    struct ts_graph graphs[3] = {
        {.weights = (unsigned char *)weights, .num_tokens = 3, .causal = 1},
        {.weights = (unsigned char *)weights, .num_tokens = 2, .causal = 1, .first_node = 3},
        {.weights = (unsigned char *)weights, .num_tokens = 2, .pairs = stored, .first_node = 5, .num_edges = 2}};
    struct ts_edge_options options = {.in = TS_F16, .out = TS_F16};
    CHECK(ts_count_edges(graphs, 3, &options, 2) == TS_OK);
    CHECK(graphs[0].num_edges == 5 && graphs[1].num_edges == 2 && graphs[2].num_edges == 2);
    graphs[1].first_edge = 5;
    graphs[2].first_edge = 7;
    for (int threads = 1; threads < 4; threads++) {
        int64_t *source = malloc(9 * 8), *target = malloc(9 * 8);
        uint16_t *out = malloc(9 * 2);
        CHECK(ts_fill_edges(graphs, 3, &options, threads, source, target, (unsigned char *)out) == TS_OK);
        CHECK(source[1] == 1 && target[1] == 1 && source[2] == 0 && target[2] == 2 && source[5] == 3 && target[6] == 4);
        CHECK(out[4] == 0x2c00 && out[6] == 0x3800 && source[7] == 6 && target[7] == 5 && target[8] == 6);
        free(source);
        free(target);
        free(out);
    }
    graphs[0].num_edges = 4; /* the weights changed: no more edges are written than were counted */
    int64_t source[9], target[9];
    uint16_t out[9];
    CHECK(ts_fill_edges(graphs, 1, &options, 1, source, target, (unsigned char *)out) == TS_ERR_BOUNDS);
    options.out = TS_BF16;
    CHECK(ts_count_edges(graphs, 3, &options, 1) == TS_ERR_DTYPE);
}

/* Large enough for several blocks, the table of pairs, streamed cache lines and several threads. */
static void test_many_edges(void)
{
    enum { G = 37, S = 61, P = S * (S + 1) / 2 };
    float *weights = malloc(sizeof(float) * G * P);
    struct ts_graph graphs[G];
    for (int p = 0; p < G * P; p++)
        weights[p] = p % 1000 == 7 ? 0 : 1 + (float)(p % 97);
    for (int g = 0; g < G; g++)
        graphs[g] = (struct ts_graph){.weights = (unsigned char *)(weights + g * P), .num_tokens = (size_t)(S - g % 3),
                                      .causal = g % 5 != 4, .first_node = S * g};
    for (int g = 4; g < G; g += 5)
        graphs[g].num_tokens = 30;
    const struct ts_edge_rule rules[] = {{0, 0}, {50, 0}, {0, 0.25}};
    for (int r = 0; r < 3; r++) {
        struct ts_edge_options options = {.in = TS_F32, .out = TS_F32, .rule = rules[r]};
        CHECK(ts_count_edges(graphs, G, &options, 3) == TS_OK);
        int64_t total = 0;
        for (int g = 0; g < G; g++) {
            graphs[g].first_edge = total;
            total += graphs[g].num_edges;
        }
        int64_t *source = malloc((size_t)total * 8), *target = malloc((size_t)total * 8), *threaded = malloc((size_t)total * 8);
        float *out = malloc((size_t)total * 4);
        CHECK(ts_fill_edges(graphs, G, &options, 1, source, target, (unsigned char *)out) == TS_OK);
        for (int64_t e = 0, g = 0; e < total; e++) {
            while (e >= graphs[g].first_edge + graphs[g].num_edges)
                g++;
            int64_t i = target[e] - graphs[g].first_node, j = source[e] - graphs[g].first_node;
            int64_t position = graphs[g].causal ? i * (i + 1) / 2 + j : i * (int64_t)graphs[g].num_tokens + j;
            CHECK(i >= 0 && j >= 0 && (size_t)i < graphs[g].num_tokens && (size_t)j < graphs[g].num_tokens);
            CHECK(((const float *)graphs[g].weights)[position] == out[e]);
        }
        CHECK(ts_fill_edges(graphs, G, &options, 4, threaded, target, (unsigned char *)out) == TS_OK);
        CHECK(memcmp(source, threaded, (size_t)total * 8) == 0);
        free(source), free(target), free(threaded), free(out);
    }
    free(weights);
}

/* Stored edges with nodes outside their graph, in a full and in a partial block. */
static void test_edges_outside(void)
{
    enum { S = 5, E = 300 };
    static int32_t pairs[2 * E];
    static uint16_t weights[E], out[E];
    static int64_t source[E], target[E];
    struct ts_graph graph = {.weights = (unsigned char *)weights, .num_tokens = S, .pairs = pairs, .num_edges = E};
    struct ts_edge_options options = {.in = TS_F16, .out = TS_F16};
    CHECK(ts_fill_edges(&graph, 1, &options, 1, source, target, (unsigned char *)out) == TS_OK);
    int32_t outside[] = {S, -1, INT32_MAX, INT32_MIN};
    for (int position = 0; position < 2 * E; position += 299)
        for (int k = 0; k < 4; k++) {
            pairs[position] = outside[k];
            CHECK(ts_fill_edges(&graph, 1, &options, 1, source, target, (unsigned char *)out) == TS_ERR_NODE);
            pairs[position] = S - 1;
        }
}

/* All functions on a truncated mapping, with one thread and with several. */
static void test_gather_faults(void)
{
    enum { G = 12, S = 36, P = S * (S + 1) / 2 };
    struct ts_map map;
    unsigned char *base = map_truncated_file(&map, 8192);
    struct ts_graph graphs[G], stored[G];
    static int64_t source[G * P], target[G * P];
    static float weights[G * P];
    for (int g = 0; g < G; g++) {
        graphs[g] = (struct ts_graph){.weights = base + g * 1000, .num_tokens = S, .causal = 1,
                                      .first_edge = g * P, .num_edges = P};
        /* So many tokens that any value in the mapping is a valid node. */
        stored[g] = (struct ts_graph){.weights = base, .num_tokens = (size_t)1 << 40, .pairs = (int32_t *)(base + g * 1000),
                                      .first_edge = g * P, .num_edges = P};
    }
    for (int threads = 1; threads < 4; threads++) {
        struct ts_edge_options options = {.in = TS_F16, .out = TS_F16}, wide = {.in = TS_F16, .out = TS_F32, .rule = {0, 1}};
        CHECK(ts_fill_edges(graphs, 4, &options, threads, source, target, (unsigned char *)weights) == TS_OK);
        CHECK(ts_fill_edges(graphs, G, &options, threads, source, target, (unsigned char *)weights) == TS_ERR_FAULT);
        CHECK(ts_fill_edges(graphs, G, &wide, threads, source, target, (unsigned char *)weights) == TS_ERR_FAULT);
        CHECK(ts_fill_edges(stored, G, &options, threads, source, target, (unsigned char *)weights) == TS_ERR_FAULT);
        CHECK(ts_pack_graphs(graphs, G, &options, threads, (unsigned char *)weights, NULL) == TS_ERR_FAULT);
        CHECK(ts_pack_graphs(graphs, G, &wide, threads, (unsigned char *)weights, NULL) == TS_ERR_FAULT);
        struct ts_graph counted[G];
        memcpy(counted, graphs, sizeof counted);
        CHECK(ts_count_edges(counted, G, &options, threads) == TS_ERR_FAULT);
        CHECK(ts_average_heads(counted, G, TS_F16, 1, (uint16_t *)weights, threads) == TS_ERR_FAULT);
        const unsigned char *fault = ts_sigbus_fault();
        CHECK(fault >= base + 8192 && fault < base + map.size);
    }
    ts_map_close(&map);
}

/* Two triangles of 3 and 2 tokens: without the diagonal and the first token, one pair is left. */
static void test_masked_triangles(void)
{
    uint16_t stored[9], out[9];
    int32_t degree[5];
    for (size_t k = 0; k < 9; k++)
        stored[k] = 0x3800;
    struct ts_graph graphs[2] = {{.weights = (unsigned char *)stored, .num_tokens = 3, .causal = 1},
                                 {.weights = (unsigned char *)(stored + 6), .num_tokens = 2, .causal = 1, .first_node = 3}};
    struct ts_edge_options options = {.in = TS_F16, .out = TS_F16, .mask_diagonal = 1, .mask_sinks = 1};
    CHECK(ts_pack_graphs(graphs, 2, &options, 1, (unsigned char *)out, degree) == TS_OK);
    for (size_t k = 0; k < 9; k++)
        CHECK(out[k] == (k == 4 ? 0x3800 : 0x7e00));
    for (size_t k = 0; k < 5; k++)
        CHECK(degree[k] == 1);
    options.mask_diagonal = 0, options.mask_sinks = 0;
    CHECK(ts_pack_graphs(graphs, 2, &options, 1, (unsigned char *)out, degree) == TS_OK);
    CHECK(memcmp(stored, out, sizeof out) == 0);
    CHECK(degree[0] == 1 && degree[1] == 2 && degree[2] == 3 && degree[3] == 1 && degree[4] == 2);
}

void test_gather(void)
{
    test_masked_triangles();
    at_every_simd_level(test_edges);
    at_every_simd_level(test_many_edges);
    test_edges_outside();
    test_gather_faults();
}
