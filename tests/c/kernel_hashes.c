/* Compare hashes of the outputs of all kernels on fixed inputs with the table below. The hashes are the
 * same with every compiler, on every processor and at every level of vector instructions. With --print,
 * print a new table instead. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "copy.h"
#include "crc32c.h"
#include "edge_rule.h"
#include "error.h"
#include "float_convert.h"
#include "gather.h"
#include "gine.h"
#include "index.h"
#include "pack.h"
#include "rows.h"
#include "shuffle.h"
#include "simd.h"
#include "stream.h"

#define MAX_BYTES ((size_t)1 << 21)

/* Extend a 64-bit FNV-1a hash. */
static uint64_t add(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t add_number(uint64_t hash, int64_t number)
{
    return add(hash, &number, sizeof number);
}

#define START 0xcbf29ce484222325u

/* xorshift64*: integer arithmetic only, so that inputs do not depend on a math library. */
static uint64_t state;

static uint32_t draw(void)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)(state * 0x2545f4914f6cdd1du >> 32);
}

/* Draw an exact float from [-1, 1) or from [0, 1). */
static float draw_signed(void) { return (float)((int32_t)(draw() >> 7) - (1 << 24)) * 0x1p-24f; }
static float draw_positive(void) { return (float)(draw() >> 8) * 0x1p-24f; }

static void *allocate(size_t bytes)
{
    void *p = calloc(1, bytes + 64);
    if (p == NULL || bytes > MAX_BYTES) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    return p;
}

static uint16_t *random_bits16(size_t n, uint32_t mask)
{
    uint16_t *values = allocate(n * 2);
    for (size_t i = 0; i < n; i++)
        values[i] = (uint16_t)(draw() & mask);
    return values;
}

static uint64_t crc(void)
{
    uint64_t hash = START;
    unsigned char *data = allocate(70000);
    for (size_t i = 0; i < 70000; i++)
        data[i] = (unsigned char)draw();
    for (size_t n = 0; n < 70000; n = n * 3 / 2 + 1)
        hash = add_number(hash, ts_crc32c((uint32_t)n, data + n % 17, n - n % 17));
    hash = add_number(hash, ts_crc32c_combine(1, 2, 12345));
    free(data);
    return hash;
}

static uint64_t f16_to_f32(void)
{
    float *out = allocate(65536 * 4);
    uint16_t *in = allocate(65536 * 2);
    for (uint32_t i = 0; i < 65536; i++)
        in[i] = (uint16_t)i;
    ts_f16_to_f32(in, out, 65536);
    uint64_t hash = add(START, out, 65536 * 4);
    ts_bf16_to_f32(in, out, 65536);
    hash = add(hash, out, 65536 * 4);
    free(in), free(out);
    return hash;
}

static uint64_t f32_to_f16(void)
{
    enum { N = 100003 };
    uint32_t *in = allocate(N * 4);
    uint16_t *out = allocate(N * 2);
    for (size_t i = 0; i < N; i++)
        in[i] = i % 3 ? draw() : ((draw() & 0x8fffffffu) | 0x30000000u); /* any bits, and values near the range of float16 */
    ts_f32_to_f16((const ts_f32_unaligned *)in, out, N);
    uint64_t hash = add(START, out, N * 2);
    free(in), free(out);
    return hash;
}

static uint64_t to_f16(void)
{
    enum { N = 10007 };
    double *wide = allocate(N * 8);
    float *narrow = allocate(N * 4);
    uint16_t *out = allocate(N * 2), *brain = random_bits16(N, 0xbfffu);
    size_t where = 0;
    for (size_t i = 0; i < N; i++) {
        wide[i] = (double)draw_signed() + (double)draw_signed() * 0x1p-30;
        narrow[i] = draw_signed() * (i % 5 ? 1.0f : 0x1p-16f);
    }
    wide[5] = (double)INFINITY, narrow[6] = -INFINITY;
    uint64_t hash = add_number(START, ts_to_f16(wide, TS_F64, out, N, &where));
    hash = add(hash, out, N * 2);
    hash = add_number(hash, ts_to_f16(narrow, TS_F32, out, N, &where));
    hash = add(hash, out, N * 2);
    hash = add_number(hash, ts_to_f16(brain, TS_BF16, out, N, &where));
    hash = add(hash, out, N * 2);
    narrow[777] = 70000.0f;
    hash = add_number(hash, ts_to_f16(narrow, TS_F32, out, N, &where));
    hash = add_number(hash, (int64_t)where);
    free(wide), free(narrow), free(out), free(brain);
    return hash;
}

