/* Unit tests of the C core, meant to run under ASan and UBSan: buffers are
 * allocated at their exact size, so that one byte too far is seen. */
#include <assert.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "attention.h"
#include "huge_alloc.h"
#include "platform.h"
#include "shared_memory.h"
#include "crc32c.h"
#include "thread_pool.h"
#include "error.h"
#include "gather.h"
#include "shuffle.h"
#include "simd.h"
#include "stream.h"
#include "gine.h"
#include "sigbus_guard.h"
#include "float_convert.h"
#include "index.h"
#include "map.h"
#include "pack.h"
#include "parallel.h"

#undef assert
#define assert(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

static void test_errors(void)
{
    for (int code = 0; code > TS_ERR_LAST; code--) {
        assert(ts_strerror(code) != NULL && strcmp(ts_strerror(code), "unknown error") != 0);
        for (int other = 0; other > code; other--)
            assert(strcmp(ts_strerror(code), ts_strerror(other)) != 0);
    }
    assert(strcmp(ts_strerror(TS_ERR_LAST), "unknown error") == 0);
}

static void test_crc(void)
{
    unsigned char zeros[32] = {0};
    assert(ts_crc32c(0, "123456789", 9) == 0xe3069283u); /* RFC 3720, B.4 */
    assert(ts_crc32c(0, zeros, 32) == 0x8a9136aau);
    for (size_t n = 0; n < 40000; n = n * 2 + 1) {
        unsigned char *data = malloc(n + 1);
        for (size_t i = 0; i < n; i++)
            data[i] = (unsigned char)(i * 131 + n);
        uint32_t whole = ts_crc32c(0, data, n);
        assert(whole == ts_crc32c_portable(0, data, n));
        size_t half = n / 3;
        assert(ts_crc32c(ts_crc32c(0, data, half), data + half, n - half) == whole);
        assert(ts_crc32c_combine(ts_crc32c(0, data, half), ts_crc32c(0, data + half, n - half), n - half) == whole);
        free(data);
    }
}

static void test_half(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        uint16_t half = (uint16_t)h;
        float wide = ts_f16_to_f32_portable(half), fast;
        ts_f16_to_f32(&half, &fast, 1);
        assert(memcmp(&wide, &fast, 4) == 0 || (isnan(wide) && isnan(fast)));
        if (!isnan(wide))
            assert(ts_f32_to_f16_portable(wide) == half && ts_f64_to_f16((double)wide) == half);
        else
            assert(isnan(ts_f16_to_f32_portable(ts_f32_to_f16_portable(wide))));
    }
    /* One rounding, not two: just above the middle of 1 and its successor. */
    assert(ts_f64_to_f16(1.0 + 0x1p-11 + 0x1p-40) == 0x3c01u);
    assert(ts_f64_to_f16(1.0 + 0x1p-11) == 0x3c00u);
    assert(ts_f32_to_f16_portable(65519.0f) == 0x7bffu && ts_f32_to_f16_portable(65520.0f) == 0x7c00u);
    float values[3] = {1.0f, INFINITY, 70000.0f};
    uint16_t out[3];
    size_t where = 99;
    assert(ts_to_f16(values, TS_F32, out, 2, &where) == TS_OK);
    assert(ts_to_f16(values, TS_F32, out, 3, &where) == TS_ERR_RANGE && where == 2);
    assert(ts_count_nonfinite(values, TS_F32, 3) == 1);
    for (size_t n = 0; n < 70000; n = n * 2 + 1) {
        uint16_t *halves = malloc(n * 2 + 1);
        size_t wanted = 0;
        for (size_t i = 0; i < n; i++) {
            halves[i] = (uint16_t)(i * 2654435761u >> 7);
            wanted += (halves[i] & 0x7c00u) == 0x7c00u;
        }
        assert(ts_count_nonfinite(halves, TS_F16, n) == wanted);
        free(halves);
    }
}

