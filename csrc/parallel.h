/**
 * Fork-join parallelism with threads that exist for one call only. No state is kept between calls:
 * fork() is safe at any time, and a failure to create threads costs speed, never correctness. Calls
 * may run concurrently and may nest.
 */
#ifndef TS_PARALLEL_H
#define TS_PARALLEL_H

#include <stddef.h>

/** Work on the items [begin, end). Must not touch what other ranges write. */
typedef void (*ts_range_fn)(void *context, size_t begin, size_t end);

/**
 * Call a function on disjoint ranges that cover [0, n).
 *
 * The ranges depend on n and grain only; which thread processes which range is unspecified.
 *
 * @param n            number of items
 * @param grain        largest number of items in a range; 0 means 1
 * @param num_threads  largest number of threads, the calling one included
 * @param fn           called once for each range, in any thread
 * @param context      passed to fn; borrowed for the call
 */
void ts_parallel_for(size_t n, size_t grain, int num_threads, ts_range_fn fn, void *context);

#endif
