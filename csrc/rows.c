#include "rows.h"

#include <stdlib.h>

#include "copy.h"
#include "guarded_for.h"
#include "stream.h"

#define RANGE_BYTES ((size_t)1 << 18)     /* bytes that a thread copies at a time */
#define PREFETCH_BYTES ((size_t)16 << 10) /* least distance of the prefetches: rows lie in random pages */
#define LANES 8                           /* searches side by side, so that their cache misses overlap */

static const unsigned char *source_of(const struct ts_rows *rows, size_t i, size_t row_bytes)
{
    return rows->arrays[rows->array[i]] + (size_t)rows->row[i] * row_bytes;
}

static int gather_rows(struct ts_range *range)
{
    const struct ts_rows *rows = range->context;
    size_t row_bytes = rows->row_items * ts_dtype_bytes(rows->in), out_bytes = rows->row_items * ts_dtype_bytes(rows->out);
    size_t distance = row_bytes == 0 ? 1 : (PREFETCH_BYTES + row_bytes - 1) / row_bytes;
    for (size_t i = range->begin; i < range->end && i < range->begin + distance; i++)
        ts_prefetch(source_of(rows, i, row_bytes), row_bytes);
    for (size_t i = range->begin; i < range->end; i++) {
        const unsigned char *src = source_of(rows, i, row_bytes);
        const unsigned char *later = range->end - i > distance ? source_of(rows, i + distance, row_bytes) : NULL;
        unsigned char *dst = rows->dst + (rows->target != NULL ? (size_t)rows->target[i] : i) * out_bytes;
        if (later != NULL && rows->in == rows->out) {
            ts_stream_copy_ahead(dst, src, row_bytes, later);
        } else {
            ts_prefetch(later, later == NULL ? 0 : row_bytes);
            ts_copy_items(dst, src, rows->row_items, rows->in, rows->out);
        }
    }
    return TS_OK;
}

int ts_gather_rows(const struct ts_rows *rows, size_t n, int num_threads)
{
    if (!ts_can_copy(rows->in, rows->out))
        return TS_ERR_DTYPE;
    size_t row_bytes = rows->row_items * ts_dtype_bytes(rows->in);
    struct ts_rows job = *rows;
    size_t grain = num_threads < 2 || row_bytes == 0 ? n : RANGE_BYTES / row_bytes + 1;
    return ts_guarded_for(n, grain, num_threads, gather_rows, &job);
}

void ts_find_runs(const int64_t *first, size_t num_runs, const int64_t *numbers, size_t n, int64_t *run)
{
    for (size_t k = 0; k < n; k += LANES) {
        size_t lanes = n - k < LANES ? n - k : LANES;
        size_t found[LANES] = {0};
        for (size_t left = num_runs, half; left > 1; left -= half) {
            half = left / 2;
            for (size_t lane = 0; lane < lanes; lane++)
                found[lane] += first[found[lane] + half] <= numbers[k + lane] ? half : 0;
        }
        for (size_t lane = 0; lane < lanes; lane++)
            run[k + lane] = (int64_t)found[lane];
    }
}

int ts_sort_roughly(const int64_t *numbers, size_t n, uint64_t total, int64_t *order)
{
    unsigned shift = 0;
    while (total >> shift > n)
        shift++;
    size_t num_ranges = (size_t)(total >> shift) + 1;
    size_t *next = calloc(num_ranges + 1, sizeof *next);
    if (next == NULL)
        return TS_ERR_NOMEM;
    for (size_t k = 0; k < n; k++)
        next[((uint64_t)numbers[k] >> shift) + 1]++;
    for (size_t r = 1; r < num_ranges; r++)
        next[r] += next[r - 1];
    for (size_t k = 0; k < n; k++)
        order[next[(uint64_t)numbers[k] >> shift]++] = (int64_t)k;
    free(next);
    return TS_OK;
}