static uint64_t count_nonfinite(void)
{
    uint64_t hash = START;
    uint16_t *in = random_bits16(80000, 0xffffu);
    for (size_t n = 0; n < 80000; n = n * 2 + 1)
        for (int dtype = TS_F16; dtype <= TS_BF16; dtype++)
            hash = add_number(hash, (int64_t)ts_count_nonfinite(in, (enum ts_dtype)dtype, n));
    hash = add_number(hash, (int64_t)ts_count_nonfinite(in, TS_F32, 40000));
    hash = add_number(hash, (int64_t)ts_count_nonfinite(in, TS_F64, 20000));
    free(in);
    return hash;
}

static uint64_t triangles(void)
{
    uint64_t hash = START;
    for (size_t S = 1; S < 70; S += 1 + S / 3) {
        size_t itemsize = (size_t)2 << S % 3, A = S * (S + 1) / 2;
        uint16_t *square = random_bits16(3 * S * S * 4, 0xffffu), *packed = allocate(3 * A * 8);
        ts_pack_triangle(square, itemsize, 3, S, packed);
        hash = add(hash, packed, 3 * A * itemsize);
        ts_unpack_triangle(packed, itemsize, 3, S, square);
        hash = add(hash, square, 3 * S * S * itemsize);
        enum ts_dtype dtype = itemsize == 2 ? TS_F16 : itemsize == 4 ? TS_F32 : TS_F64;
        hash = add_number(hash, ts_is_causal(square, dtype, 3, S));
        memset((unsigned char *)square + (S - 1) * itemsize, 0x11, itemsize);
        hash = add_number(hash, ts_is_causal(square, dtype, 3, S));
        free(square), free(packed);
    }
    return hash;
}

static uint64_t head_means(void)
{
    uint64_t hash = START;
    for (size_t n = 1; n < 300; n = n * 2 + 3)
        for (size_t H = 1; H < 14; H += 4) {
            uint16_t *half = random_bits16(H * n, 0xffffu), *weight = random_bits16(H * n, 0x3bffu), *out = allocate(n * 2);
            float *narrow = allocate(H * n * 4);
            double *wide = allocate(H * n * 8);
            for (size_t i = 0; i < H * n; i++) {
                narrow[i] = draw_positive();
                wide[i] = (double)draw_signed() * (double)draw_signed();
            }
            const void *const inputs[] = {half, weight, half, narrow, wide};
            const enum ts_dtype dtypes[] = {TS_F16, TS_F16, TS_BF16, TS_F32, TS_F64};
            for (size_t k = 0; k < 5; k++) {
                int ret = ts_mean_rows(inputs[k], dtypes[k], H, n, n, out);
                hash = add_number(hash, ret);
                if (ret == TS_OK)
                    hash = add(hash, out, n * 2);
            }
            free(half), free(weight), free(out), free(narrow), free(wide);
        }
    return hash;
}

static uint64_t packing(void)
{
    enum { L = 3, H = 4, S = 37, N = H * S * S };
    uint64_t hash = START;
    uint16_t *layers[L], *out = allocate(L * N * 2);
    for (size_t k = 0; k < L; k++) {
        layers[k] = random_bits16(N, 0x3bffu);
        for (size_t row = 0; row < H * S; row++)
            memset(layers[k] + row * S + row % S + 1, 0, (S - 1 - row % S) * 2);
    }
    for (unsigned form = 0; form < 4; form++) {
        struct ts_pack pack = {.sources = (const void *const *)layers, .stored = (const void *const *)layers,
                               .L = L, .H = H, .S = S, .causal = form % 2 != 0, .mean = form > 1, .out = out};
        hash = add_number(hash, ts_pack_attention(&pack));
        hash = add_number(hash, pack.scan.crc);
        size_t heads = form > 1 ? 1 : H, values = form % 2 ? S * (S + 1) / 2 : S * S;
        hash = add(hash, out, heads * L * values * 2);
    }
    for (size_t k = 0; k < L; k++)
        free(layers[k]);
    free(out);
    return hash;
}

static const struct ts_edge_rule rules[] = {{0, 0}, {0.37, 0}, {-0.25, 0}, {0, 0.1}, {0, 1}};
enum { NUM_RULES = sizeof rules / sizeof *rules };