static void test_attention(void)
{
    for (size_t S = 1; S < 80; S = S < 9 ? S + 1 : 2 * S) {
        size_t A = S * (S + 1) / 2, where = 0;
        uint16_t *square = calloc(2 * S * S, 2), *packed = malloc(2 * A * 2), *back = malloc(2 * S * S * 2);
        for (size_t m = 0; m < 2; m++)
            for (size_t i = 0; i < S; i++)
                for (size_t j = 0; j <= i; j++)
                    square[(m * S + i) * S + j] = (uint16_t)(0x3000 + 7 * i + j + 31 * m);
        assert(ts_is_causal(square, TS_F16, 2, S, &where) == 1);
        ts_pack_triangle(square, 2, 2, S, packed);
        ts_unpack_triangle(packed, 2, 2, S, back);
        assert(memcmp(square, back, 2 * S * S * 2) == 0);
        uint16_t *mean = malloc(A * 2);
        assert(ts_head_mean(square, TS_F16, 2, S, 1, mean) == TS_OK);
        if (S > 1) {
            square[1] = 0x8000; /* minus zero is zero */
            assert(ts_is_causal(square, TS_F16, 2, S, &where) == 1);
            square[S * S + S - 1] = 1;
            assert(ts_is_causal(square, TS_F16, 2, S, &where) == 0 && where == S * S + S - 1);
        }
        free(mean);
        free(square);
        free(packed);
        free(back);
    }
    for (size_t n = 1; n < 40; n++) {
        size_t H = 1 + n % 13;
        uint16_t *in = malloc(H * n * 2), *fast = malloc(n * 2), *slow = malloc(n * 2);
        for (unsigned draw = 0; draw < 400; draw++) {
            for (size_t i = 0; i < H * n; i++) {
                in[i] = (uint16_t)((draw * 7919 + i * 104729 + n * 31) * 2654435761u >> 13);
                if (draw % 4 != 0) /* NaN and infinite values in every fourth; small ones */
                    in[i] &= draw % 4 == 1 ? 0xbfffu : draw % 4 == 2 ? 0x3fffu : 0x83ffu;
            }
            assert(ts_mean_rows(in, TS_F16, H, n, n, fast) == ts_mean_rows_portable(in, TS_F16, H, n, n, slow));
            assert(memcmp(fast, slow, n * 2) == 0);
        }
        free(in);
        free(fast);
        free(slow);
    }
    float weights[7] = {0.5f, 0.1f, 0.5f, NAN, 0.9f, 0.5f, 0.0f};
    unsigned char keep[7];
    float scratch[7];
    struct ts_edge_rule above = {0.2, 0}, top = {0, 3.0 / 7}, all = {0, 1};
    assert(ts_select_pairs(weights, 7, above, keep, scratch) == 4 && !keep[1] && !keep[3]);
    assert(ts_select_pairs(weights, 7, top, keep, scratch) == 3 && keep[4] && keep[0] && keep[2] && !keep[5]);
    assert(ts_select_pairs(weights, 7, all, keep, scratch) == 6 && !keep[3]);
}

static void test_pack(void)
{
    const size_t S = 11, H = 3, A = S * (S + 1) / 2;
    uint16_t *layers[2], *mean = malloc(2 * A * 2), *heads = malloc(2 * H * A * 2), *one = malloc(H * A * 2);
    for (size_t k = 0; k < 2; k++) {
        layers[k] = calloc(H * S * S, 2);
        for (size_t m = 0; m < H * S; m++)
            for (size_t j = 0; j <= m % S; j++)
                layers[k][m * S + j] = (uint16_t)(0x3000 + 7 * m + j + 31 * k);
    }
    layers[1][0] = 0x7c00;
    const void *const *sources = (const void *const *)layers;
    struct ts_pack pack = {.sources = sources, .L = 2, .H = H, .S = S, .causal = 1, .mean = 1, .out = mean};
    assert(ts_pack_attention(&pack) == TS_OK && pack.causal && pack.scan.nonfinite == 1);
    assert(pack.scan.crc == ts_crc32c(0, mean, 2 * A * 2));
    assert(ts_head_mean(layers[1], TS_F16, H, S, 1, one) == TS_OK && memcmp(one, mean + A, A * 2) == 0);
    pack.mean = 0;
    pack.stored = sources;
    pack.out = heads;
    assert(ts_pack_attention(&pack) == TS_OK && pack.causal && pack.scan.nonfinite == 1);
    assert(pack.scan.crc == ts_crc32c(0, heads, 2 * H * A * 2));
    ts_pack_triangle(layers[1], 2, H, S, one);
    assert(memcmp(one, heads + H * A, H * A * 2) == 0);
    layers[1][S - 1] = 1;
    assert(ts_pack_attention(&pack) == TS_OK && !pack.causal);
    pack.out = NULL;
    assert(ts_pack_attention(&pack) == TS_OK && !pack.causal && pack.scan.nonfinite == 1);
    assert(pack.scan.crc == ts_crc32c(ts_crc32c(0, layers[0], H * S * S * 2), layers[1], H * S * S * 2));
    float large[2] = {3e38f, 3e38f};
    const void *one_large[1] = {large};
    struct ts_pack beyond = {.sources = one_large, .source_dtype = TS_F32, .L = 1, .H = 2, .S = 1, .mean = 1, .out = mean};
    assert(ts_pack_attention(&beyond) == TS_ERR_RANGE && beyond.layer == 0);
    free(layers[0]);
    free(layers[1]);
    free(mean);
    free(heads);
    free(one);
}

static void test_map(void)
{
    char path[] = "/tmp/tracestore_core_XXXXXX";
    int fd = mkstemp(path);
    unsigned char file[2 * 8 + 2 * 16 + 4] = {0};
    file[16 + 8] = 8;
    file[32] = 8;
    file[32 + 8] = 8;
    uint32_t crc = ts_crc32c(0, file + 16, 32);
    for (int i = 0; i < 4; i++)
        file[48 + i] = (unsigned char)(crc >> 8 * i);
    assert(write(fd, file, sizeof file) == (ssize_t)sizeof file);
    struct ts_map map;
    assert(ts_map_open(&map, path, (int64_t)sizeof file + 1) == TS_ERR_SIZE);
    assert(ts_map_open(&map, path, (int64_t)sizeof file) == TS_OK && map.size == sizeof file);
    assert(ts_shard_check(map.base, map.size, 2, 8) == TS_OK);
    assert(ts_shard_check(map.base, map.size, 3, 8) == TS_ERR_SIZE);
    assert(ts_shard_check(map.base, map.size, UINT64_MAX, 8) == TS_ERR_SIZE);
    ts_map_close(&map);
    file[33] ^= 1;
    assert(ts_shard_check(file, sizeof file, 2, 8) == TS_ERR_CHECKSUM);
    assert(ftruncate(fd, 0) == 0);
    assert(ts_map_open(&map, path, -1) == TS_OK && map.base == NULL && map.size == 0);
    close(fd);
    unlink(path);
    assert(ts_map_open(&map, path, -1) == TS_ERR_IO);
    assert(ts_map_open(&map, "/tmp", -1) == TS_ERR_IO);
}

