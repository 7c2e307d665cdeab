#include "rows.h"
#include "sigbus_guard.h"
#include "test_core.h"

enum { ROWS = 301 };

/* Gather the rows of two arrays, of which the second holds them in reverse, forward and to targets in reverse. */
static void gather(size_t items)
{
    uint16_t *in = malloc(ROWS * items * 2 + 1), *reversed = malloc(ROWS * items * 2 + 1), *out = malloc(ROWS * items * 2 + 1);
    float *wide = malloc(ROWS * items * 4 + 1);
    int32_t array[ROWS];
    int64_t row[ROWS], target[ROWS];
    for (size_t i = 0; i < ROWS; i++) {
        array[i] = (int32_t)(i % 2);
        row[i] = i % 2 ? (int64_t)(ROWS - 1 - i) : (int64_t)i;
        target[i] = (int64_t)(ROWS - 1 - i);
        for (size_t k = 0; k < items; k++)
            in[i * items + k] = reversed[(ROWS - 1 - i) * items + k] = (uint16_t)((i * 31 + k) % 0x7c00);
    }
    const unsigned char *arrays[2] = {(unsigned char *)in, (unsigned char *)reversed};
    for (int threads = 1; threads < 4; threads += 2) {
        struct ts_rows rows = {.arrays = arrays, .array = array, .row = row, .row_items = items, .in = TS_F16,
                               .out = TS_F16, .dst = (unsigned char *)out};
        memset(out, 0xee, ROWS * items * 2);
        CHECK(ts_gather_rows(&rows, ROWS, threads) == TS_OK && memcmp(in, out, ROWS * items * 2) == 0);
        rows.target = target;
        CHECK(ts_gather_rows(&rows, ROWS, threads) == TS_OK && memcmp(reversed, out, ROWS * items * 2) == 0);
        rows.out = TS_F32;
        rows.dst = (unsigned char *)wide;
        CHECK(ts_gather_rows(&rows, ROWS, threads) == TS_OK);
        for (size_t i = 0; i < ROWS * items; i++)
            CHECK(wide[i] == ts_f16_to_f32_portable(reversed[i]));
        rows.out = TS_BF16;
        CHECK(ts_gather_rows(&rows, ROWS, threads) == TS_ERR_DTYPE);
    }
    free(in), free(reversed), free(out), free(wide);
}

static void test_rows_of_every_size(void)
{
    static const size_t items[] = {0, 1, 3, 31, 32, 33, 100, 1024, 9000};
    for (size_t k = 0; k < sizeof items / sizeof *items; k++)
        gather(items[k]);
}

static void test_truncated_arrays(void)
{
    struct ts_map map;
    const unsigned char *base = map_truncated_file(&map, 8192);
    static unsigned char out[4 * 4096];
    int32_t array[4] = {0};
    int64_t row[4] = {0, 1, 2, 3};
    struct ts_rows rows = {.arrays = &base, .array = array, .row = row, .row_items = 2048, .in = TS_F16, .out = TS_F16,
                           .dst = out};
    for (int threads = 1; threads < 4; threads++) {
        CHECK(ts_gather_rows(&rows, 2, threads) == TS_OK);
        CHECK(ts_gather_rows(&rows, 4, threads) == TS_ERR_FAULT);
        CHECK(ts_sigbus_fault() >= (const void *)(base + 8192));
    }
    ts_map_close(&map);
}

static void test_runs(void)
{
    for (size_t n = 1; n < 100; n = n * 3 / 2 + 1) {
        int64_t *first = malloc(n * 8), numbers[500], run[500];
        first[0] = 0;
        for (size_t r = 1; r < n; r++)
            first[r] = first[r - 1] + 1 + (int64_t)(r * 7 % 5);
        for (int64_t k = 0; k < 500; k++)
            numbers[k] = k * 37 % 500;
        ts_find_runs(first, n, numbers, 500, run);
        for (size_t k = 0; k < 500; k++) {
            CHECK(first[run[k]] <= numbers[k]);
            CHECK((size_t)run[k] == n - 1 || first[run[k] + 1] > numbers[k]);
        }
        free(first);
    }
}

static void test_rough_orders(void)
{
    for (size_t n = 1; n < 200; n = n * 2 + 1)
        for (int64_t total = 1; total < INT64_C(1) << 40; total = total * 5 + 3) {
            int64_t *numbers = malloc(n * 8), *order = malloc(n * 8), *seen = calloc(n, 8), largest = 0;
            for (size_t k = 0; k < n; k++)
                numbers[k] = (int64_t)(k * 2654435761u) % total;
            CHECK(ts_sort_roughly(numbers, n, (uint64_t)total, order) == TS_OK);
            for (size_t k = 0; k < n; k++) {
                CHECK(order[k] >= 0 && (size_t)order[k] < n && !seen[order[k]]++);
                CHECK(numbers[order[k]] + 2 * total / (int64_t)n + 1 >= largest);
                largest = numbers[order[k]] > largest ? numbers[order[k]] : largest;
            }
            free(numbers), free(order), free(seen);
        }
}

void test_rows(void)
{
    test_rough_orders();
    at_every_simd_level(test_rows_of_every_size);
    test_truncated_arrays();
    test_runs();
}