static uint64_t select_pairs(void)
{
    enum { N = 3001 };
    uint64_t hash = START;
    float *weights = allocate(N * 4), *scratch = allocate(N * 4);
    unsigned char *keep = allocate(N);
    for (size_t i = 0; i < N; i++)
        weights[i] = i % 101 == 3 ? NAN : (float)(draw() % 64) / 64.0f - 0.25f; /* with ties */
    for (size_t r = 0; r < NUM_RULES; r++) {
        struct ts_weight_range range = ts_weight_range(rules[r], TS_F32);
        size_t kept = rules[r].top_k > 0 ? ts_select_top_k(weights, N, rules[r].top_k, keep, scratch)
                                                  : ts_select_in_range(&range, weights, N, keep);
        hash = add_number(hash, (int64_t)kept);
        hash = add(hash, keep, N);
    }
    free(weights), free(scratch), free(keep);
    return hash;
}

/* Copies with and without conversion, by one thread and by several. */
static uint64_t copies(void)
{
    enum { N = 150001 };
    uint64_t hash = START;
    uint16_t *in = random_bits16(N, 0xffffu);
    unsigned char *out = allocate(N * 4);
    const enum ts_dtype outputs[] = {TS_F16, TS_F32, TS_BF16, TS_F32};
    for (int k = 0; k < 4; k++)
        for (int threads = 1; threads < 4; threads += 2) {
            enum ts_dtype dtype = k < 2 ? TS_F16 : TS_BF16;
            size_t bytes = ts_dtype_bytes(outputs[k]);
            struct ts_copy jobs[2] = {{(unsigned char *)in, out, 1001},
                                      {(unsigned char *)(in + 1001), out + 1001 * bytes, N - 1001}};
            memset(out, 0, N * 4);
            hash = add_number(hash, ts_copy_many(jobs, 2, dtype, outputs[k], threads));
            hash = add(hash, out, N * bytes);
        }
    memset(out, 0, N * 2);
    ts_stream_copy(out + 5, in, 2 * N - 8);
    ts_stream_fence();
    hash = add(hash, out, N * 2);
    free(in), free(out);
    return hash;
}

/* Edge lists and packed graphs of float16, bfloat16 and float32 weights. */
static uint64_t graphs_of(enum ts_dtype dtype, enum ts_dtype wide)
{
    enum { G = 9, MOST = 53, ROOM = G * MOST * MOST };
    uint64_t hash = START;
    size_t itemsize = ts_dtype_bytes(dtype);
    uint16_t *halves = random_bits16(ROOM, dtype == TS_BF16 ? 0xbfffu : 0xbcffu);
    float *floats = allocate(ROOM * 4);
    for (size_t i = 0; i < ROOM; i++)
        floats[i] = i % 91 == 1 ? NAN : draw_signed();
    const unsigned char *weights = dtype == TS_F32 ? (unsigned char *)floats : (unsigned char *)halves;
    struct ts_graph graphs[G];
    int64_t *source = allocate(ROOM * 8), *target = allocate(ROOM * 8);
    unsigned char *out = allocate(ROOM * 4);
    for (size_t r = 0; r < NUM_RULES; r++)
        for (int threads = 1; threads < 4; threads += 2) {
            struct ts_edge_options form = {.in = dtype, .out = r % 2 ? wide : dtype, .rule = rules[r]};
            size_t at = 0, pairs = 0;
            int64_t edges = 0, nodes = 0;
            for (size_t g = 0; g < G; g++) {
                graphs[g] = (struct ts_graph){.weights = weights + at * itemsize, .num_tokens = MOST - 3 * g,
                                              .causal = g % 4 != 3, .first_node = nodes};
                nodes += (int64_t)graphs[g].num_tokens;
                at += MOST * MOST;
                pairs += ts_num_pairs(&graphs[g]);
            }
            hash = add_number(hash, ts_count_edges(graphs, G, &form, threads));
            for (size_t g = 0; g < G; g++) {
                /* A top-k rule never keeps NaN, which only ts_fill_edges() notices. */
                graphs[g].first_edge = edges;
                edges += graphs[g].num_edges;
            }
            hash = add_number(hash, edges);
            hash = add_number(hash, ts_fill_edges(graphs, G, &form, threads, source, target, out));
            hash = add(hash, source, (size_t)edges * 8);
            hash = add(hash, target, (size_t)edges * 8);
            hash = add(hash, out, (size_t)edges * ts_dtype_bytes(form.out));
            hash = add_number(hash, ts_pack_graphs(graphs, G, &form, threads, out, NULL));
            hash = add(hash, out, pairs * ts_dtype_bytes(form.out));
            memset(source, 0, ROOM * 8);
            memset(target, 0, ROOM * 8);
            memset(out, 0, ROOM * 4);
        }
    free(halves), free(floats), free(source), free(target), free(out);
    return hash;
}