static void test_index(void)
{
    enum { N = 200 };
    unsigned char ids[N * 6];
    int64_t offsets[N + 1] = {0};
    int32_t samples[N];
    for (int i = 0; i < N; i++) {
        char text[8];
        int n = snprintf(text, sizeof text, "q%d", i / 2);
        memcpy(ids + offsets[i], text, (size_t)n);
        offsets[i + 1] = offsets[i] + n;
        samples[i] = i % 2;
    }
    uint32_t table[512] = {0};
    struct ts_index_part part = {N, 512, table, offsets, ids, sizeof ids, samples};
    assert(ts_index_build(&part, table) == -1);
    for (int i = 0; i < N; i++)
        assert(ts_index_find(&part, ids + offsets[i], (size_t)(offsets[i + 1] - offsets[i]), samples[i]) == i);
    assert(ts_index_find(&part, (const unsigned char *)"q1", 2, 7) == TS_INDEX_ABSENT);
    for (int i = 0; i < 512; i++)
        table[i] = 0xffffffffu;
    assert(ts_index_find(&part, ids, 2, 0) == TS_INDEX_CORRUPT);
    for (int i = 0; i < 512; i++)
        table[i] = 1; /* without a free slot */
    assert(ts_index_find(&part, ids, 1, 5) == TS_INDEX_CORRUPT);
    for (int64_t at = 0; at < 2; at++) { /* an id that begins, then one that ends, outside of the ids */
        int64_t before = offsets[at];
        offsets[at] = at == 0 ? -1 : (int64_t)sizeof ids + 1;
        assert(ts_index_find(&part, ids, 2, 0) == TS_INDEX_CORRUPT);
        offsets[at] = before;
    }
    samples[1] = 0;
    memset(table, 0, sizeof table);
    assert(ts_index_build(&part, table) == 1);
}

static void count_range(void *context, size_t begin, size_t end)
{
    for (size_t i = begin; i < end; i++)
        __atomic_fetch_add((int *)context + i, 1, __ATOMIC_RELAXED);
}

static void test_parallel(void)
{
    for (size_t n = 0; n < 70; n += 23)
        for (int threads = 0; threads < 5; threads++) {
            int *seen = calloc(n + 1, sizeof *seen);
            ts_parallel_for(n, 4, threads, count_range, seen);
            for (size_t i = 0; i < n; i++)
                assert(seen[i] == 1);
            free(seen);
        }
}

static void test_edges(void)
{
    uint16_t weights[6] = {0x3c00, 0x0000, 0x3800, 0x3400, 0x3000, 0x2c00};
    int32_t stored[4] = {1, 0, 0, 1};
    struct ts_graph graphs[3] = {
        {.weights = (unsigned char *)weights, .num_tokens = 3, .causal = 1},
        {.weights = (unsigned char *)weights, .num_tokens = 2, .causal = 1, .first_node = 3},
        {.weights = (unsigned char *)weights, .num_tokens = 2, .pairs = stored, .first_node = 5, .num_edges = 2}};
    struct ts_edge_options form = {TS_F16, TS_F16, {0, 0}};
    assert(ts_count_edges(graphs, 3, &form, 2) == TS_OK);
    assert(graphs[0].num_edges == 5 && graphs[1].num_edges == 2 && graphs[2].num_edges == 2);
    graphs[1].first_edge = 5;
    graphs[2].first_edge = 7;
    for (int threads = 1; threads < 4; threads++) {
        int64_t *source = malloc(9 * 8), *target = malloc(9 * 8);
        uint16_t *out = malloc(9 * 2);
        assert(ts_fill_edges(graphs, 3, &form, threads, source, target, (unsigned char *)out) == TS_OK);
        assert(source[1] == 1 && target[1] == 1 && source[2] == 0 && target[2] == 2 && source[5] == 3 && target[6] == 4);
        assert(out[4] == 0x2c00 && out[6] == 0x3800 && source[7] == 6 && target[7] == 5 && target[8] == 6);
        free(source);
        free(target);
        free(out);
    }
    graphs[0].num_edges = 4; /* the weights changed: nothing is written past what was counted */
    int64_t source[9], target[9];
    uint16_t out[9];
    assert(ts_fill_edges(graphs, 1, &form, 1, source, target, (unsigned char *)out) == TS_ERR_BOUNDS);
    form.out = TS_BF16;
    assert(ts_count_edges(graphs, 3, &form, 1) == TS_ERR_DTYPE);
}

