#include "attention.h"
#include "test_core.h"

static void test_triangles(void)
{
    for (size_t S = 1; S < 80; S = S < 9 ? S + 1 : 2 * S) {
        size_t A = S * (S + 1) / 2;
        uint16_t *square = calloc(2 * S * S, 2), *packed = malloc(2 * A * 2), *back = malloc(2 * S * S * 2);
        for (size_t m = 0; m < 2; m++)
            for (size_t i = 0; i < S; i++)
                for (size_t j = 0; j <= i; j++)
                    square[(m * S + i) * S + j] = (uint16_t)(0x3000 + 7 * i + j + 31 * m);
        CHECK(ts_is_causal(square, TS_F16, 2, S) == 1);
        ts_pack_triangle(square, 2, 2, S, packed);
        ts_unpack_triangle(packed, 2, 2, S, back);
        CHECK(memcmp(square, back, 2 * S * S * 2) == 0);
        uint16_t *mean = malloc(A * 2);
        CHECK(ts_head_mean(square, TS_F16, 2, S, 1, mean) == TS_OK);
        if (S > 1) {
            square[1] = 0x8000; /* minus zero counts as zero */
            CHECK(ts_is_causal(square, TS_F16, 2, S) == 1);
            square[S * S + S - 1] = 1;
            CHECK(ts_is_causal(square, TS_F16, 2, S) == 0);
        }
        free(mean);
        free(square);
        free(packed);
        free(back);
    }
}

static void test_mean_rows(void)
{
    for (size_t n = 1; n < 40; n++) {
        size_t H = 1 + n % 13;
        uint16_t *in = malloc(H * n * 2), *out = malloc(n * 2), *expected = malloc(n * 2);
        for (unsigned draw = 0; draw < 400; draw++) {
            for (size_t i = 0; i < H * n; i++) {
                in[i] = (uint16_t)((draw * 7919 + i * 104729 + n * 31) * 2654435761u >> 13);
                if (draw % 4 != 0) /* Every fourth draw has NaN and infinite values. */
                    in[i] &= draw % 4 == 1 ? 0xbfffu : draw % 4 == 2 ? 0x3fffu : 0x83ffu;
            }
            ts_simd_limit(TS_SIMD_BASELINE);
            CHECK(ts_mean_rows(in, TS_F16, H, n, n, expected) == TS_OK);
            for (int level = TS_SIMD_BASELINE + 1; level <= TS_SIMD_HIGHEST; level++) {
                ts_simd_limit(level);
                CHECK(ts_mean_rows(in, TS_F16, H, n, n, out) == TS_OK && memcmp(out, expected, n * 2) == 0);
            }
        }
        free(in);
        free(out);
        free(expected);
    }
}

void test_attention(void)
{
    at_every_simd_level(test_triangles);
    test_mean_rows();
}
