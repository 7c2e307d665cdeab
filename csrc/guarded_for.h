/**
 * Parallel loops over file mappings: ts_parallel_for() with every range under ts_sigbus_guard().
 * Loops may run concurrently; a range belongs to one thread.
 */
#ifndef TS_GUARDED_FOR_H
#define TS_GUARDED_FOR_H

#include <stddef.h>

#include "error.h"

/** A range of items that one call of the loop body processes. */
struct ts_range {
    void *context; /* the argument of ts_guarded_for() */
    size_t begin, end;
    /* Private. */
    int (*body)(struct ts_range *range);
    void *scratch;
    size_t scratch_bytes;
};

/**
 * Call a function on disjoint ranges that cover [0, n), as ts_parallel_for() does.
 *
 * @param n            number of items
 * @param grain        largest number of items in a range
 * @param num_threads  largest number of threads, the calling one included
 * @param body         processes range->begin .. range->end and returns TS_OK or an error code. It must
 *                     meet the requirements of ts_sigbus_guard() and not touch what other ranges write
 * @param context      passed to the body as range->context; borrowed for the call
 * @return TS_ERR_FAULT if a file was truncated, with ts_sigbus_fault() set in the calling thread;
 *         else TS_OK or the error of one of the ranges
 */
TS_WARN_UNUSED
int ts_guarded_for(size_t n, size_t grain, int num_threads, int (*body)(struct ts_range *range), void *context);

/**
 * Return memory for the body of a loop.
 *
 * @param bytes  size of the memory, which is aligned as by malloc() and not initialized
 * @return memory that is valid until the next call with the same range, or NULL. The loop frees it,
 *         even if a fault ends the body
 */
void *ts_range_scratch(struct ts_range *range, size_t bytes);

#endif