/* Large enough for several blocks, a table, streamed lines and threads; every start of a line. */
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
        struct ts_edge_options form = {TS_F32, TS_F32, rules[r]};
        assert(ts_count_edges(graphs, G, &form, 3) == TS_OK);
        int64_t total = 0;
        for (int g = 0; g < G; g++) {
            graphs[g].first_edge = total;
            total += graphs[g].num_edges;
        }
        int64_t *source = malloc((size_t)total * 8), *target = malloc((size_t)total * 8), *again = malloc((size_t)total * 8);
        float *out = malloc((size_t)total * 4);
        assert(ts_fill_edges(graphs, G, &form, 1, source, target, (unsigned char *)out) == TS_OK);
        for (int64_t e = 0, g = 0; e < total; e++) {
            while (e >= graphs[g].first_edge + graphs[g].num_edges)
                g++;
            int64_t i = target[e] - graphs[g].first_node, j = source[e] - graphs[g].first_node;
            int64_t at = graphs[g].causal ? i * (i + 1) / 2 + j : i * (int64_t)graphs[g].num_tokens + j;
            assert(i >= 0 && j >= 0 && (size_t)i < graphs[g].num_tokens && (size_t)j < graphs[g].num_tokens);
            assert(((const float *)graphs[g].weights)[at] == out[e]);
        }
        assert(ts_fill_edges(graphs, G, &form, 4, again, target, (unsigned char *)out) == TS_OK);
        assert(memcmp(source, again, (size_t)total * 8) == 0);
        free(source), free(target), free(again), free(out);
    }
    free(weights);
}

static void test_copies(void)
{
    enum { N = 300001 };
    uint16_t *in = malloc(N * 2), *out = malloc(N * 2);
    float *wide = malloc(N * 4);
    for (int i = 0; i < N; i++)
        in[i] = (uint16_t)(i % 0x7c00);
    for (int threads = 1; threads < 4; threads += 2) {
        struct ts_copy copies[2] = {{(unsigned char *)in, (unsigned char *)out, 77},
                                    {(unsigned char *)(in + 77), (unsigned char *)(out + 77), N - 77}};
        memset(out, 0, N * 2);
        assert(ts_copy_many(copies, 2, TS_F16, TS_F16, threads) == TS_OK && memcmp(in, out, N * 2) == 0);
        copies[0].dst = (unsigned char *)wide;
        copies[1].dst = (unsigned char *)(wide + 77);
        assert(ts_copy_many(copies, 2, TS_F16, TS_F32, threads) == TS_OK);
        for (int i = 0; i < N; i++)
            assert(wide[i] == ts_f16_to_f32_portable(in[i]));
        assert(ts_copy_many(copies, 2, TS_F32, TS_F16, threads) == TS_ERR_DTYPE);
    }
    unsigned char bytes[300], copied[300];
    for (int i = 0; i < 300; i++)
        bytes[i] = (unsigned char)i;
    for (int shift = 0; shift < 64; shift++) {
        memset(copied, 0xee, sizeof copied);
        ts_stream_copy(copied + shift, bytes + 3, (size_t)(200 - shift));
        ts_stream_fence();
        assert(memcmp(copied + shift, bytes + 3, (size_t)(200 - shift)) == 0 && copied[200] == 0xee);
        assert(shift == 0 || copied[shift - 1] == 0xee);
    }
    free(in), free(out), free(wide);
}

static void count_up(void *context)
{
    __atomic_fetch_add((int *)context, 1, __ATOMIC_RELAXED);
}

static void test_crew(void)
{
    enum { JOBS = 50 };
    for (int threads = 1; threads < 5; threads++) {
        struct ts_thread_pool *crew = ts_thread_pool_start(threads);
        struct ts_job jobs[JOBS] = {{0}};
        int done[JOBS] = {0}, left = 0;
        assert(crew != NULL);
        for (int k = 0; k < JOBS; k++) {
            jobs[k].run = count_up;
            jobs[k].context = &done[k];
            ts_thread_pool_submit(crew, &jobs[k]);
        }
        for (int k = 0; k < JOBS; k += 2)
            while (!ts_thread_pool_wait(crew, &jobs[k], 10))
                ;
        for (int k = JOBS - 1; k > JOBS / 2; k -= 2)
            ts_thread_pool_cancel(crew, &jobs[k]);
        ts_thread_pool_stop(crew);
        for (int k = 0; k < JOBS; k++) {
            assert(done[k] == 1 || (done[k] == 0 && k % 2 == 1));
            left += done[k];
        }
        assert(left >= JOBS / 2);
    }
}

/* Four pages of a file, mapped; `left` bytes of it are kept after that. */
static unsigned char *cut_map(struct ts_map *map, off_t left)
{
    char path[] = "/tmp/tracestore_core_XXXXXX";
    int fd = mkstemp(path);
    unsigned char page[4096];
    memset(page, 0x3c, sizeof page);
    for (int i = 0; i < 4; i++)
        assert(write(fd, page, sizeof page) == (ssize_t)sizeof page);
    assert(ts_map_open(map, path, 4 * 4096) == TS_OK && ts_map_record_tail(map) == TS_OK && ts_map_is_intact(map));
    assert(ftruncate(fd, left) == 0);
    close(fd);
    unlink(path);
    return (unsigned char *)map->base;
}