static uint64_t graphs_f16(void) { return graphs_of(TS_F16, TS_F32); }
static uint64_t graphs_bf16(void) { return graphs_of(TS_BF16, TS_F32); }
static uint64_t graphs_f32(void) { return graphs_of(TS_F32, TS_F32); }

static uint64_t mean_graphs(void)
{
    enum { H = 6, G = 5, S = 21, P = S * (S + 1) / 2 };
    uint16_t *weights = random_bits16(G * H * P, 0x3bffu), *out = allocate(G * P * 2);
    struct ts_graph graphs[G];
    for (size_t g = 0; g < G; g++)
        graphs[g] = (struct ts_graph){.weights = (unsigned char *)(weights + g * H * P), .num_tokens = S, .causal = 1};
    uint64_t hash = add_number(START, ts_average_heads(graphs, G, TS_F16, H, out, 2));
    hash = add(hash, out, G * P * 2);
    free(weights), free(out);
    return hash;
}

static uint64_t indexing(void)
{
    enum { N = 500, SLOTS = 1024 };
    uint64_t hash = START;
    unsigned char *ids = allocate(N * 8);
    int64_t *offsets = allocate((N + 1) * 8);
    int32_t *samples = allocate(N * 4);
    uint32_t *table = allocate(SLOTS * 4);
    for (int i = 0; i < N; i++) {
        size_t n = 4 + (size_t)i % 5;
        for (size_t k = 0; k < n; k++)
            ids[offsets[i] + (int64_t)k] = (unsigned char)draw();
        offsets[i + 1] = offsets[i] + (int64_t)n;
        samples[i] = i % 3 - 1;
    }
    struct ts_index_part part = {N, SLOTS, table, offsets, ids, (uint64_t)offsets[N], samples};
    hash = add_number(hash, ts_index_build(&part, table));
    hash = add(hash, table, SLOTS * 4);
    for (int i = 0; i < N; i++)
        hash = add_number(hash, ts_index_find(&part, ids + offsets[i], (size_t)(offsets[i + 1] - offsets[i]), 0));
    free(ids), free(offsets), free(samples), free(table);
    return hash;
}

static uint64_t orders(void)
{
    enum { N = 1000 };
    uint64_t hash = START;
    int64_t positions[N], out[N], window[100];
    for (int64_t k = 0; k < N; k++)
        positions[k] = k;
    ts_permute(positions, N, N, 42, out);
    hash = add(hash, out, sizeof out);
    for (int64_t k = 0; k < N; k++)
        positions[k] = k * 123456789012;
    ts_permute(positions, N, (uint64_t)1 << 60, 7, out);
    hash = add(hash, out, sizeof out);
    struct ts_shuffle_buffer buffer = {window, N, 100, 9, 0};
    ts_shuffle_buffer_init(&buffer);
    ts_shuffle_buffer_next(&buffer, N, out);
    return add(hash, out, sizeof out);
}

/* Rows of two arrays, in their order and in reverse, and the runs of numbers. */
static uint64_t row_gathers(void)
{
    enum { N = 512, ITEMS = 77, RUNS = 45 };
    uint64_t hash = START;
    uint16_t *in = random_bits16(2 * N * ITEMS, 0xffff);
    unsigned char *out = allocate(N * ITEMS * 4);
    int32_t array[N];
    int64_t row[N], target[N], first[RUNS] = {0};
    for (int64_t k = 0; k < N; k++) {
        array[k] = (int32_t)(draw() % 2);
        row[k] = (int64_t)(draw() % N);
        target[k] = N - 1 - k;
    }
    const unsigned char *arrays[2] = {(unsigned char *)in, (unsigned char *)(in + N * ITEMS)};
    struct ts_rows rows = {.arrays = arrays, .array = array, .row = row, .row_items = ITEMS, .in = TS_F16, .dst = out};
    const enum ts_dtype outputs[] = {TS_F16, TS_F32};
    for (int threads = 1; threads < 4; threads += 2)
        for (int k = 0; k < 2; k++) {
            rows.out = outputs[k];
            rows.target = k == 0 ? target : NULL;
            hash = add_number(hash, ts_gather_rows(&rows, N, threads));
            hash = add(hash, out, N * ITEMS * ts_dtype_bytes(rows.out));
        }
    for (int r = 1; r < RUNS; r++)
        first[r] = first[r - 1] + 1 + (int64_t)(draw() % 20);
    ts_find_runs(first, RUNS, row, N, target);
    free(in), free(out);
    return add(hash, target, sizeof target);
}

