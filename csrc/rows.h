/**
 * Rows of several arrays, gathered in any order, and the lookup of the run that a number belongs to.
 *
 * All memory belongs to the caller, and no state is kept between calls. Functions may run
 * concurrently on different outputs.
 */
#ifndef TS_ROWS_H
#define TS_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"
#include "float_convert.h"

/** Rows to gather. Arrays and output do not overlap. */
struct ts_rows {
    const unsigned char *const *arrays; /* the first row of each array; may lie in file mappings */
    const int32_t *array;               /* (n,) the array of each row */
    const int64_t *row;                 /* (n,) its number in the array */
    const int64_t *target;              /* (n,) its number in the output, each once; NULL: 0, 1, ... */
    size_t row_items;                   /* values of a row */
    enum ts_dtype in, out;              /* stored type and output type, see ts_can_copy() */
    unsigned char *dst;                 /* the output, rows of type `out` */
};

/**
 * Copy rows in several threads. Numbers of arrays and rows are not checked.
 *
 * @param n  number of rows
 * @return TS_ERR_DTYPE unless ts_can_copy(in, out), TS_ERR_FAULT if a file was truncated during the
 *         call (see sigbus_guard.h); the output is undefined then
 */
TS_WARN_UNUSED
int ts_gather_rows(const struct ts_rows *rows, size_t n, int num_threads);

/**
 * Find the run of each number, the last one that begins at or before it.
 *
 * @param first     (num_runs,) where the runs begin, ascending from 0; num_runs is positive
 * @param numbers   n numbers, none negative
 * @param run       receives the n runs
 */
void ts_find_runs(const int64_t *first, size_t num_runs, const int64_t *numbers, size_t n, int64_t *run);

/**
 * Sort numbers roughly: by ranges of [0, total) that hold one number each on average.
 *
 * @param numbers  n numbers below total
 * @param order    receives the index of each number, in ascending order of the ranges
 * @return TS_ERR_NOMEM
 */
TS_WARN_UNUSED
int ts_sort_roughly(const int64_t *numbers, size_t n, uint64_t total, int64_t *order);

#endif