static int read_byte(void *context)
{
    return *(volatile unsigned char *)context;
}

static int read_inside(void *context)
{
    int ret = ts_sigbus_guard(read_byte, context);
    return ret == TS_ERR_FAULT ? read_byte((unsigned char *)context - 2 * 4096) : ret;
}

static void read_in_crew(void *context)
{
    unsigned char **at = context;
    *at = ts_sigbus_guard(read_byte, *at) == TS_ERR_FAULT && ts_sigbus_fault() == *at ? NULL : *at;
}

static void test_guard(void)
{
    struct ts_map map;
    unsigned char *base = cut_map(&map, 5000), out[4 * 4096];
    assert(ts_sigbus_guard(read_byte, base) == 0x3c && ts_sigbus_guard(read_byte, base + 5000) == 0);
    for (int i = 0; i < 3; i++)
        assert(ts_sigbus_guard(read_byte, base + 8192 + i) == TS_ERR_FAULT && ts_sigbus_fault() == base + 8192 + i);
    /* An inner guard's fault is not the outer one's, and an outer one's comes after it. */
    assert(ts_sigbus_guard(read_inside, base + 8192) == 0x3c);
    assert(ts_sigbus_guard(read_inside, base + 4 * 4096 - 1) == 0);
    /* What was read is right only if nothing was cut off, also behind it. */
    assert(ts_map_copy(&map, 0, 10, out) == TS_ERR_FAULT && ts_sigbus_fault() == map.tail);
    assert(ts_map_copy(&map, 8192, 10, out) == TS_ERR_FAULT && ts_map_copy(&map, 8192, 0, out) == TS_OK);
    struct ts_thread_pool *crew = ts_thread_pool_start(2);
    struct ts_job jobs[20] = {{0}};
    unsigned char *places[20];
    for (int k = 0; k < 20; k++) {
        places[k] = base + (k % 2 ? 8192 + k : k);
        jobs[k].run = read_in_crew;
        jobs[k].context = &places[k];
        ts_thread_pool_submit(crew, &jobs[k]);
    }
    for (int k = 0; k < 20; k++) {
        while (!ts_thread_pool_wait(crew, &jobs[k], 1000))
            ;
        assert((places[k] == NULL) == k % 2);
    }
    ts_thread_pool_stop(crew);
    ts_map_close(&map);
    base = cut_map(&map, 4 * 4096 - 1); /* the marked byte alone */
    assert(ts_sigbus_guard(read_byte, base + 4 * 4096 - 1) == 0 && !ts_map_is_intact(&map));
    ts_map_close(&map);
}

/* Stored edges between nodes that their graph does not have, in a whole and in a part of a block. */
static void test_edges_outside(void)
{
    enum { S = 5, E = 300 };
    static int32_t pairs[2 * E];
    static uint16_t weights[E], out[E];
    static int64_t source[E], target[E];
    struct ts_graph graph = {.weights = (unsigned char *)weights, .num_tokens = S, .pairs = pairs, .num_edges = E};
    struct ts_edge_options form = {TS_F16, TS_F16, {0, 0}};
    assert(ts_fill_edges(&graph, 1, &form, 1, source, target, (unsigned char *)out) == TS_OK);
    int32_t outside[] = {S, -1, INT32_MAX, INT32_MIN};
    for (int at = 0; at < 2 * E; at += 299)
        for (int k = 0; k < 4; k++) {
            pairs[at] = outside[k];
            assert(ts_fill_edges(&graph, 1, &form, 1, source, target, (unsigned char *)out) == TS_ERR_NODE);
            pairs[at] = S - 1;
        }
}

/* Every way to gather from a map that ends early, by one thread and by several. */
static void test_gather_faults(void)
{
    enum { G = 12, S = 36, P = S * (S + 1) / 2 };
    struct ts_map map;
    unsigned char *base = cut_map(&map, 8192);
    struct ts_graph graphs[G], stored[G];
    static int64_t source[G * P], target[G * P];
    static float weights[G * P];
    for (int g = 0; g < G; g++) {
        graphs[g] = (struct ts_graph){.weights = base + g * 1000, .num_tokens = S, .causal = 1,
                                      .first_edge = g * P, .num_edges = P};
        /* Of so many tokens that whatever lies in the map is one of them. */
        stored[g] = (struct ts_graph){.weights = base, .num_tokens = (size_t)1 << 40, .pairs = (int32_t *)(base + g * 1000),
                                      .first_edge = g * P, .num_edges = P};
    }
    struct ts_copy copies[2] = {{base, (unsigned char *)weights, 2000}, {base + 4000, (unsigned char *)(weights + 2000), 3000}};
    for (int threads = 1; threads < 4; threads++) {
        struct ts_edge_options form = {TS_F16, TS_F16, {0, 0}}, wide = {TS_F16, TS_F32, {0, 1}};
        assert(ts_copy_many(copies, 1, TS_F16, TS_F16, threads) == TS_OK);
        assert(ts_copy_many(copies, 2, TS_F16, TS_F16, threads) == TS_ERR_FAULT && ts_sigbus_fault() >= (void *)(base + 8192));
        assert(ts_copy_many(copies, 2, TS_F16, TS_F32, threads) == TS_ERR_FAULT);
        assert(ts_fill_edges(graphs, 4, &form, threads, source, target, (unsigned char *)weights) == TS_OK);
        assert(ts_fill_edges(graphs, G, &form, threads, source, target, (unsigned char *)weights) == TS_ERR_FAULT);
        assert(ts_fill_edges(graphs, G, &wide, threads, source, target, (unsigned char *)weights) == TS_ERR_FAULT);
        assert(ts_fill_edges(stored, G, &form, threads, source, target, (unsigned char *)weights) == TS_ERR_FAULT);
        assert(ts_pack_graphs(graphs, G, &form, threads, (unsigned char *)weights) == TS_ERR_FAULT);
        assert(ts_pack_graphs(graphs, G, &wide, threads, (unsigned char *)weights) == TS_ERR_FAULT);
        struct ts_graph counted[G];
        memcpy(counted, graphs, sizeof counted);
        assert(ts_count_edges(counted, G, &form, threads) == TS_ERR_FAULT);
        assert(ts_average_heads(counted, G, TS_F16, 1, (uint16_t *)weights, threads) == TS_ERR_FAULT);
        const unsigned char *at = ts_sigbus_fault();
        assert(at >= base + 8192 && at < base + map.size);
    }
    ts_map_close(&map);
}

