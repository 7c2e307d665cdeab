#include "attention.h"
#include "crc32c.h"
#include "pack.h"
#include "test_core.h"

static void test_pack_attention(void)
{
    const size_t S = 11, H = 3, A = S * (S + 1) / 2;
    uint16_t *layers[2], *mean = malloc(2 * A * 2), *heads = malloc(2 * H * A * 2), *expected = malloc(H * A * 2);
    for (size_t k = 0; k < 2; k++) {
        layers[k] = calloc(H * S * S, 2);
        for (size_t m = 0; m < H * S; m++)
            for (size_t j = 0; j <= m % S; j++)
                layers[k][m * S + j] = (uint16_t)(0x3000 + 7 * m + j + 31 * k);
    }
    layers[1][0] = 0x7c00;
    const void *const *sources = (const void *const *)layers;
    struct ts_pack pack = {.sources = sources, .L = 2, .H = H, .S = S, .causal = 1, .mean = 1, .out = mean};
    CHECK(ts_pack_attention(&pack) == TS_OK && pack.causal && pack.scan.nonfinite == 1);
    CHECK(pack.scan.crc == ts_crc32c(0, mean, 2 * A * 2));
    uint32_t layer_crcs[2];
    pack.scan.layer_crcs = layer_crcs;
    CHECK(ts_pack_attention(&pack) == TS_OK && pack.scan.crc == ts_crc32c(0, mean, 2 * A * 2));
    CHECK(layer_crcs[0] == ts_crc32c(0, mean, A * 2) && layer_crcs[1] == ts_crc32c(0, mean + A, A * 2));
    pack.scan.layer_crcs = NULL;
    CHECK(ts_head_mean(layers[1], TS_F16, H, S, 1, expected) == TS_OK && memcmp(expected, mean + A, A * 2) == 0);
    pack.mean = 0;
    pack.stored = sources;
    pack.out = heads;
    CHECK(ts_pack_attention(&pack) == TS_OK && pack.causal && pack.scan.nonfinite == 1);
    CHECK(pack.scan.crc == ts_crc32c(0, heads, 2 * H * A * 2));
    ts_pack_triangle(layers[1], 2, H, S, expected);
    CHECK(memcmp(expected, heads + H * A, H * A * 2) == 0);
    layers[1][S - 1] = 1;
    CHECK(ts_pack_attention(&pack) == TS_OK && !pack.causal);
    pack.out = NULL;
    CHECK(ts_pack_attention(&pack) == TS_OK && !pack.causal && pack.scan.nonfinite == 1);
    CHECK(pack.scan.crc == ts_crc32c(ts_crc32c(0, layers[0], H * S * S * 2), layers[1], H * S * S * 2));
    float large[2] = {3e38f, 3e38f};
    const void *large_layer[1] = {large};
    struct ts_pack overflowing = {.sources = large_layer, .source_dtype = TS_F32, .L = 1, .H = 2, .S = 1, .mean = 1, .out = mean};
    CHECK(ts_pack_attention(&overflowing) == TS_ERR_RANGE && overflowing.layer == 0);
    free(layers[0]);
    free(layers[1]);
    free(mean);
    free(heads);
    free(expected);
}

void test_pack(void)
{
    at_every_simd_level(test_pack_attention);
}