/* One batch of graphs, as triangles of C channels or as edge lists, forward and backward. */
static uint64_t gine_of(size_t C, int is_list, enum ts_dtype weight_dtype, enum ts_dtype x_dtype, size_t real_bytes)
{
    enum { G = 7, D = 83, MOST = 23, N = 5 + 8 + 11 + 14 + 17 + 20 + 23, A = N * (MOST + 1) / 2 };
    uint64_t hash = START;
    int64_t nodes[G + 1] = {0}, starts[G + 1] = {0};
    int64_t *source = allocate(A * 8), *target = allocate(A * 8);
    size_t num_edges = 0;
    for (int64_t g = 0; g < G; g++) {
        int64_t S = MOST - 3 * g;
        nodes[g + 1] = nodes[g] + S;
        for (int64_t e = 0; is_list && e < S * 3; e++) {
            source[num_edges] = nodes[g] + (int64_t)(draw() % (uint32_t)S);
            target[num_edges++] = nodes[g] + (int64_t)(draw() % (uint32_t)S);
        }
        starts[g + 1] = is_list ? (int64_t)num_edges : starts[g] + (int64_t)C * S * (S + 1) / 2;
    }
    size_t num_weights = (size_t)starts[G];
    float *values = allocate(num_weights * 4), *x = allocate(N * D * 4);
    uint16_t *half_values = random_bits16(num_weights, 0x3bffu), *half_x = random_bits16(N * D, 0xbbffu);
    double *wide_values = allocate(num_weights * 8), *wide_x = allocate(N * D * 8), *w = allocate((C + 1) * D * 8);
    float *narrow_w = allocate((C + 1) * D * 4);
    for (size_t i = 0; i < num_weights; i++)
        wide_values[i] = (double)(values[i] = draw_positive() - 0.125f);
    for (size_t i = 0; i < N * D; i++)
        wide_x[i] = (double)(x[i] = draw_signed());
    for (size_t i = 0; i < (C + 1) * D; i++)
        w[i] = (double)(narrow_w[i] = draw_signed());
    struct ts_gine g = {.num_graphs = G, .num_rows = N, .dim = D, .num_weights = num_weights, .num_channels = C,
                        .node_ptr = nodes, .weight_ptr = starts, .weight_dtype = weight_dtype, .x_dtype = x_dtype};
    g.weights = weight_dtype == TS_F64 ? (void *)wide_values : weight_dtype == TS_F32 ? (void *)values : half_values;
    g.x = x_dtype == TS_F64 ? (void *)wide_x : x_dtype == TS_F32 ? (void *)x : half_x;
    if (is_list) {
        g.source = source;
        g.target = target;
    }
    g.num_threads = 3;
    void *workspace = allocate(ts_gine_workspace(&g, real_bytes, 1));
    size_t out_bytes = N * D * real_bytes, w_bytes = C * D * real_bytes;
    void *out = allocate(out_bytes), *grad_x = allocate(out_bytes), *grad_w = allocate(w_bytes), *grad_b = allocate(D * real_bytes);
    hash = add_number(hash, ts_gine_check(&g));
    for (g.num_threads = 1; g.num_threads < 4; g.num_threads += 2) {
        if (real_bytes == 4) {
            hash = add_number(hash, ts_gine_forward_f32(&g, narrow_w, narrow_w + C * D, out, workspace));
            hash = add_number(hash, ts_gine_backward_f32(&g, narrow_w, narrow_w + C * D, out, grad_x, grad_w, grad_b,
                                                         workspace));
        } else {
            hash = add_number(hash, ts_gine_forward_f64(&g, w, w + C * D, out, workspace));
            hash = add_number(hash, ts_gine_backward_f64(&g, w, w + C * D, out, grad_x, grad_w, grad_b, workspace));
        }
        hash = add(hash, out, out_bytes);
        hash = add(hash, grad_x, out_bytes);
        hash = add(hash, grad_w, w_bytes);
        hash = add(hash, grad_b, D * real_bytes);
    }
    free(source), free(target), free(values), free(x), free(half_values), free(half_x), free(wide_values), free(wide_x);
    free(w), free(narrow_w), free(workspace), free(out), free(grad_x), free(grad_w), free(grad_b);
    return hash;
}