static unsigned char *stepping_back;
static volatile sig_atomic_t num_calls;
static sigjmp_buf way_out;

/* What a child ran counts in `make coverage-c`. */
#if defined(TS_COVERAGE)
extern void __gcov_dump(void);
static void keep_counts(void) { __gcov_dump(); }
#else
static void keep_counts(void) {}
#endif

static void count_and_end(int number)
{
    (void)number;
    num_calls++;
    keep_counts();
    _exit(40 + num_calls);
}

static void jump_out(int number, siginfo_t *info, void *context)
{
    (void)number, (void)context;
    assert(info->si_addr == stepping_back);
    num_calls++;
    siglongjmp(way_out, 1);
}

static void come_back(int number)
{
    (void)number;
    num_calls++;
}

static struct sigaction before_theirs;
static void give_back(int number)
{
    num_calls++;
    sigaction(number, &before_theirs, NULL);
    raise(number);
}

/* How a child ends that touches a page outside a guard, after `way` of installing handlers. */
static int end_of_child(int way, unsigned char *at)
{
    pid_t child = fork();
    if (child != 0) {
        int status = 0;
        assert(waitpid(child, &status, 0) == child);
        return status;
    }
    stepping_back = at;
    struct sigaction theirs = {.sa_handler = SIG_DFL};
    sigaction(SIGBUS, &theirs, NULL); /* also takes the sanitizer's away */
    if (way == 1 || way == 2)
        theirs.sa_handler = count_and_end;
    if (way == 3 || way == 4) {
        theirs.sa_sigaction = jump_out;
        theirs.sa_flags = SA_SIGINFO | SA_NODEFER;
    }
    if (way == 5)
        theirs.sa_handler = come_back;
    if (way == 6) {
        theirs.sa_handler = give_back;
        theirs.sa_flags = SA_NODEFER;
    }
    if (way == 7)
        theirs.sa_handler = SIG_IGN;
    if (way != 1 && way != 3) /* theirs comes over ours, and ours over theirs again */
        assert(ts_sigbus_guard(read_byte, at) == TS_ERR_FAULT);
    sigaction(SIGBUS, &theirs, &before_theirs);
    assert(ts_sigbus_guard(read_byte, at) == TS_ERR_FAULT && num_calls == 0);
    if (way == 3 || way == 4)
        for (volatile int i = 0; i < 3; i++)
            if (sigsetjmp(way_out, 1) == 0)
                read_byte(at);
    if (num_calls == 3) {
        keep_counts();
        _exit(43);
    }
    read_byte(at);
    _exit(1);
}

static void test_other_handlers(void)
{
    struct ts_map map;
    unsigned char *at = cut_map(&map, 0) + 7;
    for (int way = 0; way < 8; way++) {
#if defined(__SANITIZE_THREAD__)
        if (way == 6) /* the thread sanitizer holds back what a handler raises */
            continue;
#endif
        int status = end_of_child(way, at);
        if (way == 1 || way == 2)
            assert(WIFEXITED(status) && WEXITSTATUS(status) == 41);
        else if (way == 3 || way == 4)
            assert(WIFEXITED(status) && WEXITSTATUS(status) == 43);
        else
            assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    }
    ts_map_close(&map);
}

static void test_shuffle(void)
{
    for (uint64_t n = 1; n < 200; n = n * 3 / 2 + 1) {
        int64_t positions[400], out[400], window[64];
        unsigned char seen[400] = {0}, taken[400] = {0};
        for (uint64_t k = 0; k < n; k++)
            positions[k] = (int64_t)k;
        ts_permute(positions, n, n, 42, out);
        for (uint64_t k = 0; k < n; k++)
            assert(out[k] >= 0 && (uint64_t)out[k] < n && !seen[out[k]]++);
        struct ts_shuffle_buffer buffer = {window, n, n < 64 ? n : 64, 7, 0};
        ts_shuffle_buffer_init(&buffer);
        ts_shuffle_buffer_next(&buffer, n / 2, NULL);
        ts_shuffle_buffer_init(&buffer);
        ts_shuffle_buffer_next(&buffer, n, out);
        for (uint64_t k = 0; k < n; k++)
            assert(out[k] >= 0 && (uint64_t)out[k] < n && !taken[out[k]]++);
    }
}

