#include "copy.h"
#include "sigbus_guard.h"
#include "test_core.h"

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
        CHECK(ts_copy_many(copies, 2, TS_F16, TS_F16, threads) == TS_OK && memcmp(in, out, N * 2) == 0);
        copies[0].dst = (unsigned char *)wide;
        copies[1].dst = (unsigned char *)(wide + 77);
        CHECK(ts_copy_many(copies, 2, TS_F16, TS_F32, threads) == TS_OK);
        for (int i = 0; i < N; i++)
            CHECK(wide[i] == ts_f16_to_f32_portable(in[i]));
        CHECK(ts_copy_many(copies, 2, TS_F32, TS_F16, threads) == TS_ERR_DTYPE);
    }
    free(in), free(out), free(wide);
}

static void test_truncated_sources(void)
{
    struct ts_map map;
    unsigned char *base = map_truncated_file(&map, 8192);
    static float out[5000];
    struct ts_copy copies[2] = {{base, (unsigned char *)out, 2000}, {base + 4000, (unsigned char *)(out + 2000), 3000}};
    for (int threads = 1; threads < 4; threads++) {
        CHECK(ts_copy_many(copies, 1, TS_F16, TS_F16, threads) == TS_OK);
        CHECK(ts_copy_many(copies, 2, TS_F16, TS_F16, threads) == TS_ERR_FAULT);
        CHECK(ts_sigbus_fault() >= (void *)(base + 8192));
        CHECK(ts_copy_many(copies, 2, TS_F16, TS_F32, threads) == TS_ERR_FAULT);
    }
    ts_map_close(&map);
}

void test_copy(void)
{
    at_every_simd_level(test_copies);
    test_truncated_sources();
}