static uint64_t gine_f32(void) { return gine_of(1, 0, TS_F32, TS_F32, 4); }
static uint64_t gine_f32_of_halves(void) { return gine_of(1, 0, TS_F16, TS_BF16, 4); }
static uint64_t gine_f32_list(void) { return gine_of(1, 1, TS_F32, TS_F16, 4); }
static uint64_t gine_f32_heads(void) { return gine_of(5, 0, TS_F16, TS_F32, 4); }
static uint64_t gine_f64(void) { return gine_of(1, 0, TS_F64, TS_F64, 8); }
static uint64_t gine_f64_list(void) { return gine_of(1, 1, TS_BF16, TS_F64, 8); }
static uint64_t gine_f64_heads(void) { return gine_of(3, 0, TS_F64, TS_F32, 8); }

static const struct kernel {
    const char *name;
    uint64_t (*run)(void);
    uint64_t expected;
} kernels[] = {
#define KERNEL(name, expected) {#name, name, expected}
    KERNEL(crc, 0x51a93ae499b33c45),
    KERNEL(f16_to_f32, 0x260cacf2c9161b45),
    KERNEL(f32_to_f16, 0xbc15d73bc7ad8a4e),
    KERNEL(to_f16, 0x85387c194f43a325),
    KERNEL(count_nonfinite, 0xf3b96490b7bc4ac1),
    KERNEL(triangles, 0x154f2439fa0bc4b4),
    KERNEL(head_means, 0x91f47191f41ca14e),
    KERNEL(packing, 0xb36c3677311fcc26),
    KERNEL(select_pairs, 0x4c3b5da9ff23e02e),
    KERNEL(copies, 0xdba7d1c73b84a96d),
    KERNEL(graphs_f16, 0x8d4af576a58632a1),
    KERNEL(graphs_bf16, 0x5f7acc8da5bfea01),
    KERNEL(graphs_f32, 0x7671b29fc461dd8d),
    KERNEL(mean_graphs, 0x515f71a7a8272831),
    KERNEL(indexing, 0xa1575d036c1060a8),
    KERNEL(orders, 0x727fa0486b325062),
    KERNEL(gine_f32, 0x97485f1858538665),
    KERNEL(gine_f32_of_halves, 0xb83361f28e3a9525),
    KERNEL(gine_f32_list, 0x52825c91aff2fe61),
    KERNEL(gine_f32_heads, 0x56b41a9e2a60eda5),
    KERNEL(gine_f64, 0x4c1e7bfbdd2bd305),
    KERNEL(gine_f64_list, 0x64ce531019c9fb19),
    KERNEL(gine_f64_heads, 0xf7d4021720b20769),
    KERNEL(row_gathers, 0xd3fd51b42feea733),
};
enum { NUM_KERNELS = sizeof kernels / sizeof *kernels };

int main(int argc, char **argv)
{
    int is_printing = argc > 1 && strcmp(argv[1], "--print") == 0, failed = 0, highest = ts_simd_level();
    for (int level = is_printing ? highest : 1; level <= highest; level++) {
        ts_simd_limit(level);
        for (size_t k = 0; k < NUM_KERNELS; k++) {
            state = 0x9e3779b97f4a7c15u + k;
            uint64_t found = kernels[k].run();
            if (is_printing)
                printf("    KERNEL(%s, 0x%016" PRIx64 "),\n", kernels[k].name, found);
            else if (found != kernels[k].expected) {
                fprintf(stderr, "%s at level %s: 0x%016" PRIx64 ", expected 0x%016" PRIx64 "\n", kernels[k].name,
                        ts_simd_name(level), found, kernels[k].expected);
                failed++;
            }
        }
    }
    if (!is_printing)
        printf("%d kernels at the levels %s to %s: %d hashes differ\n", NUM_KERNELS, ts_simd_name(1),
               ts_simd_name(highest), failed);
    return failed != 0;
}