static void test_blocks(void)
{
    const size_t sizes[] = {0, 1, 65536, 65537, (2 << 20) - 1, 2 << 20, (5 << 20) + 3};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char *block = ts_huge_alloc(sizes[i]);
        size_t size = ts_huge_size(sizes[i]);
        assert(block != NULL && size >= sizes[i] && ((uintptr_t)block & (size < (2 << 20) ? 4095 : (2 << 20) - 1)) == 0);
        block[0] = block[size - 1] = 1;
        ts_huge_free(block, sizes[i]);
    }
    ts_huge_free(NULL, 1);
}

/* What platform.h decides, and its users: hints about maps, waiting with a limit, counts of faults. */
static void test_platform(void)
{
    struct ts_map map;
    unsigned char *base = cut_map(&map, 4 * 4096);
    ts_map_prefetch(base + 100, 0);
    ts_map_prefetch(base + 5000, 3000);
    ts_map_evict(base, 4 * 4096);
    for (int i = 0; i < 4; i++)
        assert(base[i * 4096] == 0x3c);
    int64_t faults = ts_major_faults();
    assert(faults >= 0 && ts_major_faults() >= faults);
    ts_map_close(&map);

    char path[] = "/tmp/tracestore_core_XXXXXX";
    int fd = mkstemp(path);
    assert(fd >= 0 && unlink(path) == 0 && ftruncate(fd, 8192) == 0);
    int *one = ts_shared_map(fd, 8192), *other = ts_shared_map(fd, 8192);
    assert(one != NULL && other != NULL && ts_shared_map(-1, 8192) == NULL);
    ts_shared_incref(one);
    ts_shared_incref(other);
    assert(ts_shared_refcount(one) == 2);
    ts_shared_decref(one);
    assert(ts_shared_refcount(other) == 1);
    ts_shared_unmap(one, 8192);
    ts_shared_unmap(other, 8192);
    ts_shared_unmap(NULL, 8192);
    close(fd);
    assert(ts_huge_alloc(SIZE_MAX / 2) == NULL);
}

static int gate_is_open;

static void wait_at_gate(void *context)
{
    __atomic_store_n((int *)context, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&gate_is_open, __ATOMIC_ACQUIRE))
        usleep(1000);
}

static void open_gate(void *context)
{
    (void)context;
    usleep(20000);
    __atomic_store_n(&gate_is_open, 1, __ATOMIC_RELEASE);
}

/* Waits that end by time, jobs that are cancelled in the queue and while they run. */
static void test_waiting(void)
{
    struct ts_thread_pool *crew = ts_thread_pool_start(1), *helper = ts_thread_pool_start(1);
    int has_begun = 0;
    struct ts_job first = {.run = wait_at_gate, .context = &has_begun}, jobs[3] = {{0}}, opening = {.run = open_gate};
    for (int i = 0; i < 3; i++)
        jobs[i] = (struct ts_job){.run = open_gate};
    ts_thread_pool_submit(crew, &first);
    while (!__atomic_load_n(&has_begun, __ATOMIC_ACQUIRE))
        usleep(1000);
    for (int i = 0; i < 3; i++)
        ts_thread_pool_submit(crew, &jobs[i]);
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    assert(!ts_thread_pool_wait(crew, &first, 999));
    clock_gettime(CLOCK_MONOTONIC, &after);
    assert(after.tv_sec - before.tv_sec >= 1 || after.tv_nsec - before.tv_nsec >= 900000000);
    assert(!ts_thread_pool_wait(crew, &jobs[0], 0));
    ts_thread_pool_cancel(crew, &jobs[1]);
    ts_thread_pool_cancel(crew, &jobs[2]);
    assert(ts_thread_pool_wait(crew, &jobs[1], 0) && ts_thread_pool_wait(crew, &jobs[2], 0));
    assert(!__atomic_load_n(&gate_is_open, __ATOMIC_ACQUIRE));
    ts_thread_pool_submit(helper, &opening);
    ts_thread_pool_cancel(crew, &first);
    assert(__atomic_load_n(&gate_is_open, __ATOMIC_ACQUIRE));
    ts_thread_pool_stop(crew);
    ts_thread_pool_stop(helper);
    assert(ts_thread_pool_start(0) == NULL);
}

/* The dense and the sparse form of one batch, and each instruction set, against each other; odd sizes. */
static void test_gine(void)
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
    struct ts_gine dense = {G, N, D, A, 1, nodes, weights, a, TS_F32, 0, NULL, NULL, x, TS_F32, 2, 0};
    struct ts_gine sparse = {G, N, D, E, 1, nodes, edges, kept, TS_F32, 0, source, target, x, TS_F32, 3, 0};
    enum { FORMS = 4 };
    float *out[FORMS], *gx[FORMS], gw[FORMS][D], gb[FORMS][D];
    for (int k = 0; k < FORMS; k++) {
        struct ts_gine form = k ? sparse : dense, *g = &form;
        form.max_simd_level = k > 1 ? k : 0;
        out[k] = malloc(N * D * 4);
        gx[k] = malloc(N * D * 4);
        void *forward = malloc(ts_gine_workspace(g, 4, 0)), *backward = malloc(ts_gine_workspace(g, 4, 1));
        assert(ts_gine_check(g) == TS_OK);
        assert(ts_gine_forward_f32(g, w, b, out[k], forward) == TS_OK);
        assert(ts_gine_backward_f32(g, w, b, x, gx[k], gw[k], gb[k], backward) == TS_OK);
        assert(ts_gine_backward_f32(g, w, b, x, NULL, gw[k], gb[k], backward) == TS_OK);
        free(forward);
        free(backward);
    }
    /* The second half of the graphs alone, in the numbering of the whole. */
    struct ts_gine part = sparse;
    part.num_graphs = G - G / 2;
    part.node_ptr += G / 2;
    part.weight_ptr += G / 2;
    part.num_rows = (size_t)(nodes[G] - nodes[G / 2]);
    part.x = x + nodes[G / 2] * D;
    float *alone = malloc(part.num_rows * D * 4);
    void *workspace = malloc(ts_gine_workspace(&part, 4, 0));
    assert(ts_gine_check(&part) == TS_OK && ts_gine_forward_f32(&part, w, b, alone, workspace) == TS_OK);
    assert(memcmp(alone, out[1] + nodes[G / 2] * D, part.num_rows * D * 4) == 0);
    target[E - 1] = nodes[G];
    assert(ts_gine_forward_f32(&part, w, b, alone, workspace) == TS_ERR_BOUNDS);
    part.num_rows++;
    assert(ts_gine_check(&part) == TS_ERR_BOUNDS);
    dense.num_weights--;
    assert(ts_gine_check(&dense) == TS_ERR_BOUNDS);
    free(alone);
    free(workspace);
    for (int k = 1; k < FORMS; k++) {
        for (size_t i = 0; i < N * D; i++)
            assert(fabsf(out[0][i] - out[k][i]) < 1e-5f && fabsf(gx[0][i] - gx[k][i]) < 1e-5f);
        for (int d = 0; d < D; d++)
            assert(fabsf(gw[0][d] - gw[k][d]) < 1e-4f && fabsf(gb[0][d] - gb[k][d]) < 1e-4f);
    }
    /* As three channels with the same weights, and w in three parts: the sums of the dense form. */
    enum { C = 3 };
    float *thrice = malloc(C * A * 4), parts[C * D], grad_w[C * D], grad_b[D];
    int64_t at[G + 1];
    for (int g = 0; g <= G; g++)
        at[g] = C * weights[g];
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++)
            memcpy(thrice + at[g] + c * (weights[g + 1] - weights[g]), a + weights[g],
                   (size_t)(weights[g + 1] - weights[g]) * 4);
    for (int d = 0; d < D; d++) {
        parts[d] = 2 * w[d];
        parts[D + d] = w[d] / 2;
        parts[2 * D + d] = -1.5f * w[d];
    }
    for (int simd = 2; simd <= 4; simd++) {
        struct ts_gine many = {G, N, D, C * A, C, nodes, at, thrice, TS_F32, 0, NULL, NULL, x, TS_F32, 2, simd};
        void *room = malloc(ts_gine_workspace(&many, 4, 1));
        assert(ts_gine_check(&many) == TS_OK);
        assert(ts_gine_forward_f32(&many, parts, b, out[1], room) == TS_OK);
        assert(ts_gine_backward_f32(&many, parts, b, x, gx[1], grad_w, grad_b, room) == TS_OK);
        assert(ts_gine_backward_f32(&many, parts, b, x, NULL, grad_w, grad_b, room) == TS_OK);
        for (size_t i = 0; i < N * D; i++)
            assert(fabsf(out[0][i] - out[1][i]) < 1e-5f && fabsf(gx[0][i] - gx[1][i]) < 1e-5f);
        for (int d = 0; d < C * D; d++)
            assert(fabsf(gw[0][d % D] - grad_w[d]) < 1e-4f && fabsf(gb[0][d % D] - grad_b[d % D]) < 1e-4f);
        free(room);
        many.num_weights--;
        assert(ts_gine_check(&many) == TS_ERR_BOUNDS);
        many.num_weights++;
        many.source = many.target = nodes;
        assert(ts_gine_check(&many) == TS_ERR_BOUNDS);
    }
    free(thrice);
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

int main(void)
{
    test_errors();
    for (int most = 1; most <= 4; most++) {
        ts_simd_limit(most);
        test_crc();
        test_half();
        test_attention();
        test_pack();
        test_edges();
        test_many_edges();
    }
    test_map();
    test_index();
    test_parallel();
    test_copies();
    test_crew();
    test_guard();
    test_edges_outside();
    test_gather_faults();
    test_other_handlers();
    test_shuffle();
    test_blocks();
    test_gine();
    test_platform();
    test_waiting();
    puts("21 passed, 0 failed");
    return 0;
}
